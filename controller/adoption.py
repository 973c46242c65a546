"""Adopting what a new world serves. A placement is never pushed at it: what all its ranks report becomes the next epoch.

A migration of the world before ends in the same transaction, from whatever state it had reached: its memory went with
the processes. If ranks disagree, nothing is done, and one sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from controller.roster import Heard, RankSaid, Roster, world_of
from controller.state import GroupState, Journey
from controller.term import Term, put
from eplane.clock import Clock
from eplane.crash import crash_point
from eplane.errors import PlacementError, TopologyError
from eplane.migration import FINAL, Migration, WorldLost, advance_migration
from eplane.placement import Placement, linear
from eplane.plan import PlanState
from eplane.records import EpochPointer, HistoryKind, HistoryRecord, WorldRecord, encode, new_nonce
from eplane.topology import World
from eplane.transactions import Transaction, adopt, finish, placement_parts
from eplane.work import MigrationRecord, encode_plan

# A description of the adopted world counts against the store only if it was heard this long after the last change there.
SETTLED_S = 5.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A world whose ranks have all spoken, and agree. `epoch`: the highest that any of them was told."""

    world: World
    manifest_digest: str
    digest: str
    epoch: int


def present(heard: Iterable[Heard], group: str, ended: frozenset[str]) -> list[RankSaid] | str | None:
    """What all ranks of the newest world say of themselves, or one sentence why it is not whole, or None without any word.

    `ended`: worlds that were left already; a late word of one of them is no reason to go back.
    """
    living = [h for h in heard if h.said.world not in ended]
    if not living:
        return None
    newest = max(living, key=lambda h: h.at).said
    said = sorted((h.said for h in living if h.said.world == newest.world), key=lambda s: s.rank)
    if newest.group != group:
        return f"rank {newest.rank} belongs to group {newest.group}, not to {group}: check the agents' settings"
    odd = next((s for s in said if s.common() != newest.common()), None)
    if odd is not None:
        return f"ranks {newest.rank} and {odd.rank} of world {newest.world} describe different worlds or models: nothing is done"
    missing = sorted(set(range(len(newest.node_of_rank))) - {s.rank for s in said})
    if missing:
        return f"world {newest.world}: ranks {missing} have not reported yet"
    return said


def agreed(said: list[RankSaid], serves: Mapping[int, str], epoch: int) -> Candidate | str:
    """The world that `said` describes, if all its ranks serve the same placement; `serves`: digest by rank."""
    first = said[0].rank
    other = next((s.rank for s in said if serves[s.rank] != serves[first]), None)
    if other is not None:
        return (
            f"ranks disagree: rank {first} serves placement {serves[first]}, rank {other} serves {serves[other]}; "
            "nothing is done"
        )
    try:
        world = world_of(said)
    except TopologyError as error:
        return f"world {said[0].world} can not be: {error}"
    return Candidate(world, said[0].manifest_digest, serves[first], epoch)


class Adopter:
    """Adopts for one term of leadership."""

    def __init__(self, state: GroupState, term: Term, roster: Roster, clock: Clock, group: str) -> None:
        self._state = state
        self._term = term
        self._roster = roster
        self._clock = clock
        self._group = group
        self._seen: tuple[object, float] = (None, clock.monotonic())

    def wanted_table(self) -> bool:
        """Whether agents should send the table that their ranks serve."""
        found = self._found()
        return isinstance(found, Candidate) and self._table(found) is None

    async def step(self) -> str | None:
        """Adopt if there is something to adopt. The sentence of what is in the way, or None when all is in order."""
        found = self._found()
        if not isinstance(found, Candidate):
            return found
        table = self._table(found)
        if table is None:
            return f"world {found.world.world}: the table of placement {found.digest} has not been reported yet"
        if not await self._adopt(found, table):
            return "the adoption lost a race with another write and is tried again"
        return None

    def _found(self) -> Candidate | str | None:
        """What is to be adopted, or what is in the way, or None when all is in order."""
        said = present(self._roster.ranks().values(), self._group, self._ended())
        if said is None or isinstance(said, str):
            return said
        known, pointer = self._state.world(), self._state.epoch()
        if known is not None and pointer is not None and known.world.world == said[0].world:
            return self._drifted(said, pointer)
        return agreed(said, {s.rank: s.digest for s in said}, max(s.epoch or 0 for s in said))

    def _ended(self) -> frozenset[str]:
        """Worlds of earlier epochs. The present one is not among them, however often it was left and found again."""
        pointer = self._state.epoch()
        live = pointer.world if pointer else None
        return frozenset(h.world for h in self._state.histories().values()) - {live}

    def _drifted(self, said: list[RankSaid], pointer: EpochPointer) -> Candidate | str | None:
        """The adopted world serves another placement than the store believes, with no migration to explain it.

        So it is after the store was set back to an older state. While a migration runs ranks may differ, and a word may
        be older than the store's last change: only words that are surely newer count, and all ranks must agree.
        """
        settled = (pointer.epoch, pointer.digest, self._state.active())
        if self._seen[0] != settled:
            self._seen = (settled, self._clock.monotonic())
        live = self._roster.live(pointer.world)
        fresh = all(s.rank in live and live[s.rank].heard_at > self._seen[1] + SETTLED_S for s in said)
        if self._state.active() is not None or not fresh:
            return None
        serves = {s.rank: live[s.rank].digest for s in said}
        if set(serves.values()) == {pointer.digest}:
            return None
        return agreed(said, serves, max(live[s.rank].epoch or 0 for s in said))

    def _table(self, found: Candidate) -> Placement | None:
        told = self._roster.table_named(found.digest) or self._state.placement_named(found.digest)
        if told is not None:
            return told
        shape = found.world.shape
        try:
            start = linear(shape.layers, shape.experts, found.world.ranks, found.world.slots)
        except PlacementError:
            return None
        return start if start.digest == found.digest else None

    async def _adopt(self, found: Candidate, table: Placement) -> bool:
        pointer = self._state.epoch()
        epoch = max(pointer.epoch if pointer else 0, found.epoch) + 1
        world, now = found.world.world, self._clock.now()
        keys, revision = self._state.keys, self._term.revision
        crash_point("controller.adopt.before")
        await self._term.apply_each(placement_parts(keys, revision, table))
        transaction = adopt(
            keys,
            revision,
            self._state.unchanged(keys.world).revision,
            self._state.unchanged(keys.epoch).revision,
            WorldRecord(found.world, found.manifest_digest, now, new_nonce()),
            EpochPointer(epoch, found.digest, world, epoch, new_nonce()),
            HistoryRecord(
                epoch,
                HistoryKind.ADOPTION,
                world,
                found.digest,
                pointer.digest if pointer else None,
                None,
                True,
                "controller",
                f"world {world} serves it",
                now,
                new_nonce(),
            ),
        )
        done = await self._term.apply(transaction, *self._end_migration(world))
        crash_point("controller.adopt.after")
        return done

    def _end_migration(self, new_world: str) -> tuple[Transaction, ...]:
        """What ends the migration of the world before, for the same transaction."""
        active = self._state.active()
        if active is None:
            return ()
        journey = self._state.journey(active.migration)
        if journey.record.world == new_world:
            return ()
        at, _ = advance_migration(journey.stored, WorldLost(new_world))
        if at.state not in FINAL:
            return ()
        return ending(self._state, self._term, self._clock, journey, at)


def ending(state: GroupState, term: Term, clock: Clock, journey: Journey, at: Migration) -> tuple[Transaction, ...]:
    """What writes the end of a migration: its waves, its record, its plan, and that no migration is active."""
    keys, now = state.keys, clock.now()
    record = MigrationRecord.of(
        at,
        actor=journey.record.actor,
        created_at=journey.record.created_at,
        now=now,
        leader=term.epoch,
        nonce=new_nonce(),
    )
    done = PlanState.DONE if at.state.value == "DONE" else PlanState.STALE
    plan = encode_plan(replace(journey.plan, state=done), new_nonce())
    active = state.mirror.get(keys.active)
    return (
        *changed_waves(state, term, clock, journey, at),
        finish(
            keys,
            term.revision,
            state.unchanged(keys.migration(at.id)).revision,
            active.value if active else b"",
            record,
            plan.main,
        ),
    )


def changed_waves(
    state: GroupState, term: Term, clock: Clock, journey: Journey, at: Migration
) -> tuple[Transaction, ...]:
    """Writes for the waves that have a record and went on. A wave that was never opened has none, and needs none."""
    result: list[Transaction] = []
    for wave in at.waves:
        stored = journey.waves.get(wave.number)
        if stored is not None and stored.wave != wave:
            key = state.keys.wave(at.id, wave.number)
            following = stored.at(wave, now=clock.now(), leader=term.epoch, nonce=new_nonce())
            result.append(put(key, encode(following), state.unchanged(key)))
    return tuple(result)
