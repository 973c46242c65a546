"""A group for tests: leaders on a memory store, and the agents' side of the store played by a script.

Nothing runs by itself: a test says when a leader takes a turn and when the nodes act, so every interleaving can be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controller.desk import Desk
from controller.group import Group
from controller.lead import Lead
from controller.loop import Loop
from controller.metrics import Metrics
from controller.settings import GroupSettings
from controller.solver import Answer, Problem, solve
from controller.state import GroupState
from controller.term import Term
from controller.verdict import Verdict
from eplane.clock import Clock, ManualClock, settle
from eplane.keys import AckKind, GroupKeys
from eplane.load import FloatLoad, LoadReport, SubWindow
from eplane.migration import MigrationState, WaveState
from eplane.placement import FloatTable, IntTable, Placement, linear
from eplane.plan import LeaderEpoch
from eplane.records import (
    AckRecord,
    ActiveRecord,
    LeaderRecord,
    Mode,
    ModeRecord,
    PresenceRecord,
    SettingsRecord,
    decode,
    encode,
    new_nonce,
)
from eplane.routing import RankSample, TokenSample
from eplane.store.base import CreateRevision, Delete, Exists, Missing, ModRevision, Put, Store
from eplane.store.memory import MemoryStore
from eplane.store.mirror import Mirror
from eplane.transactions import acknowledge
from eplane.work import WaveRecord

GROUP = "g"
KEYS = GroupKeys(GROUP)
LAYERS, EXPERTS, RANKS, SLOTS, CELLS, TOP_K = 2, 8, 4, 3, 10, 2


class HereSolver:
    """Solves in this process, with even shares: no child, no compiling."""

    def __init__(self) -> None:
        self.asked = 0
        self.fails: Exception | None = None

    async def solve(self, problem: Mapping[str, Any], timeout_s: float) -> Answer:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return solve(Problem.from_dict(problem))

    async def shares(self, p2l: IntTable, ranks: int, load: FloatLoad, timeout_s: float) -> FloatTable:
        return Placement(p2l, ranks, load.shape[1]).even_shares()


@dataclass
class Rank:
    """One rank as its agent would see it."""

    digest: str
    epoch: int | None = None
    seq: int = -1


@dataclass
class Nodes:
    """The nodes of one world: what their ranks serve, and what their agents write to the store."""

    store: Store
    clock: Clock
    placement: Placement
    world: str = "a" * 16
    node_of_rank: tuple[str, ...] = ("n0", "n0", "n1", "n1")
    cells: int = CELLS
    manifest: str = "f" * 16
    silent: set[str] = field(default_factory=set)
    failing: dict[str, str] = field(default_factory=dict)
    step: int = 0
    incarnation: str = "b" * 16
    samples: bool = False

    def __post_init__(self) -> None:
        self.ranks = [Rank(self.placement.digest) for _ in self.node_of_rank]
        self.tables = {self.placement.digest: self.placement}
        self.presence: dict[str, int] = {}
        self.acks: list[tuple[AckKind, str, int]] = []

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.node_of_rank))

    async def appear(self) -> None:
        """Every agent claims its presence key anew."""
        for node in self.names:
            record = PresenceRecord(node, self.incarnation, self.world)
            key = KEYS.agent(node)
            if await self.store.get(key) is not None:
                await self.store.transact([Exists(key)], [Delete(key)])
            result = await self.store.transact([Missing(key)], [Put(key, encode(record))])
            self.presence[node] = result.revision

    async def act(self, kinds: tuple[AckKind, ...] = tuple(AckKind)) -> int:
        """One pass of every agent that is not silent; only acks of `kinds` are written. How many were."""
        found = await self.store.get(KEYS.active)
        if found is None:
            return 0
        active = decode(ActiveRecord, found.value)
        snapshot = await self.store.list(KEYS.waves(active.migration))
        written = 0
        for kv in snapshot.items:
            record = decode(WaveRecord, kv.value)
            if record.world == self.world:
                for node in self.names:
                    if node not in self.silent:
                        written += await self._obey(record, node, kinds)
        return written

    async def _obey(self, record: WaveRecord, node: str, kinds: tuple[AckKind, ...]) -> int:
        mine = [self.ranks[r] for r, n in enumerate(self.node_of_rank) if n == node]
        match record.wave.state:
            case WaveState.STAGING if node in self.failing:
                return await self._ack(record, node, AckKind.FAILED, kinds, self.failing[node])
            case WaveState.STAGING:
                base = self.tables[record.work.base_digest]
                self.tables[record.work.target_digest] = record.work.applied_to(base)
                return await self._ack(record, node, AckKind.VERIFIED, kinds)
            case WaveState.SWITCHING:
                if AckKind.SWITCHED in kinds:
                    for rank in mine:
                        rank.digest, rank.epoch = record.work.target_digest, record.wave.epoch
                written = await self._ack(record, node, AckKind.SWITCHED, kinds)
                return written + await self._ack(record, node, AckKind.CLEAN, kinds)
            case WaveState.ABORTED if not record.wave.cut:
                return await self._ack(record, node, AckKind.CLEAN, kinds)
        return 0

    async def _ack(
        self, record: WaveRecord, node: str, kind: AckKind, kinds: tuple[AckKind, ...], reason: str = ""
    ) -> int:
        if kind not in kinds:
            return 0
        ack = AckRecord(kind, record.identity, node, self.incarnation, self.clock.now(), new_nonce(), reason)
        (transaction,) = acknowledge(KEYS, self.presence[node], [ack])
        result = await self.store.transact(transaction.compares, transaction.ops)
        if result.succeeded:
            self.acks.append((kind, node, record.wave.number))
        return int(result.succeeded)

    def describe(self, rank: int) -> dict[str, Any]:
        at = self.ranks[rank]
        return {
            "world": self.world,
            "group": GROUP,
            "rank": rank,
            "node": self.node_of_rank[rank],
            "node_of_rank": list(self.node_of_rank),
            "model": "tiny",
            "layers": self.placement.layers,
            "experts": self.placement.experts,
            "top_k": TOP_K,
            "slots": self.placement.slots,
            "cells": self.cells,
            "cells_free": 0,
            "bundle_bytes": 1000,
            "capabilities": {
                **dict.fromkeys(("weighted_shares", "free_slot_order", "live_apply", "phases_known"), True),
                **({"routing_sample": True} if self.samples else {}),
            },
            "digest": at.digest,
            "epoch": at.epoch,
            "manifest_digest": self.manifest,
            "transfer_address": "127.0.0.1:1",
            "step": self.step,
        }

    def body(self, node: str, load: FloatLoad | None = None, windows: int = 0, describe: bool = True) -> dict[str, Any]:
        """A report of one node: `windows` sub-windows in which experts got `load [L, E]` tokens each."""
        ranks = [r for r, n in enumerate(self.node_of_rank) if n == node]
        subs: list[SubWindow] = []
        for at in range(windows):
            for rank in ranks:
                subs.append(self._sub(rank, load, at))
        report = LoadReport(GROUP, node, self.incarnation, self.world, tuple(subs))
        table = self.tables[self.ranks[ranks[0]].digest]
        statuses = [
            {
                "world": self.world,
                "rank": r,
                "step": self.step,
                "live": {"epoch": self.ranks[r].epoch, "digest": self.ranks[r].digest},
            }
            for r in ranks
        ]
        return {
            "report": report.to_json(),
            "describe": [self.describe(r) for r in ranks] if describe else [],
            "placement": {"digest": table.digest, "epoch": None, "p2l": table.p2l.tolist(), "shares": []},
            "statuses": statuses,
            "samples": [self._sample(sub).to_json() for sub in subs] if self.samples else [],
        }

    def _sample(self, sub: SubWindow) -> RankSample:
        """Two tokens for each rank: to experts 0 and 1 in layer 0, to 2 and 3 in layer 1."""
        pairs = np.array([[[0, 1], [2, 3]]] * 2)
        return RankSample(sub.rank, sub.first_step, sub.last_step, TokenSample(4, pairs))

    def _sub(self, rank: int, load: FloatLoad | None, at: int) -> SubWindow:
        table = self.tables[self.ranks[rank].digest]
        self.ranks[rank].seq += 1
        tokens = np.zeros((table.layers, table.slots))
        if load is not None:
            row = table.by_rank()[:, rank]
            shares = table.even_shares().reshape(table.layers, table.ranks, table.slots)[:, rank]
            tokens = np.where(row >= 0, np.take_along_axis(load, np.maximum(row, 0), axis=1) * shares, 0)
        counts = np.rint(tokens).astype(np.int64)
        first = self.step + at * 32
        return SubWindow(self.world, table.digest, first, first + 32, rank, counts, counts * 0, self.ranks[rank].seq)

    async def report(self, desk: Desk, load: FloatLoad | None = None, windows: int = 0) -> list[dict[str, Any]]:
        """Every node reports to the leader's desk."""
        replies = [await desk.ingest(self.body(node, load, windows)) for node in self.names if node not in self.silent]
        self.step += 32 * windows
        return replies


@dataclass
class Seated:
    """A leader that takes its turns when told."""

    lead: Lead
    group: Group
    desk: Desk
    solver: HereSolver

    async def turn(self) -> bool:
        """One turn, after the mirror has seen what others wrote."""
        await settle()
        return await self.lead.turn()

    async def turns(self, most: int = 20) -> None:
        """Turns until nothing more is to be written."""
        for _ in range(most):
            if not await self.turn():
                return
        raise AssertionError("the driver does not come to rest")

    async def cycle(self) -> Verdict:
        await settle()
        return await Loop(self.lead).cycle()


async def seat(store: MemoryStore, clock: ManualClock, name: str = "c0", solver: HereSolver | None = None) -> Seated:
    """Take the leader key over from whoever has it, and lead."""
    found = await store.get(KEYS.leader)
    if found is not None:
        await store.transact([ModRevision(KEYS.leader, found.mod_revision)], [Delete(KEYS.leader)])
    value = encode(LeaderRecord(name, f"http://{name}"))
    result = await store.transact([Missing(KEYS.leader)], [Put(KEYS.leader, value)])
    mirror = Mirror(store, KEYS.prefix, clock)
    await mirror.start()
    await mirror.wait(result.revision)
    state = GroupState(mirror, KEYS, Mode.AUTO)
    solver = solver or HereSolver()
    group = Group(GROUP, store, mirror, state, solver, clock, Metrics())
    epoch = LeaderEpoch((await store.status()).cluster_id, result.revision)
    lead = Lead(group, Term(store, mirror, epoch, CreateRevision(KEYS.leader, result.revision)), lambda: None, 0.5)
    return Seated(lead, group, Desk(group, lambda: lead), solver)


def tilted(hot: int = 0, tokens: float = 1000.0) -> FloatLoad:
    """A load in which experts `hot` and `hot + 1` get most of the tokens."""
    load = np.full((LAYERS, EXPERTS), tokens / 20)
    load[:, hot] = load[:, hot + 1] = tokens
    return load


def start_placement() -> Placement:
    return linear(LAYERS, EXPERTS, RANKS, SLOTS)


async def settings(store: MemoryStore, **values: Any) -> None:
    """Set the group's settings, whoever leads."""
    GroupSettings().patched(values)
    record = SettingsRecord(values, "test", "", 0.0, new_nonce())
    found = await store.get(KEYS.settings)
    await store.transact(
        [ModRevision(KEYS.settings, found.mod_revision if found else 0)], [Put(KEYS.settings, encode(record))]
    )


async def mode(store: MemoryStore, value: Mode) -> None:
    found = await store.get(KEYS.mode)
    record = ModeRecord(value, "test", "", 0.0, new_nonce())
    await store.transact([ModRevision(KEYS.mode, found.mod_revision if found else 0)], [Put(KEYS.mode, encode(record))])


def ended(seated: Seated) -> list[MigrationState]:
    return [m.state for m in seated.group.state.migrations()]
