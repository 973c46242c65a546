"""How the ranks of a new world meet and agree: world id, placement, bundle digests, transfer addresses.

Rank 0 decides and publishes through the rendezvous store (a torch TCPStore that rank 0 hosts); every rank checks
that it can serve what rank 0 published, and that all replicas of an expert are the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from eplane.errors import BadInput, PlacementError, WorldEnded
from eplane.placement import Placement, linear
from runtime.collective import Alone, Exchange, Together
from runtime.options import LOOPBACK, ServeOptions, host_port

LINEAR = "linear"
_log = logging.getLogger(__name__)


class Meeting:
    """The rendezvous of one world. A world of one rank meets nobody."""

    def __init__(self, options: ServeOptions, rank: int, device: torch.device) -> None:
        self.options = options
        self.rank = rank
        self._store: Any = None
        self.exchange: Exchange = Alone()
        if options.world_size > 1:
            self._store = _join(options, rank, device)
            self.exchange = Together()

    def publish(self, name: str, value: object) -> None:
        if self._store is not None:
            self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def read(self, name: str, rank: int, own: object) -> Any:
        """What `rank` published under `name`, waiting for it; `own` is what this rank published."""
        if rank == self.rank or self._store is None:
            return own
        try:
            return json.loads(self._store.get(f"{name}/{rank}"))
        except (RuntimeError, dist.DistError) as error:
            raise WorldEnded(f"rank {rank} did not tell its {name} in time: {error}") from error

    def gather(self, name: str, value: object) -> list[Any]:
        """What every rank says under `name`, by rank."""
        self.publish(name, value)
        return [self.read(name, rank, value) for rank in range(self.options.world_size)]

    def from_first(self, name: str, value: object) -> Any:
        """What rank 0 says under `name`; the others' `value` is not looked at."""
        if self.rank == 0:
            self.publish(name, value)
        return self.read(name, 0, value)


def _join(options: ServeOptions, rank: int, device: torch.device) -> Any:
    host, port = host_port(options.master, "--master")
    if host in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, port, options.world_size, rank == 0, timeout=timedelta(seconds=options.start_timeout_s)
        )
        dist.init_process_group(
            dist.get_default_backend_for_device(device),
            store=c10d.PrefixStore("ranks", store),
            rank=rank,
            world_size=options.world_size,
            timeout=timedelta(seconds=options.collective_timeout_s),
        )
    except (RuntimeError, dist.DistError) as error:
        if rank == 0 and "address already in use" in str(error).lower():
            raise BadInput(f"--master {options.master}: the port is in use") from error
        raise WorldEnded(f"rank {rank} could not join the world at {options.master}: {error}") from error
    return store


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks of a world agreed on at its start."""

    world: str
    placement: Placement


def agree_on_world(meeting: Meeting, layers: int, experts: int, facts: object) -> Agreed:
    """World id and placement from rank 0. `facts`: what must be equal on all ranks (model, manifest, settings)."""
    named = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
    first: dict[str, Any] | None = None
    if meeting.rank == 0:
        placement = first_placement(meeting.options, layers, experts)
        first = {
            "world": secrets.token_hex(8),
            "facts": named,
            "p2l": placement.p2l.tolist(),
            "digest": placement.digest,
        }
    told = meeting.from_first("world", first)
    if told["facts"] != named:
        raise WorldEnded(f"rank {meeting.rank} was started with another model or other settings than rank 0")
    placement = Placement(np.array(told["p2l"], dtype=np.int32), meeting.options.world_size, experts)
    if placement.digest != told["digest"]:
        raise WorldEnded(f"rank {meeting.rank} reads placement {placement.digest}, rank 0 published {told['digest']}")
    return Agreed(told["world"], placement)


def agree_on_digests(
    meeting: Meeting, own: dict[tuple[int, int], str], layers: int, experts: int
) -> tuple[tuple[str, ...], ...]:
    """`[L][E]` digest of every bundle, from the ranks that hold it. Raises WorldEnded when two replicas differ."""
    table: list[list[str]] = [[""] * experts for _ in range(layers)]
    said = meeting.gather("digests", [[layer, expert, digest] for (layer, expert), digest in own.items()])
    for rank, entries in enumerate(said):
        for layer, expert, digest in entries:
            if table[layer][expert] not in ("", digest):
                raise WorldEnded(f"layer {layer}, expert {expert}: rank {rank} holds other bytes than another rank")
            table[layer][expert] = digest
    return tuple(tuple(row) for row in table)


def first_placement(options: ServeOptions, layers: int, experts: int) -> Placement:
    """The one given by option, else the last one kept on disk if it fits, else linear."""
    slots = slots_of(options, experts)
    if options.placement is not None and options.placement != LINEAR:
        return _read_placement(Path(options.placement), options.world_size, layers, experts, slots)
    kept = options.state_file
    if options.placement is None and kept is not None and kept.is_file():
        try:
            return _read_placement(kept, options.world_size, layers, experts, slots)
        except BadInput:
            pass  # Kept by a world of another shape: of no use to this one.
    return linear(layers, experts, options.world_size, slots)


def slots_of(options: ServeOptions, experts: int) -> int:
    """K of this world: as given, else just enough for every expert once. Raises BadInput when they do not fit."""
    needed = -(-experts // options.world_size)
    slots = needed if options.slots is None else options.slots
    if slots < needed:
        raise BadInput(
            f"{experts} experts do not fit {options.world_size} ranks x {slots} slots; give at least --slots {needed}"
        )
    return slots


def _read_placement(file: Path, ranks: int, layers: int, experts: int, slots: int) -> Placement:
    try:
        given = json.loads(file.read_text())
        placement = Placement(np.array(given["p2l"], dtype=np.int32), ranks, experts)
    except (OSError, ValueError, KeyError, TypeError, PlacementError) as error:
        raise BadInput(f"{file}: not a placement for this world: {error}") from error
    if placement.p2l.shape != (layers, ranks * slots):
        raise BadInput(f"{file}: the placement has shape {placement.p2l.shape}, this world {(layers, ranks * slots)}")
    return placement


def keep_placement(file: Path, placement: Placement) -> None:
    """Write the live placement for the next life of this group, all or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps({"v": 1, "digest": placement.digest, "p2l": placement.p2l.tolist()}))
    part.replace(file)


class PlacementKeeper:
    """Writes the newest live placement to disk from a thread of its own, so that no step waits for the disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._newest: queue.SimpleQueue[Placement] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="keep-placement", daemon=True).start()

    def keep(self, placement: Placement) -> None:
        self._newest.put(placement)

    def _run(self) -> None:
        while True:
            placement = self._newest.get()
            try:
                keep_placement(self._file, placement)
            except OSError as error:
                # Serving goes on: at worst the next life of this group starts from an older placement.
                _log.warning("the live placement is not kept at %s: %s", self._file, error)


def same_digest(exchange: Exchange, placement: Placement, device: torch.device) -> None:
    """Compare the live digest of all ranks over the very exchange that serves. Raises WorldEnded."""
    ones: Sequence[int] = [1] * exchange.ranks
    mine = torch.full((exchange.ranks, 1), placement.digest64, dtype=torch.int64, device=device)
    seen = exchange.all_to_all(mine, ones, ones).flatten().tolist()
    if seen != [placement.digest64] * exchange.ranks:
        raise WorldEnded(f"rank {exchange.rank} starts with placement {placement.digest}, not all ranks do")
