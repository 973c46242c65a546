"""One rank: a process that loads its part of a model, joins its world and serves until it is told to stop.

Threads: the main one runs the engine; one reads what the launcher says; the engine link, transfers and staging have
their own (see runtime.port). Only the main thread starts collectives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from eplane.errors import BadInput, EPlaneError, QueueFull
from eplane.placement import IntTable, Placement
from runtime import wire
from runtime.cells import CellPool, CellState
from runtime.checkpoint import model_dir
from runtime.dispatch import Dispatcher
from runtime.engine import Engine, StepReport
from runtime.faults import Faults
from runtime.forward import Forward
from runtime.kvcache import PagePool
from runtime.link.counters import CounterWriter
from runtime.link.manifest import bundle_digest
from runtime.link.server import LinkServer
from runtime.model import ServedModel, attach, load_model
from runtime.options import LOOPBACK, ServeOptions, host_port
from runtime.port import RankFacts, RankPort
from runtime.routing import RoutingSampler, most_tokens
from runtime.sampling import Sampling
from runtime.scheduler import Produced, Request, Scheduler
from runtime.stats import StepStats
from runtime.switch import Switch
from runtime.tables import build_table
from runtime.transfer import TransferServer, bundle_lookup
from runtime.worldstart import (
    Meeting,
    PlacementKeeper,
    agree_on_digests,
    agree_on_world,
    same_digest,
    slots_of,
)

ARMED_TICK_S = 0.003
"""Pause between ticks while something is armed: the switch waits for nothing but ticks then."""

_PR_SET_PDEATHSIG = 1


def rank_main(options_text: str, rank: int, connection: Connection) -> None:
    """The whole life of a rank; never returns. Exit code 0 when told to stop, else the error's."""
    _die_with_parent()
    # Ctrl-C reaches the whole process group; the launcher alone decides when ranks stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    code = 1
    try:
        options = ServeOptions.from_json(options_text)
        _serve(options, rank, connection)
        code = 0
    except EPlaneError as error:
        code = error.exit_code
        _last_word(connection, str(error), code)
    except Exception as error:
        traceback.print_exc()
        _last_word(connection, f"rank {rank}: {type(error).__name__}: {error}", code)
    finally:
        sys.stderr.flush()
        # Threads of torch and gloo may wait for peers that are gone; nothing is left to tidy up that the end of the
        # process does not tidy up better.
        os._exit(code)


def _last_word(connection: Connection, reason: str, code: int) -> None:
    with contextlib.suppress(OSError):
        wire.send(connection, wire.ENDED, reason=reason, code=code)


def _die_with_parent() -> None:
    """The forkserver dies with the launcher, and this rank with the forkserver: no orphan, even after SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _serve(options: ServeOptions, rank: int, connection: Connection) -> None:
    inbox = Inbox(connection)
    device = find_device(options, rank)
    model = load_model(model_dir(options.model), Path(options.model).name, torch.float32, device)
    slots = slots_of(options, model.shape.experts)
    meeting = Meeting(options, rank, device)
    facts = {
        "shape": [model.shape.layers, model.shape.experts, model.shape.top_k, model.shape.bundle_bytes],
        "slots": slots,
        "settings": [options.group, options.window_steps, options.deterministic, list(options.nodes)],
    }
    agreed = agree_on_world(meeting, model.shape.layers, model.shape.experts, facts)
    with contextlib.ExitStack() as stack:
        parts = _build(options, meeting, model, agreed.world, agreed.placement, device, stack)
        same_digest(meeting.exchange, agreed.placement, device)
        wire.send(
            connection,
            wire.READY,
            world=agreed.world,
            digest=agreed.placement.digest,
            model=model.shape.model,
            vocabulary=model.vocabulary,
            context=min(model.context_tokens, parts.pages.capacity_tokens),
            kv_tokens=parts.pages.capacity_tokens,
        )
        _loop(options, rank, parts, inbox, connection, model.end_tokens)


def find_device(options: ServeOptions, rank: int) -> torch.device:
    """The accelerator that torch finds, one a rank of a node; the CPU when there is none or it is asked for."""
    if options.device == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        if options.device != "auto":
            raise BadInput(f"--device {options.device}: no accelerator is there")
        return torch.device("cpu")
    local = [r for r, node in enumerate(options.nodes) if node == options.node].index(rank)
    device = torch.device(found.type, local % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


@dataclass(frozen=True, slots=True)
class RankParts:
    engine: Engine
    pool: CellPool
    pages: PagePool


def _build(
    options: ServeOptions,
    meeting: Meeting,
    model: ServedModel,
    world: str,
    placement: Placement,
    device: torch.device,
    stack: contextlib.ExitStack,
) -> RankParts:
    """Everything of a rank, wired; what must be closed is on `stack`."""
    rank, shape = meeting.rank, model.shape
    spare = 2 * shape.layers if options.spare_cells is None else options.spare_cells
    pool = CellPool(model.manifest, shape.layers * placement.slots + spare, device)
    cell_of, own = fill_cells(pool, model, placement, rank)
    digests = agree_on_digests(meeting, own, shape.layers, shape.experts)
    faults = Faults.named(options.fault, rank)
    switch = Switch(build_table(placement, rank, cell_of, device=device), pool, faults)
    dispatcher = Dispatcher(
        meeting.exchange, pool, model.experts, int(model.network.config.hidden_size), torch.float32, shape.top_k,
        switch.check, switch.agree, fixed_tiles=options.deterministic,
    )  # fmt: skip
    pages = PagePool(options.kv_tokens)
    forward = Forward(model, pages.pages, device, deterministic=options.deterministic)
    attach(model, dispatcher.layer, forward.context)
    transfer = TransferServer(pool, bundle_lookup(pool, world, digests), _transfer_host(options))
    addresses = dict(enumerate(meeting.gather("transfer", transfer.address)))
    facts = RankFacts(
        world, options.group, rank, options.nodes, shape.model, shape.layers, shape.experts, shape.top_k,
        placement.slots,
    )  # fmt: skip
    most = most_tokens(shape.layers, shape.top_k, options.routing_sample)
    # The seed is fixed by world and rank, so that a run can be told again.
    sampler = RoutingSampler(rank, shape.layers, shape.top_k, most, int(world, 16) + rank) if most else None
    port = RankPort(
        facts, pool, switch, transfer, digests, model.bundles.bundle_bytes, addresses=addresses, faults=faults,
        samples=None if sampler is None else sampler.since,
    )  # fmt: skip
    stack.callback(port.close)
    link = Path(options.link_dir or ".")
    counters = CounterWriter(
        link / f"rank{rank}.counters", world, rank, shape.layers, placement.slots, options.window_steps
    )
    stack.callback(counters.close)
    server = LinkServer(port, link / f"rank{rank}.sock")
    stack.callback(server.close)
    scheduler = Scheduler(pages, options.max_tokens_per_step, options.queue)
    return RankParts(Engine(forward, dispatcher, scheduler, switch, counters, sampler), pool, pages)


def _transfer_host(options: ServeOptions) -> str:
    if options.transfer_host is not None:
        return options.transfer_host
    host, _ = host_port(options.master, "--master")
    return "127.0.0.1" if host in LOOPBACK else _own_address(host)


def _own_address(peer: str) -> str:
    """The address of this machine on the way to `peer`; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except OSError as error:
            raise BadInput(f"--master {peer}: {error}") from error
        return str(probe.getsockname()[0])


def fill_cells(
    pool: CellPool, model: ServedModel, placement: Placement, rank: int
) -> tuple[IntTable, dict[tuple[int, int], str]]:
    """Load the bundles of the rank's slots. Returns `cell_of [L, K]` and the digest of each (layer, expert)."""
    table = placement.by_rank()[:, rank]
    cell_of = np.full(table.shape, -1, dtype=np.int32)
    digests: dict[tuple[int, int], str] = {}
    for layer, k in zip(*np.nonzero(table >= 0), strict=True):
        expert = int(table[layer, k])
        raw = model.bundles.bundle_bytes(int(layer), expert)
        digest = bundle_digest([raw])
        digests[int(layer), expert] = digest
        cell_of[layer, k] = pool.hold(int(layer), expert, raw, digest)
    return cell_of, digests


class Inbox:
    """Messages of the launcher, read by a thread of its own, so that its end is seen even inside a collective."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[wire.Message] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="inbox", daemon=True).start()

    def take(self, timeout_s: float) -> list[wire.Message]:
        """All messages that are there; waits at most `timeout_s` for the first."""
        messages: list[wire.Message] = []
        try:
            messages.append(self._queue.get(timeout=timeout_s) if timeout_s > 0 else self._queue.get_nowait())
            while True:
                messages.append(self._queue.get_nowait())
        except queue.Empty:
            return messages

    def _read(self) -> None:
        try:
            while True:
                self._queue.put(wire.receive(self._connection))
        except (EOFError, OSError):
            os._exit(0)  # The launcher is gone, and with it everyone this rank could serve.


def _loop(
    options: ServeOptions,
    rank: int,
    parts: RankParts,
    inbox: Inbox,
    connection: Connection,
    end_tokens: frozenset[int],
) -> None:
    engine, stats = parts.engine, StepStats()
    keeper = PlacementKeeper(options.state_file) if rank == 0 and options.state_file is not None else None
    pause = 0.0
    while True:
        for message in inbox.take(pause):
            if message["is"] == wire.STOP:
                return
            _heed(engine.scheduler, message, connection, end_tokens)
        report = engine.step()
        stats.note(report, report.total > 0 and _wave_open(parts.pool))
        if report.produced:
            wire.send(connection, wire.TOKENS, items=[_item(p) for p in report.produced])
        if report.switched and keeper is not None:
            keeper.keep(engine.switch.live.placement)
        if stats.due() or report.switched:
            live = engine.switch.live
            wire.send(
                connection,
                wire.STATS,
                digest=live.digest,
                epoch=live.epoch,
                waiting=engine.scheduler.waiting,
                running=engine.scheduler.running,
                pages_free=parts.pages.free,
                **stats.take(),
            )
        pause = _pause(options, engine, report)


def _pause(options: ServeOptions, engine: Engine, report: StepReport) -> float:
    """How long to wait for a message before the next step: not at all while anyone has work."""
    if report.total or engine.scheduler.waiting or engine.scheduler.running:
        return 0.0
    return ARMED_TICK_S if engine.switch.armed is not None else options.tick_ms / 1000.0


def _wave_open(pool: CellPool) -> bool:
    """A bundle is on its way in, waits for its switch, or waits to be let go."""
    return pool.count(CellState.FREE) + pool.count(CellState.LIVE) < pool.cells


def _heed(scheduler: Scheduler, message: wire.Message, connection: Connection, end_tokens: frozenset[int]) -> None:
    if message["is"] == wire.CANCEL:
        scheduler.cancel(int(message["id"]))
        return
    try:
        sampling = Sampling(message["temperature"], message["top_p"], message["seed"], message["logprobs"])
        ends = frozenset() if message["ignore_end"] else end_tokens
        scheduler.add(Request(message["id"], tuple(message["prompt"]), message["max_tokens"], sampling, ends))
    except QueueFull as error:
        wire.send(connection, wire.REFUSED, id=message["id"], code=wire.FULL, reason=str(error))
    except BadInput as error:
        wire.send(connection, wire.REFUSED, id=message["id"], code=wire.BAD, reason=str(error))


def _item(produced: Produced) -> list[object]:
    chosen = produced.chosen
    return [produced.request, chosen.token, chosen.logprob, produced.finish, chosen.top]
