"""The transactions that change a group, as data: what must be true, and what is then written. Pure.

Every write of a leader compares the create-revision of the leader key, so that a leader that was replaced writes
nothing. Cutover and abort both compare the mod-revision of the wave's record: one of the two wins. Acks compare the
create-revision of the agent's presence, so that an agent whose successor has come acknowledges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eplane.errors import InvariantBroken
from eplane.keys import GroupKeys
from eplane.migration import MigrationState
from eplane.parts import encode_placement
from eplane.placement import Placement
from eplane.records import (
    AckRecord,
    ActiveRecord,
    EpochPointer,
    HistoryKind,
    HistoryRecord,
    MovesRecord,
    WorldRecord,
    encode,
)
from eplane.store.base import Compare, CreateRevision, Delete, Missing, ModRevision, Op, Put, ValueIs
from eplane.wave import WaveState
from eplane.work import MigrationRecord, StoredPlan, WaveRecord


@dataclass(frozen=True, slots=True)
class Transaction:
    """For `Store.transact(compares, ops)`."""

    compares: tuple[Compare, ...]
    ops: tuple[Op, ...]


def leads(keys: GroupKeys, leader_revision: int) -> Compare:
    """The fence of every leader's write: the leader key that was created at `leader_revision` still stands."""
    return CreateRevision(keys.leader, leader_revision)


def placement_parts(keys: GroupKeys, leader_revision: int, placement: Placement) -> tuple[Transaction, ...]:
    """One transaction a part, to be written before the record that names the placement. Repeating them is harmless."""
    return tuple(
        Transaction((leads(keys, leader_revision),), (Put(keys.placement_part(placement.digest, at), part),))
        for at, part in enumerate(encode_placement(placement))
    )


def plan_parts(keys: GroupKeys, leader_revision: int, plan: str, stored: StoredPlan) -> tuple[Transaction, ...]:
    """One transaction a part, to be written before the plan's own value."""
    return tuple(
        Transaction((leads(keys, leader_revision),), (Put(keys.plan_part(plan, at), part),))
        for at, part in enumerate(stored.parts)
    )


def adopt(
    keys: GroupKeys,
    leader_revision: int,
    world_revision: int,
    pointer_revision: int,
    world: WorldRecord,
    pointer: EpochPointer,
    history: HistoryRecord,
) -> Transaction:
    """Take over what the world serves as the next epoch. Revisions are 0 where the key does not exist yet."""
    _same_epoch(pointer, history)
    if history.made_by is not HistoryKind.ADOPTION or pointer.full_epoch != pointer.epoch:
        raise InvariantBroken("linear history", "an adoption is recorded as one, and stored whole")
    if world.world.world != pointer.world:
        raise InvariantBroken("linear history", f"world {world.world.world} can not adopt for {pointer.world}")
    return Transaction(
        (
            leads(keys, leader_revision),
            ModRevision(keys.world, world_revision),
            ModRevision(keys.epoch, pointer_revision),
            Missing(keys.history(history.epoch)),
        ),
        (
            Put(keys.world, encode(world)),
            Put(keys.epoch, encode(pointer)),
            Put(keys.history(history.epoch), encode(history)),
        ),
    )


def begin(
    keys: GroupKeys,
    leader_revision: int,
    world_revision: int,
    pointer_revision: int,
    migration: MigrationRecord,
    wave: WaveRecord,
    active: ActiveRecord,
    plan: bytes,
) -> Transaction:
    """Start a migration with its first wave STAGING, while no other is active and world and epoch are the plan's.

    `plan`: the plan's value in state EXECUTING.
    """
    if migration.state is not MigrationState.RUNNING or wave.wave.state is not WaveState.STAGING:
        raise InvariantBroken("one migration", "a migration begins RUNNING with its first wave STAGING")
    if not migration.id == wave.migration == active.migration:
        raise InvariantBroken("one migration", "the records speak of different migrations")
    return Transaction(
        (
            leads(keys, leader_revision),
            Missing(keys.active),
            Missing(keys.migration(migration.id)),
            Missing(keys.pause),
            ModRevision(keys.world, world_revision),
            ModRevision(keys.epoch, pointer_revision),
        ),
        (
            Put(keys.active, encode(active)),
            Put(keys.migration(migration.id), encode(migration)),
            Put(keys.wave(migration.id, wave.wave.number), encode(wave)),
            Put(keys.plan(migration.plan), plan),
        ),
    )


def write_wave(keys: GroupKeys, leader_revision: int, wave_revision: int, wave: WaveRecord) -> Transaction:
    """Write a wave's next state; also the abort: whoever compares the older revision after this fails.

    `wave_revision` is 0 for a wave that opens. The cutover has a transaction of its own.
    """
    if wave.wave.state is WaveState.SWITCHING and wave_revision == 0:
        raise InvariantBroken("cutover", "a wave can not open by switching")
    key = keys.wave(wave.migration, wave.wave.number)
    return Transaction((leads(keys, leader_revision), ModRevision(key, wave_revision)), (Put(key, encode(wave)),))


def cutover(
    keys: GroupKeys,
    leader_revision: int,
    wave_revision: int,
    pointer_revision: int,
    world_revision: int,
    wave: WaveRecord,
    pointer: EpochPointer,
    history: HistoryRecord,
    moves: MovesRecord,
) -> Transaction:
    """The point of no return: the wave SWITCHING, the next epoch the truth, its history and what it moved recorded.

    Compares the leader, the wave's record (as it was when VERIFIED), epoch pointer, world, and that nothing is paused.
    """
    at, identity = wave.wave, wave.identity
    if at.state is not WaveState.SWITCHING or not at.cut:
        raise InvariantBroken("cutover", f"wave {at.number} is {at.state.value}")
    _same_epoch(pointer, history)
    if (pointer.epoch, pointer.digest, pointer.world) != (identity.epoch, identity.digest, identity.world):
        raise InvariantBroken("cutover", f"the pointer {pointer} is not what wave {at.number} makes")
    if history.made_by is not HistoryKind.WAVE or (history.migration, history.wave) != (wave.migration, at.number):
        raise InvariantBroken("cutover", f"the history of epoch {history.epoch} names another wave")
    return Transaction(
        (
            leads(keys, leader_revision),
            ModRevision(keys.wave(wave.migration, at.number), wave_revision),
            ModRevision(keys.epoch, pointer_revision),
            ModRevision(keys.world, world_revision),
            Missing(keys.pause),
            Missing(keys.history(history.epoch)),
        ),
        (
            Put(keys.wave(wave.migration, at.number), encode(wave)),
            Put(keys.epoch, encode(pointer)),
            Put(keys.history(history.epoch), encode(history)),
            Put(keys.moves(wave.migration, at.number), encode(moves)),
        ),
    )


def finish(
    keys: GroupKeys,
    leader_revision: int,
    migration_revision: int,
    active: bytes,
    migration: MigrationRecord,
    plan: bytes,
) -> Transaction:
    """End a migration and let the next one come. `active`: the value of the active key as it was read."""
    return Transaction(
        (
            leads(keys, leader_revision),
            ValueIs(keys.active, active),
            ModRevision(keys.migration(migration.id), migration_revision),
        ),
        (
            Delete(keys.active),
            Put(keys.migration(migration.id), encode(migration)),
            Put(keys.plan(migration.plan), plan),
        ),
    )


def acknowledge(keys: GroupKeys, presence_revision: int, acks: Sequence[AckRecord]) -> tuple[Transaction, ...]:
    """One transaction an ack. `presence_revision`: at which the presence of this life of the agent was created.

    An ack that is there already makes the transaction fail; that is a success of an earlier try.
    """
    result: list[Transaction] = []
    for ack in acks:
        key = keys.ack(ack.identity.migration, ack.identity.wave, ack.ack, ack.node)
        compares = (CreateRevision(keys.agent(ack.node), presence_revision), Missing(key))
        result.append(Transaction(compares, (Put(key, encode(ack)),)))
    return tuple(result)


def _same_epoch(pointer: EpochPointer, history: HistoryRecord) -> None:
    mine = pointer.epoch, pointer.digest, pointer.world
    if mine != (history.epoch, history.digest, history.world):
        raise InvariantBroken("linear history", f"pointer {mine} and its history {history.epoch} differ")
    if history.full and pointer.full_epoch != pointer.epoch:
        raise InvariantBroken("linear history", f"epoch {pointer.epoch} is stored whole, the pointer says otherwise")
