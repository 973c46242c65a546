"""Plans between random placements, and records with every field filled, for round trips and transactions."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import strategies as st

from eplane.errors import PlacementError
from eplane.keys import AckKind
from eplane.migration import Migration, MigrationState, planned
from eplane.placement import Change, Placement, linear
from eplane.plan import Decision, Identity, LeaderEpoch, Load, Plan, PlanState, Prediction, Ruling, WavePlan
from eplane.records import (
    AckRecord,
    ActiveRecord,
    EpochPointer,
    HistoryKind,
    HistoryRecord,
    LeaderRecord,
    Mode,
    ModeRecord,
    MovesRecord,
    PauseRecord,
    PresenceRecord,
    Record,
    SettingsRecord,
    WorldRecord,
)
from eplane.topology import Capabilities, ModelShape, World
from eplane.wave import Wave
from eplane.work import MigrationRecord, WaveRecord
from tests.ground.tables import placements

WORLD, NONCE, LEADER = "a" * 16, "c" * 16, LeaderEpoch(2**64 - 1, 12)
NODES = ("n0", "n1")
PREDICTED = Prediction(0.5, 0.9, 1.5, 0.25, 4096, 4)
BASE = linear(2, 8, 4, 3)


def wave_plan(number: int, base: Placement, target: Placement, overlaps: bool = False) -> WavePlan:
    """The wave from `base` to `target`, each bundle pulled from the first replica."""
    loads = tuple(
        Load(layer, slot, expert, base.rank_of(base.replicas(layer, expert)[0]))
        for layer, expert, rank in base.moves(target)
        for slot in target.replicas(layer, expert)
        if target.rank_of(slot) == rank
    )
    return WavePlan(number, base.delta(target), loads, base.digest, target.digest, 1000 * len(loads), overlaps)


def rotated(base: Placement, by: int = 1) -> Placement:
    """Every rank takes over what its neighbour holds: the largest delta there is."""
    table = base.by_rank()[:, [(r + by) % base.ranks for r in range(base.ranks)]]
    return Placement(table.reshape(base.p2l.shape), base.ranks, base.experts)


def plan_of(*tables: Placement, base_epoch: int = 7) -> Plan:
    waves = tuple(wave_plan(n, a, b, n > 1) for n, (a, b) in enumerate(pairwise(tables), start=1))
    decisions = (Decision("capacity", Ruling.YES, "it fits"), Decision("pace", Ruling.THROTTLE, "not before 12:00"))
    return Plan(
        "p1",
        "g",
        WORLD,
        base_epoch,
        tables[0].digest,
        tables[-1].digest,
        waves,
        1.5e9,
        "layer 1 is at 0.5",
        "controller",
        "eplane",
        PREDICTED,
        decisions,
        PlanState.PROPOSED,
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, Placement]:
    """A plan of one to three waves, and its base."""
    base = draw(placements().filter(lambda p: p.ranks > 1))
    tables = [base]
    for _ in range(draw(st.integers(1, 3))):
        following = draw(placements((base.layers, base.experts, base.ranks, base.slots)))
        if following.digest != tables[-1].digest:
            tables.append(following)
    if len(tables) == 1:
        tables.append(_any_change(base))
    return plan_of(*tables), base


def _any_change(base: Placement) -> Placement:
    for rank in range(base.ranks):
        for slot in range(rank * base.slots, (rank + 1) * base.slots):
            for expert in range(-1, base.experts):
                try:
                    target = base.apply([Change(0, slot, expert)])
                except PlacementError:
                    continue
                if target.digest != base.digest:
                    return target
    return rotated(base)


PLAN = plan_of(BASE, rotated(BASE), rotated(BASE, 2))
WORLD_OF_PLAN = World("g", WORLD, ("n0", "n0", "n1", "n1"), ModelShape("tiny", 2, 8, 2, 1000), 3, 8)
MIGRATION: Migration = planned(PLAN, "m1", NODES)


def wave_record(wave: Wave = MIGRATION.waves[0]) -> WaveRecord:
    shares = rotated(BASE, wave.number).even_shares()
    return WaveRecord(WORLD, "m1", wave, PLAN.waves[wave.number - 1], shares, 1e6, 5.0, LEADER, NONCE)


def migration_record(migration: Migration = MIGRATION) -> MigrationRecord:
    return MigrationRecord.of(migration, actor="op", created_at=1.0, now=9.0, leader=LEADER, nonce=NONCE)


def wave_history(epoch: int = 8) -> HistoryRecord:
    wave = PLAN.waves[epoch - 8]
    return HistoryRecord(
        epoch,
        HistoryKind.WAVE,
        WORLD,
        wave.target_digest,
        wave.base_digest,
        wave.changes,
        False,
        "controller",
        "wave 1",
        5.0,
        NONCE,
        "p1",
        "m1",
        wave.number,
        4,
        4000,
        1.5,
        None,
    )


ADOPTION = HistoryRecord(
    7, HistoryKind.ADOPTION, WORLD, BASE.digest, None, None, True, "controller", "new world", 5.0, NONCE
)
RECORDS: tuple[Record, ...] = (
    LeaderRecord("c1", "http://127.0.0.1:9000"),
    ModeRecord(Mode.AUTO, "op", "", 5.0, NONCE),
    PauseRecord("op", "maintenance", 5.0, NONCE),
    WorldRecord(
        World("g", WORLD, NODES * 2, ModelShape("tiny", 2, 8, 2, 1000), 3, 8, Capabilities(True, False, True, False)),
        "d" * 32,
        5.0,
        NONCE,
    ),
    EpochPointer(8, BASE.digest, WORLD, 7, NONCE),
    ADOPTION,
    wave_history(),
    ActiveRecord("m1", NONCE),
    AckRecord(AckKind.SWITCHED, Identity(WORLD, "m1", 1, 8, BASE.digest), "n0", "e" * 16, 5.0, NONCE, "", 123),
    AckRecord(AckKind.FAILED, Identity(WORLD, "m1", 1, 8, BASE.digest), "n0", "e" * 16, 5.0, NONCE, "no memory"),
    PresenceRecord("n0", "e" * 16, WORLD, (0, 1), BASE.digest, 7),
    PresenceRecord("n0", "e" * 16),
    MovesRecord("m1", 1, 5.0, {"n0": 2}, {"n0": 2000, "n1": 0}),
    SettingsRecord({"cooldown_s": 30, "policy": "eplb", "limit": None}, "op", "calm", 5.0, NONCE),
    migration_record(),
    MigrationRecord.of(
        Migration("m1", "p1", "g", WORLD, 7, MIGRATION.waves, MigrationState.ABORTED, "world lost"),
        actor="op",
        created_at=1.0,
        now=9.0,
        leader=LEADER,
        nonce=NONCE,
    ),
)
