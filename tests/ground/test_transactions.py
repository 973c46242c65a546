"""The group's transactions on the store in memory: who may write what, and which of two writers wins."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from eplane import transactions
from eplane.errors import InvariantBroken
from eplane.keys import AckKind, GroupKeys
from eplane.migration import (
    AbortAsked,
    CutoverDone,
    Migration,
    MigrationState,
    NodeVerified,
    OfWave,
    Start,
    advance_migration,
)
from eplane.plan import PlanState
from eplane.records import AckRecord, ActiveRecord, EpochPointer, MovesRecord, PauseRecord, WorldRecord, decode, encode
from eplane.store.base import (
    Compare,
    CreateRevision,
    Delete,
    Exists,
    Missing,
    ModRevision,
    Put,
    Store,
    ValueIs,
    check_transaction,
)
from eplane.store.memory import MemoryStore
from eplane.transactions import Transaction
from eplane.wave import WaveState
from eplane.work import MigrationRecord, StoredPlan, WaveRecord, encode_plan
from tests.ground.samples import (
    ADOPTION,
    BASE,
    MIGRATION,
    NONCE,
    PLAN,
    WORLD,
    WORLD_OF_PLAN,
    migration_record,
    rotated,
    wave_history,
    wave_record,
)

KEYS = GroupKeys("g")
WORLD_RECORD = WorldRecord(WORLD_OF_PLAN, "d" * 32, 5.0, NONCE)
POINTER = EpochPointer(7, BASE.digest, WORLD, 7, NONCE)
NEXT = EpochPointer(8, rotated(BASE).digest, WORLD, 7, NONCE)
MOVES = MovesRecord("m1", 1, 5.0, {"n0": 1}, {"n0": 1000})
ACTIVE = ActiveRecord("m1", NONCE)


class Group:
    """A group in a store, with a leader that holds `leader`."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.leader = 0

    async def lead(self) -> None:
        await self.store.transact([Missing("x")], [Delete(KEYS.leader)])
        self.leader = (await self.store.transact([Missing(KEYS.leader)], [Put(KEYS.leader, b"me")])).revision

    async def do(self, transaction: Transaction) -> bool:
        return (await self.store.transact(transaction.compares, transaction.ops)).succeeded

    async def all(self, made: Iterable[Transaction]) -> bool:
        return all([await self.do(one) for one in made])

    async def revision(self, key: str) -> int:
        found = await self.store.get(key)
        return found.mod_revision if found else 0

    async def adopt(self) -> bool:
        await self.all(transactions.placement_parts(KEYS, self.leader, BASE))
        world, pointer = await self.revision(KEYS.world), await self.revision(KEYS.epoch)
        return await self.do(transactions.adopt(KEYS, self.leader, world, pointer, WORLD_RECORD, POINTER, ADOPTION))

    async def begin(self, migration: Migration) -> bool:
        plan = encode_plan(replace(PLAN, state=PlanState.EXECUTING), NONCE).main
        world, pointer = await self.revision(KEYS.world), await self.revision(KEYS.epoch)
        record, wave = migration_record(migration), wave_record(migration.waves[0])
        return await self.do(transactions.begin(KEYS, self.leader, world, pointer, record, wave, ACTIVE, plan))

    async def write_wave(self, migration: Migration, revision: int) -> bool:
        record = wave_record(migration.waves[0])
        return await self.do(transactions.write_wave(KEYS, self.leader, revision, record))

    async def cutover(self, migration: Migration, revision: int) -> bool:
        return await self.do(
            transactions.cutover(
                KEYS,
                self.leader,
                revision,
                await self.revision(KEYS.epoch),
                await self.revision(KEYS.world),
                wave_record(migration.waves[0]),
                NEXT,
                wave_history(),
                MOVES,
            )
        )


RUNNING, _ = advance_migration(MIGRATION, Start())
VERIFIED = RUNNING
for _node in RUNNING.nodes:
    VERIFIED, _ = advance_migration(VERIFIED, OfWave(1, NodeVerified(_node)))
CUT, _ = advance_migration(VERIFIED, OfWave(1, CutoverDone(8)))
ABORTED, _ = advance_migration(VERIFIED, AbortAsked("op", "wanted"))
WAVE_KEY = KEYS.wave("m1", 1)


async def verified() -> tuple[Group, int]:
    """A group whose first wave is VERIFIED, and the revision of its record."""
    group = Group(MemoryStore())
    await group.lead()
    assert await group.adopt()
    assert await group.begin(RUNNING)
    assert await group.write_wave(VERIFIED, await group.revision(WAVE_KEY))
    return group, await group.revision(WAVE_KEY)


async def test_from_adoption_to_the_end_of_a_migration() -> None:
    group, revision = await verified()
    assert await group.cutover(CUT, revision)
    pointer, history = await group.store.get(KEYS.epoch), await group.store.get(KEYS.history(8))
    assert pointer is not None
    assert history is not None
    assert decode(EpochPointer, pointer.value) == NEXT
    assert pointer.mod_revision == history.mod_revision == await group.revision(WAVE_KEY)
    ended = replace(migration_record(CUT), state=MigrationState.STOPPED, ended_at=9.0)
    done = encode_plan(replace(PLAN, state=PlanState.DONE), NONCE).main
    migration_revision = await group.revision(KEYS.migration("m1"))
    finish = transactions.finish(KEYS, group.leader, migration_revision, encode(ACTIVE), ended, done)
    assert await group.do(finish)
    assert not await group.do(finish)
    assert await group.store.get(KEYS.active) is None
    found = await group.store.get(KEYS.migration("m1"))
    assert found is not None
    assert decode(MigrationRecord, found.value).state is MigrationState.STOPPED


@pytest.mark.parametrize("first", ["cutover", "abort"])
async def test_of_cutover_and_abort_one_wins(first: str) -> None:
    group, revision = await verified()
    if first == "cutover":
        assert await group.cutover(CUT, revision)
        assert not await group.write_wave(ABORTED, revision)
    else:
        assert await group.write_wave(ABORTED, revision)
        assert not await group.cutover(CUT, revision)
    found = await group.store.get(WAVE_KEY)
    pointer = await group.store.get(KEYS.epoch)
    assert found is not None
    assert pointer is not None
    state = decode(WaveRecord, found.value).wave.state
    assert state is (WaveState.SWITCHING if first == "cutover" else WaveState.ABORTED)
    assert decode(EpochPointer, pointer.value) == (NEXT if first == "cutover" else POINTER)


async def test_nothing_is_cut_over_by_an_old_leader_or_while_paused_or_in_another_world() -> None:
    group, revision = await verified()
    pause = Put(KEYS.pause, encode(PauseRecord("op", "", 1.0, NONCE)))
    await group.store.transact([Missing(KEYS.pause)], [pause])
    assert not await group.cutover(CUT, revision)
    await group.store.transact([Missing("x")], [Delete(KEYS.pause)])
    world, pointer = await group.revision(KEYS.world), await group.revision(KEYS.epoch)
    old = transactions.cutover(
        KEYS, group.leader, revision, pointer, world, wave_record(CUT.waves[0]), NEXT, wave_history(), MOVES
    )
    await group.store.transact([Exists(KEYS.world)], [Put(KEYS.world, encode(WORLD_RECORD))])
    assert not await group.do(old)
    await group.lead()
    assert not await group.do(replace(old, compares=tuple(c for c in old.compares if c.key != KEYS.world)))
    assert await group.cutover(CUT, revision)


async def test_an_old_leader_writes_nothing_at_all() -> None:
    group, revision = await verified()
    old = group.leader
    await group.lead()
    group.leader, new = old, group.leader
    assert not await group.adopt()
    assert not await group.all(transactions.placement_parts(KEYS, old, BASE))
    assert not await group.write_wave(ABORTED, revision)
    assert not await group.cutover(CUT, revision)
    assert new > old


async def test_one_migration_at_a_time_and_none_while_paused_or_on_another_epoch() -> None:
    group, _ = await verified()
    assert not await group.begin(replace(RUNNING))
    fresh = Group(MemoryStore())
    await fresh.lead()
    assert await fresh.adopt()
    await fresh.store.transact([Missing(KEYS.pause)], [Put(KEYS.pause, b"x")])
    assert not await fresh.begin(RUNNING)
    await fresh.store.transact([Missing("x")], [Delete(KEYS.pause)])
    assert await fresh.begin(RUNNING)


async def test_an_epoch_is_adopted_once() -> None:
    group = Group(MemoryStore())
    await group.lead()
    assert await group.adopt()
    assert not await group.adopt()


async def test_an_ack_is_written_once_and_not_by_a_life_that_is_over() -> None:
    group, _ = await verified()
    presence = Put(KEYS.agent("n0"), b"first")
    first = (await group.store.transact([Missing(KEYS.agent("n0"))], [presence])).revision
    ack = AckRecord(AckKind.VERIFIED, RUNNING.identity(1), "n0", "e" * 16, 1.0, NONCE)
    clean = replace(ack, ack=AckKind.CLEAN)
    assert [await group.do(one) for one in transactions.acknowledge(KEYS, first, [ack, ack])] == [True, False]
    await group.store.transact([Missing("x")], [Delete(KEYS.agent("n0"))])
    second = (await group.store.transact([Missing(KEYS.agent("n0"))], [presence])).revision
    assert not await group.all(transactions.acknowledge(KEYS, first, [clean]))
    assert await group.all(transactions.acknowledge(KEYS, second, [clean]))


def test_what_each_transaction_compares() -> None:
    """Each line is a guard; the tests above show what the most important ones are for."""
    leads = CreateRevision(KEYS.leader, 3)
    world, pointer, wave = ModRevision(KEYS.world, 4), ModRevision(KEYS.epoch, 5), ModRevision(WAVE_KEY, 6)
    migration, presence = ModRevision(KEYS.migration("m1"), 7), CreateRevision(KEYS.agent("n0"), 8)
    running, first = migration_record(RUNNING), wave_record(RUNNING.waves[0])
    ack = AckRecord(AckKind.CLEAN, RUNNING.identity(1), "n0", "e" * 16, 1.0, NONCE)
    cut = wave_record(CUT.waves[0])
    expected: list[tuple[Transaction, set[Compare]]] = [
        (transactions.placement_parts(KEYS, 3, BASE)[0], {leads}),
        (transactions.plan_parts(KEYS, 3, "p1", StoredPlan(b"", (b"x",)))[0], {leads}),
        (
            transactions.adopt(KEYS, 3, 4, 5, WORLD_RECORD, POINTER, ADOPTION),
            {leads, world, pointer, Missing(KEYS.history(7))},
        ),
        (
            transactions.begin(KEYS, 3, 4, 5, running, first, ACTIVE, b"plan"),
            {leads, world, pointer, Missing(KEYS.active), Missing(KEYS.migration("m1")), Missing(KEYS.pause)},
        ),
        (transactions.write_wave(KEYS, 3, 6, first), {leads, wave}),
        (
            transactions.cutover(KEYS, 3, 6, 5, 4, cut, NEXT, wave_history(), MOVES),
            {leads, wave, pointer, world, Missing(KEYS.pause), Missing(KEYS.history(8))},
        ),
        (
            transactions.finish(KEYS, 3, 7, b"active", running, b"plan"),
            {leads, ValueIs(KEYS.active, b"active"), migration},
        ),
        (transactions.acknowledge(KEYS, 8, [ack])[0], {presence, Missing(KEYS.ack("m1", 1, AckKind.CLEAN, "n0"))}),
    ]
    for made, compares in expected:
        assert set(made.compares) == compares
        check_transaction(made.compares, made.ops)


def cutover_of(wave: WaveRecord, pointer: EpochPointer = NEXT) -> Transaction:
    return transactions.cutover(KEYS, 1, 1, 1, 1, wave, pointer, wave_history(), MOVES)


def test_records_that_contradict_each_other_make_no_transaction() -> None:
    cut = wave_record(CUT.waves[0])
    assert cutover_of(cut).ops
    history = wave_history()
    wrongs: list[Callable[[], Transaction]] = [
        lambda: cutover_of(wave_record(VERIFIED.waves[0])),
        lambda: cutover_of(cut, replace(NEXT, epoch=9)),
        lambda: cutover_of(cut, POINTER),
        lambda: transactions.cutover(KEYS, 1, 1, 1, 1, cut, NEXT, replace(history, migration="m2"), MOVES),
        lambda: transactions.cutover(KEYS, 1, 1, 1, 1, cut, NEXT, replace(history, full=True), MOVES),
        lambda: transactions.cutover(KEYS, 1, 1, 1, 1, cut, POINTER, ADOPTION, MOVES),
        lambda: transactions.adopt(KEYS, 1, 0, 0, WORLD_RECORD, replace(POINTER, digest="f" * 16), ADOPTION),
        lambda: transactions.adopt(KEYS, 1, 0, 0, WORLD_RECORD, NEXT, wave_history()),
        lambda: transactions.adopt(
            KEYS, 1, 0, 0, replace(WORLD_RECORD, world=replace(WORLD_OF_PLAN, world="b" * 16)), POINTER, ADOPTION
        ),
        lambda: transactions.begin(KEYS, 1, 1, 1, migration_record(MIGRATION), wave_record(), ACTIVE, b""),
        lambda: transactions.begin(
            KEYS, 1, 1, 1, migration_record(RUNNING), wave_record(RUNNING.waves[0]), ActiveRecord("m2", NONCE), b""
        ),
        lambda: transactions.write_wave(KEYS, 1, 0, cut),
    ]
    for wrong in wrongs:
        with pytest.raises(InvariantBroken):
            wrong()
