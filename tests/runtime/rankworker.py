"""Ranks of a small world in processes of their own, without engine or HTTP: what they compute is sent back raw."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOAD = ["torch", "torch.distributed", "runtime.preload", "tests.runtime.local"]


@dataclass(frozen=True, slots=True)
class Case:
    """One checkpoint under one random placement. `tokens[r]`: what rank r runs, `cuts`: ends of its chunks, in steps.

    `fused_bytes`: limit of one message of counts and rows (0: always exact counts first).
    """

    folder: str
    seed: int
    slots: int
    tokens: list[list[int]]
    cuts: list[int]
    deterministic: bool = True
    fused_bytes: int = 131072
    seed_of_last_rank: int | None = None  # Another placement there: what must end the world.


@dataclass(frozen=True, slots=True)
class Outcome:
    """`logits` float32 bytes of the rank's rows; `arrived [2][L][K]`; `routed [L][E]` own choices of experts;

    `exchanges` of each step; `error`: how the rank's world ended.
    """

    logits: bytes
    arrived: list[list[list[int]]]
    routed: list[list[int]]
    exchanges: list[int]
    error: str


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_world(ranks: int, cases: Sequence[Case]) -> list[list[Outcome]]:
    """Outcomes `[case][rank]`."""
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive", HF_HUB_OFFLINE="1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    port, text = free_port(), json.dumps([asdict(case) for case in cases])
    pipes, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(text, rank, ranks, port, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        outcomes: list[list[Outcome]] = []
        for _ in cases:
            row = []
            for pipe in pipes:
                if not pipe.poll(120):
                    raise TimeoutError("a rank says nothing")
                row.append(Outcome(pipe.recv_bytes(), **json.loads(pipe.recv_bytes())))
            outcomes.append(row)
        return outcomes
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def work(text: str, rank: int, ranks: int, port: int, connection: Connection) -> None:
    import torch

    from runtime.options import ServeOptions
    from runtime.worldstart import Meeting

    torch.set_num_threads(1)
    nodes = ("n",) * ranks
    options = ServeOptions(
        "test", world_size=ranks, ranks=(rank,), nodes=nodes, node="n", master=f"127.0.0.1:{port}",
        collective_timeout_s=60.0,
    )  # fmt: skip
    exchange = Counted(Meeting(options, rank, torch.device("cpu")).exchange)
    models: dict[str, Any] = {}
    for entry in json.loads(text):
        case = Case(**entry)
        logits, rest = run_case(case, rank, exchange, models)
        connection.send_bytes(logits)
        connection.send_bytes(json.dumps(rest).encode())
    connection.poll(120)  # The parent ends this process; leaving early would end the peers' world.


class Counted:
    """An exchange that counts."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.count = inner, 0
        self.rank, self.ranks = inner.rank, inner.ranks

    def all_to_all(self, send: Any, send_rows: Sequence[int], receive_rows: Sequence[int]) -> Any:
        self.count += 1
        return self.inner.all_to_all(send, send_rows, receive_rows)


def run_case(case: Case, rank: int, exchange: Counted, models: dict[str, Any]) -> tuple[bytes, dict[str, object]]:
    import torch

    import runtime.dispatch
    from eplane.errors import WorldEnded
    from runtime.attention import Span
    from runtime.model import load_model
    from tests.runtime.local import CPU, local_rank

    runtime.dispatch.FUSED_BYTES = case.fused_bytes
    if case.folder not in models:
        models[case.folder] = load_model(Path(case.folder), "t", torch.float32, CPU)
    last = rank == exchange.ranks - 1 and case.seed_of_last_rank is not None
    seed = case.seed_of_last_rank if last else case.seed
    one = local_rank(
        Path(case.folder), seed, slots=case.slots, exchange=exchange, deterministic=case.deterministic,
        model=models[case.folder],
    )  # fmt: skip
    shape = one.model.shape
    routed = torch.zeros((shape.layers, shape.experts), dtype=torch.int64)
    arrived = torch.zeros((2, shape.layers, case.slots), dtype=torch.int64)
    usual = one.dispatcher.layer

    def spy(layer: int, hidden: Any, index: Any, weights: Any) -> Any:
        routed[layer] += torch.bincount(
            index[: one.dispatcher._running().phases.shape[0]].flatten(), minlength=shape.experts
        )
        return usual(layer, hidden, index, weights)

    for layer, module in enumerate(one.model.experts):
        object.__setattr__(module, "eplane_dispatch", lambda h, i, w, at=layer: spy(at, h, i, w))
    mine, rows, exchanges, start, error = case.tokens[rank], [], [], 0, ""
    try:
        for step, cut in enumerate(case.cuts):
            before, part = exchange.count, mine[start:cut]
            if part:
                span = Span(start, len(part), (3, 9, 4, 11))
                rows.append(one.logits(step, [(part, span)], decode=step > 0))
            else:
                one.dispatcher.begin(one.table, step, 0, torch.zeros(0, dtype=torch.int64))
                one.dispatcher.join()
            exchanges.append(exchange.count - before)
            arrived += one.dispatcher.arrived
            start = cut
    except WorldEnded as ended:
        error = str(ended)
    logits = torch.cat(rows).numpy().tobytes() if rows else b""
    rest = {"arrived": arrived.tolist(), "routed": routed.tolist(), "exchanges": exchanges, "error": error}
    return logits, rest
