"""Real rank ends (cells, switch, transfers, port) in one process, with numbered bundles instead of weights."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from eplane.errors import PlacementError
from eplane.placement import Placement, linear
from eplane.plan import Identity, LeaderEpoch, Load
from runtime.cells import BundleManifest, CellPool, TensorSpec
from runtime.faults import NO_FAULTS, Faults
from runtime.link.manifest import bundle_digest
from runtime.link.messages import RankStatus, StageCommand, StagedState
from runtime.port import RankFacts, RankPort
from runtime.routing import RoutingSampler
from runtime.switch import Switch
from runtime.tables import HEADER, LiveTable, build_table
from runtime.transfer import TransferServer, bundle_lookup

torch.set_num_threads(1)  # More would stall on a busy machine.

LEADER = LeaderEpoch(7, 10)
ROWS = 64
TOP_K = 2


def manifest(rows: int = ROWS) -> BundleManifest:
    return BundleManifest((TensorSpec("number", "float32", (1,)), TensorSpec("filling", "float32", (rows,))))


def number_of(layer: int, expert: int) -> int:
    """What an expert answers: its bundle's number. A wrong or torn bundle answers something else."""
    return 1 + layer * 1000 + expert


def bundle(layer: int, expert: int, rows: int = ROWS) -> bytes:
    number = number_of(layer, expert)
    return np.full(rows + 1, number, dtype="<f4").tobytes()


def all_digests(layers: int, experts: int, rows: int = ROWS) -> list[list[str]]:
    return [[bundle_digest([bundle(layer, e, rows)]) for e in range(experts)] for layer in range(layers)]


class RealRank:
    """One rank: everything but the engine and its collectives."""

    def __init__(
        self,
        world: str,
        rank: int,
        start: Placement,
        spare: int,
        *,
        nodes: Sequence[str] | None = None,
        faults: Faults = NO_FAULTS,
        rows: int = ROWS,
        samples: bool = True,
    ) -> None:
        self.rank = rank
        self.digests = all_digests(start.layers, start.experts, rows)
        self.checkpoint_reads = 0
        self.rows = rows
        self.pool = CellPool(manifest(rows), start.layers * start.slots + spare)
        own = start.by_rank()[:, rank]
        cell_of = np.full(own.shape, -1, dtype=np.int32)
        for layer, k in zip(*np.nonzero(own >= 0), strict=True):
            expert = int(own[layer, k])
            raw = bundle(int(layer), expert, rows)
            cell_of[layer, k] = self.pool.hold(int(layer), expert, raw, self.digests[layer][expert])
        self.switch = Switch(build_table(start, rank, cell_of), self.pool, faults)
        self.transfer = TransferServer(self.pool, bundle_lookup(self.pool, world, self.digests))
        facts = RankFacts(
            world, "g", rank, tuple(nodes or ["n0"] * start.ranks), "numbered",
            start.layers, start.experts, TOP_K, start.slots,
        )  # fmt: skip
        self.sampler = RoutingSampler(rank, start.layers, TOP_K, 8, rank)
        self.port = RankPort(
            facts,
            self.pool,
            self.switch,
            self.transfer,
            self.digests,
            self.load,
            faults=faults,
            transfer_deadline_s=5.0,
            samples=self.sampler.since if samples else None,
        )

    def load(self, layer: int, expert: int) -> bytes:
        self.checkpoint_reads += 1
        return bundle(layer, expert, self.rows)

    def answer(self, table: LiveTable, layer: int, k: int) -> float:
        """What the bundle in the cell of own slot `k` answers: nan if the bundle is torn."""
        cell = int(table.cell_of[layer, k])
        number = float(self.pool.tensors["number"][cell, 0])
        whole = bool((self.pool.tensors["filling"][cell] == number).all())
        return number if whole else float("nan")

    def close(self) -> None:
        self.port.close()


class RealGroup:
    """Ranks in one process that step one after the other, with an exchange of headers as a real group has."""

    def __init__(
        self,
        ranks: int,
        layers: int,
        experts: int,
        slots: int,
        spare: int,
        *,
        faults: Faults = NO_FAULTS,
        rows: int = ROWS,
        start: Placement | None = None,
    ) -> None:
        self.world = secrets.token_hex(8)
        self.start = start or linear(layers, experts, ranks, slots)
        self.ranks = [RealRank(self.world, r, self.start, spare, faults=faults, rows=rows) for r in range(ranks)]
        self.step_number = -1
        self.rng = np.random.default_rng(0)
        self.checked = 0
        self.wrong = 0

    @property
    def addresses(self) -> dict[int, str]:
        return {rank.rank: rank.transfer.address for rank in self.ranks}

    def step(self, tokens: int = 0) -> bool:
        """One step of all ranks, each with `tokens` tokens a layer; True if it began with a switch.

        Every token's answer is compared with what its expert has to answer: `checked` and `wrong` count them.
        """
        self.step_number += 1
        before = self.ranks[0].switch.last_switched
        tables = [rank.switch.begin_step(self.step_number) for rank in self.ranks]
        headers = torch.zeros((len(self.ranks), HEADER), dtype=torch.int64)
        for rank, table in zip(self.ranks, tables, strict=True):
            headers[rank.rank] = torch.tensor([table.digest64, rank.switch.sample(), tokens, self.step_number])
        for rank in self.ranks:
            rank.switch.check(headers)
            rank.switch.agree(headers[:, 1].tolist())
        if tokens:
            self.serve(tables, tokens)
        for rank in self.ranks:
            rank.switch.end_step(self.step_number)
        return before != self.ranks[0].switch.last_switched

    def serve(self, tables: Sequence[LiveTable], tokens: int) -> None:
        """Each rank chooses slots by its own table; the rank that owns a slot answers from its own table's cell."""
        for table in tables:
            for layer in range(self.start.layers):
                experts = torch.from_numpy(self.rng.integers(self.start.experts, size=tokens))
                slots = table.choose(layer, experts)
                for expert, slot in zip(experts.tolist(), slots.tolist(), strict=True):
                    owner, k = divmod(slot, self.start.slots)
                    self.checked += 1
                    self.wrong += self.ranks[owner].answer(tables[owner], layer, k) != number_of(layer, expert)

    def sample(self, first_step: int, last_step: int, tokens: int = 100) -> None:
        """Every rank routes `tokens` tokens in a window of these steps: to expert e and the next one, in each layer."""
        for rank in self.ranks:
            rank.sampler.cut(first_step)
            first = self.rng.integers(self.start.experts, size=(len(rank.sampler.draw(tokens)), self.start.layers, 1))
            rank.sampler.take((first + np.arange(TOP_K)) % self.start.experts)
            rank.sampler.cut(last_step)

    def wave(self, base: Placement, target: Placement, rank: int, **names: Any) -> StageCommand:
        return wave(self.world, base, target, rank, peers=self.addresses, **names)

    def stage(self, base: Placement, target: Placement, **names: Any) -> Identity:
        for rank in self.ranks:
            identity = rank.port.stage(self.wave(base, target, rank.rank, **names)).staged
        assert identity is not None
        return identity.identity

    def until(self, wanted: Callable[[RankStatus], bool], tokens: int = 0, seconds: float = 20.0) -> None:
        """Steps until all ranks are as wanted."""
        deadline = time.monotonic() + seconds
        while not all(wanted(rank.port.status()) for rank in self.ranks):
            if time.monotonic() > deadline:
                raise AssertionError([rank.port.status() for rank in self.ranks])
            self.step(tokens)
            time.sleep(0.0005)

    def move(self, base: Placement, target: Placement, tokens: int = 0, **names: Any) -> Identity:
        """A whole wave."""
        identity = self.stage(base, target, **names)
        self.until(is_verified, tokens)
        for rank in self.ranks:
            rank.port.arm(identity, LEADER)
        self.until(lambda s: s.clean and s.last_switched == identity, tokens)
        return identity

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def is_verified(status: RankStatus) -> bool:
    if status.staged is not None and status.staged.state is StagedState.FAILED:
        raise AssertionError(status.staged.reason)
    return status.staged is not None and status.staged.state is StagedState.VERIFIED


def wave(
    world: str,
    base: Placement,
    target: Placement,
    rank: int,
    *,
    migration: str = "m1",
    number: int = 1,
    epoch: int = 2,
    peers: dict[int, str] | None = None,
    leader: LeaderEpoch = LEADER,
    bytes_per_s: float | None = None,
) -> StageCommand:
    """The stage command that leads `rank` from `base` to `target`; sources are the lowest ranks that hold an expert."""
    loads = []
    for layer, expert, receiver in base.moves(target):
        if receiver == rank:
            slot = next(s for s in target.replicas(layer, expert) if target.rank_of(s) == rank)
            loads.append(Load(layer, slot, expert, base.rank_of(base.replicas(layer, expert)[0])))
    identity = Identity(world, migration, number, epoch, target.digest)
    return StageCommand(identity, leader, base.digest, base.delta(target), None, tuple(loads), peers or {}, bytes_per_s)


def random_target(base: Placement, rng: np.random.Generator, room: int, changes: int = 6) -> Placement:
    """A random valid placement near `base`, with at most `room` incoming bundles a rank."""
    table = base.p2l.copy()
    for _ in range(changes):
        layer = int(rng.integers(base.layers))
        slot = int(rng.integers(table.shape[1]))
        other = int(rng.integers(table.shape[1]))
        candidate = table.copy()
        if rng.random() < 0.5:
            candidate[layer, slot], candidate[layer, other] = table[layer, other], table[layer, slot]
        else:
            candidate[layer, slot] = int(rng.integers(-1, base.experts))
        try:
            valid = Placement(candidate, base.ranks, base.experts)
        except PlacementError:
            continue
        arriving = [rank for _, _, rank in base.moves(valid)]
        if all(arriving.count(rank) <= room for rank in set(arriving)):
            table = candidate
    return Placement(table, base.ranks, base.experts)
