"""A model engine: a whole group of ranks in one process, without torch, that moves numbered bundles.

It keeps to the engine link's contract by other means than the embedded runtime (dictionaries instead of cells, one
thread instead of collectives), so that a suite which both pass tests the contract and not one implementation.
Run as a process it serves the links and counters of all its ranks:

    python -m tests.link.model_engine --dir DIR --nodes n0,n0,n1,n1 --layers 4 --experts 8 --slots 3 --spare 4

with sockets and counters under DIR/<node>/. Its traffic is a fixed skew over the experts.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from eplane.errors import LinkRefused, PlacementError
from eplane.placement import FloatTable, Placement, check_shares, linear
from eplane.plan import Identity, LeaderEpoch
from eplane.routing import RankSample, TokenSample
from eplane.topology import Capabilities
from runtime.link.counters import CounterWriter
from runtime.link.fence import LeaderFence
from runtime.link.manifest import BundleManifest, TensorSpec, bundle_digest, manifest_digest
from runtime.link.messages import (
    Describe,
    ErrorCode,
    Live,
    ManifestReply,
    PlacementReply,
    RankStatus,
    StageCommand,
    Staged,
    StagedState,
    identity_hash,
)
from runtime.link.samples import SamplesReply
from runtime.link.server import LinkServer

MANIFEST = BundleManifest((TensorSpec("number", "int64", (2,)),))
Bundle = tuple[int, int]


def numbered(layer: int, expert: int) -> bytes:
    """The bundle of an expert: its two numbers."""
    return np.array([layer, expert], dtype="<i8").tobytes()


def numbered_digests(layers: int, experts: int) -> list[list[str]]:
    return [[bundle_digest([numbered(layer, expert)]) for expert in range(experts)] for layer in range(layers)]


class ModelWave:
    """What one rank has staged. `missing`: bundles still to come, one a step."""

    def __init__(self, command: StageCommand, target: Placement, missing: list[Bundle]) -> None:
        self.command = command
        self.target = target
        self.missing = missing
        self.total = len(missing)
        self.received: dict[Bundle, bytes] = {}
        self.reason: str | None = None

    @property
    def state(self) -> StagedState:
        if self.reason is not None:
            return StagedState.FAILED
        return StagedState.STAGING if self.missing else StagedState.VERIFIED


class ModelRank:
    """One rank of a ModelGroup: its engine port, and its part of a step. The group's lock guards all of it."""

    def __init__(self, group: ModelGroup, rank: int, cells: int) -> None:
        self.group = group
        self.rank = rank
        self.cells = cells
        self.fence = LeaderFence()
        self.placement_live = group.start
        self.shares = group.start.even_shares()
        self.epoch: int | None = None
        own = group.start.by_rank()[:, rank]
        self.held: dict[Bundle, bytes] = {
            (int(a), int(own[a, k])): numbered(int(a), int(own[a, k]))
            for a, k in zip(*np.nonzero(own >= 0), strict=True)
        }
        self.retired = 0
        self.staged: ModelWave | None = None
        self.armed_wave: ModelWave | None = None
        self.last_switched: Identity | None = None
        self.switched: set[Identity] = set()
        self.last_step_under_old: int | None = None
        self.aborted: set[Identity] = set()
        self.sampled: deque[RankSample] = deque(maxlen=16)

    # The engine port

    def hello(self, leader_epoch: LeaderEpoch | None) -> None:
        if leader_epoch is not None:
            self.fence.hear(leader_epoch)

    def describe(self) -> Describe:
        group, start = self.group, self.group.start
        with group.lock:
            return Describe(
                group.world, group.name, self.rank, group.nodes[self.rank], group.nodes, "numbered",
                start.layers, start.experts, group.top_k, start.slots, self.cells, self.cells_free, MANIFEST.bundle_bytes,
                Capabilities(routing_sample=group.samples), self.placement_live.digest, self.epoch, group.manifest_digest,
                f"model:{self.rank}", group.step_number,
            )  # fmt: skip

    def manifest(self) -> ManifestReply:
        return ManifestReply(MANIFEST, tuple(tuple(row) for row in self.group.digests))

    def placement(self) -> PlacementReply:
        with self.group.lock:
            live = self.placement_live
            return PlacementReply(live.digest, self.epoch, live.p2l, self.shares)

    def adopt(self, world: str, epoch: int, digest: str, leader_epoch: LeaderEpoch) -> None:
        with self.group.lock:
            self._check_world(world)
            new_cluster = self.fence.is_new_cluster(leader_epoch)
            if new_cluster and self.armed_wave is not None:
                raise LinkRefused(ErrorCode.ALREADY_ARMED, "a wave is armed")
            if digest != self.placement_live.digest:
                raise LinkRefused(ErrorCode.DIGEST_MISMATCH, f"{self.placement_live.digest} is live")
            self.fence.adopt(leader_epoch)
            if new_cluster:
                self.staged = None
            self.epoch = epoch

    def stage(self, command: StageCommand) -> RankStatus:
        with self.group.lock:
            identity = command.identity
            self._check(identity, command.leader_epoch)
            old = self.staged
            if (identity == self.armed or identity in self.switched) or (
                old is not None and old.command.identity == identity and old.state is not StagedState.FAILED
            ):
                return self.status()
            if identity in self.aborted:
                raise LinkRefused(ErrorCode.UNKNOWN_IDENTITY, "that wave was aborted")
            base = self.placement_live if self.armed_wave is None else self.armed_wave.target
            base_epoch = self.epoch if self.armed_wave is None else self.armed_wave.command.identity.epoch
            if command.base_digest != base.digest or (base_epoch is not None and identity.epoch <= base_epoch):
                raise LinkRefused(ErrorCode.WRONG_BASE, f"this rank stands at {base.digest}")
            if (
                old is not None
                and old.command.identity.migration == identity.migration
                and old.command.identity != identity
            ):
                raise LinkRefused(ErrorCode.BUSY, "another wave of the migration is staged")
            self.staged = None
            self.staged = self._open(command, base)
            return self.status()

    def status(self) -> RankStatus:
        with self.group.lock:
            wave = self.staged
            staged = None
            if wave is not None:
                done = len(wave.received)
                size = done * MANIFEST.bundle_bytes
                staged = Staged(wave.command.identity, wave.state, done, wave.total, size, wave.reason)
            clean = wave is None and self.armed_wave is None and self.retired == 0
            return RankStatus(
                self.group.world, self.rank, self.group.step_number, Live(self.epoch, self.placement_live.digest),
                self.fence.current, self.armed, staged, self.last_switched, self.last_step_under_old, clean,
                self.cells_free, self.retired,
            )  # fmt: skip

    def arm(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus:
        with self.group.lock:
            self._check(identity, leader_epoch)
            if identity == self.armed or identity in self.switched:
                return self.status()
            wave = self.staged
            if wave is None or wave.command.identity != identity:
                raise LinkRefused(ErrorCode.UNKNOWN_IDENTITY, "that wave is not staged")
            if wave.state is not StagedState.VERIFIED:
                raise LinkRefused(ErrorCode.NOT_VERIFIED, "that wave is not verified")
            if self.armed_wave is not None:
                raise LinkRefused(ErrorCode.ALREADY_ARMED, "another wave is armed")
            if wave.command.base_digest != self.placement_live.digest:
                raise LinkRefused(ErrorCode.WRONG_BASE, "the wave's base is not live")
            self.armed_wave, self.staged = wave, None
            return self.status()

    def abort(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus:
        with self.group.lock:
            self._check(identity, leader_epoch)
            if identity == self.armed or identity in self.switched:
                raise LinkRefused(ErrorCode.ALREADY_ARMED, "there is no way back")
            self.aborted.add(identity)
            if self.staged is not None and self.staged.command.identity == identity:
                self.staged = None
            return self.status()

    def set_shares(self, digest: str, shares: FloatTable) -> bool:
        with self.group.lock:
            if digest != self.placement_live.digest:
                return False
            try:
                self.shares = check_shares(self.placement_live, shares)
            except PlacementError as error:
                raise LinkRefused(ErrorCode.BAD_REQUEST, str(error)) from error
            return True

    def samples(self, after_step: int) -> SamplesReply:
        with self.group.lock:
            found = tuple(one for one in self.sampled if one.last_step > after_step)
            return SamplesReply(self.group.world, found)

    # Its part of a step

    @property
    def armed(self) -> Identity | None:
        return None if self.armed_wave is None else self.armed_wave.command.identity

    @property
    def cells_free(self) -> int:
        waves = [wave for wave in (self.staged, self.armed_wave) if wave is not None]
        incoming = sum(wave.total for wave in waves if wave.state is not StagedState.FAILED)
        return self.cells - len(self.held) - self.retired - incoming

    def receive(self) -> None:
        """One bundle of the staged wave arrives: from its source, else from the checkpoint (the numbers themselves)."""
        wave = self.staged
        if wave is None or not wave.missing or wave.reason is not None or self.group.held_back():
            return
        bundle = wave.missing[0]
        source = next(m.source_rank for m in wave.command.loads if (m.layer, m.expert) == bundle)
        raw = self.group.ranks[source].held.get(bundle) or numbered(*bundle)
        if bundle_digest([raw]) != self.group.digests[bundle[0]][bundle[1]]:
            wave.reason = f"layer {bundle[0]}, expert {bundle[1]}: wrong digest"
            return
        wave.received[bundle] = raw
        del wave.missing[0]

    def switch(self, step: int) -> None:
        wave = self.armed_wave
        if wave is None:
            return
        own = wave.target.by_rank()[:, self.rank]
        needed = {(int(a), int(own[a, k])) for a, k in zip(*np.nonzero(own >= 0), strict=True)}
        everything = {**self.held, **wave.received}
        self.retired = len(everything) - len(needed)
        self.held = {bundle: everything[bundle] for bundle in needed}
        self.placement_live = wave.target
        shares = wave.command.shares
        self.shares = wave.target.even_shares() if shares is None else shares
        self.epoch = wave.command.identity.epoch
        self.last_switched = wave.command.identity
        self.switched.add(wave.command.identity)
        self.last_step_under_old = step - 1
        self.armed_wave = None

    def _open(self, command: StageCommand, base: Placement) -> ModelWave:
        try:
            target = base.apply(command.changes)
            if command.shares is not None:
                check_shares(target, command.shares)
        except PlacementError as error:
            raise LinkRefused(ErrorCode.BAD_REQUEST, str(error)) from error
        if target.digest != command.identity.digest:
            raise LinkRefused(ErrorCode.DIGEST_MISMATCH, f"the changes lead to {target.digest}")
        missing = [(layer, expert) for layer, expert, rank in base.moves(target) if rank == self.rank]
        if sorted(missing) != sorted((m.layer, m.expert) for m in command.loads):
            raise LinkRefused(ErrorCode.BAD_REQUEST, f"this rank lacks {missing}")
        if len(missing) > self.cells_free:
            raise LinkRefused(ErrorCode.CAPACITY, f"{len(missing)} bundles, {self.cells_free} free cells")
        return ModelWave(command, target, missing)

    def _check(self, identity: Identity, leader_epoch: LeaderEpoch) -> None:
        self._check_world(identity.world)
        self.fence.check(leader_epoch)

    def _check_world(self, world: str) -> None:
        if world != self.group.world:
            raise LinkRefused(ErrorCode.UNKNOWN_WORLD, f"this is world {self.group.world}")


class ModelGroup:
    """All ranks of one world. `step` is one step of all of them; `hold` keeps bundles from arriving."""

    def __init__(
        self,
        nodes: Sequence[str],
        layers: int,
        experts: int,
        slots: int,
        spare: int,
        *,
        top_k: int = 2,
        name: str = "g",
        samples: bool = True,
    ) -> None:
        self.lock = threading.RLock()
        self.world = secrets.token_hex(8)
        self.name = name
        self.nodes = tuple(nodes)
        self.top_k = top_k
        self.samples = samples
        self.start = linear(layers, experts, len(self.nodes), slots)
        self.digests = numbered_digests(layers, experts)
        self.manifest_digest = manifest_digest(MANIFEST, self.digests)
        self.step_number = -1
        self.hold = False
        self.hold_file: Path | None = None
        self.due = False
        self.ranks = [ModelRank(self, rank, layers * slots + spare) for rank in range(len(self.nodes))]

    def held_back(self) -> bool:
        return self.hold or (self.hold_file is not None and self.hold_file.exists())

    def sample(self, first_step: int, last_step: int, tokens: int = 100) -> None:
        """Every rank has a sample of this window: experts e, e + 1, .. of a token, the same in every layer."""
        with self.lock:
            for rank in self.ranks:
                begin = np.random.default_rng([last_step, rank.rank]).integers(self.start.experts, size=8)
                ids = (begin[:, None] + np.arange(self.top_k)) % self.start.experts
                tuples = np.repeat(ids[:, None], self.start.layers, axis=1)
                rank.sampled.append(RankSample(rank.rank, first_step, last_step, TokenSample(tokens, tuples)))

    def step(self) -> bool:
        """Runs one step; True if it began with a switch. Digests of all ranks must agree, as in the real exchange."""
        with self.lock:
            self.step_number += 1
            switched = self.due
            for rank in self.ranks:
                rank.retired = 0
                if self.due:
                    rank.switch(self.step_number)
            self.due = False
            if len({rank.placement_live.digest for rank in self.ranks}) != 1:
                raise RuntimeError("ranks serve different placements")
            samples = {0 if rank.armed is None else identity_hash(rank.armed) for rank in self.ranks}
            self.due = len(samples) == 1 and samples != {0}
            for rank in self.ranks:
                rank.receive()
            return switched


def serve(group: ModelGroup, folder: Path, window_steps: int, tick_s: float, ended: Callable[[], bool]) -> None:
    """Steps `group` until `ended`, with the link and counters of each rank under `folder`/<node>/."""
    shape = group.start
    servers, writers = [], []
    for rank, node in enumerate(group.nodes):
        (folder / node).mkdir(parents=True, exist_ok=True)
        path = folder / node / f"rank{rank}"
        writers.append(
            CounterWriter(path.with_suffix(".counters"), group.world, rank, shape.layers, shape.slots, window_steps)
        )
        servers.append(LinkServer(group.ranks[rank], path.with_suffix(".sock")))
    loads = 4096.0 / (1 + np.arange(shape.experts)) ** 0.7
    cut = 0
    while not ended():
        before = group.ranks[0].placement_live
        switched = group.step()
        live = group.ranks[0].placement_live
        counts = np.where(live.p2l >= 0, loads[live.p2l] * group.ranks[0].shares, 0).astype(np.int64)
        due = switched or writers[0].due(group.step_number)
        if due and group.samples and group.step_number > cut:
            group.sample(cut, group.step_number)
            cut = group.step_number
        for rank, writer in enumerate(writers):
            if due:
                writer.cut(group.step_number, before.digest)
            own = counts.reshape(shape.layers, shape.ranks, shape.slots)[:, rank]
            writer.add(group.step_number, own // 4, own - own // 4)
        time.sleep(tick_s)
    for server in servers:
        server.close()
    for writer in writers:
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--nodes", required=True)
    parser.add_argument("--group", default="g")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--spare", type=int, default=4)
    parser.add_argument("--window-steps", type=int, default=8)
    parser.add_argument("--tick-ms", type=float, default=20.0)
    parser.add_argument("--hold-file", type=Path, help="while this file exists, no bundle arrives")
    args = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    group = ModelGroup(args.nodes.split(","), args.layers, args.experts, args.slots, args.spare, name=args.group)
    group.hold_file = args.hold_file
    serve(group, args.dir, args.window_steps, args.tick_ms / 1000, stop.is_set)


if __name__ == "__main__":
    main()
