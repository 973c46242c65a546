"""The life of a migration: the execution of a plan, wave by wave, and what ends it.

    PLANNED --> RUNNING --------------------------> DONE      all waves live
       |          |  |
       |          |  +--> STOPPING --> STOPPED                k of n waves live, 1 <= k < n: a valid placement
       |          |          |    \\--> ABORTED                none live
       |          +----------+-------> DEAD --> ABORTED       contradictory reports; only a new world ends it
       +--(abort, world lost)--------> ABORTED                also from RUNNING and STOPPING when the world is lost

`advance_migration` is pure. Rules of order, in words:
- Wave n+1 opens (STAGING) when wave n is RETIRED, so that no rank is staged again before its CLEAN acks. Where the
  plan says that both fit the free cells (`overlaps`), it opens while wave n is SWITCHING and wave n-1 is RETIRED.
- The cutover of wave n+1 waits for the SWITCHED acks of all nodes for wave n: at most one epoch is armed.
- A wave that is aborted stops the migration: waves not yet cut over are aborted, a wave past its cutover goes forward.
- It ends when every wave is RETIRED or ABORTED and clean; then the next migration may come.

    event \\ in     PLANNED   RUNNING            STOPPING   DONE  STOPPED  ABORTED  DEAD
    Start          RUNNING   .                  .          .     .        x        x
    AbortAsked     ABORTED   STOPPING           .          x     x        .        x
                             x if all waves are past their cutover
    WorldLost      ABORTED   ABORTED            ABORTED    .     .        .        ABORTED
    Ambiguous      x         DEAD               DEAD       x     x        x        .
    OfWave(n, e)   x         table of the wave, then the rules above               .
                             (Start and WorldLost are the migration's own: x)

`.` changes nothing, `x` raises IllegalTransition. What is due follows from the state alone (`due`): a new leader
rebuilds the migration with `resume` from the stored records and acks, and continues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from eplane.errors import IllegalTransition, InvariantBroken
from eplane.keys import AckKind
from eplane.plan import Identity, Plan
from eplane.wave import (
    AbortAsked,
    AbortOn,
    Action,
    ArmOn,
    CallHuman,
    CutoverDone,
    DeadlinePassed,
    Finish,
    MigrationState,
    NodeClean,
    NodeFailed,
    NodeSwitched,
    NodeVerified,
    ReportStalled,
    StageOn,
    Start,
    TryCutover,
    Wave,
    WaveEvent,
    WaveState,
    WorldLost,
    advance_wave,
    check_wave,
    check_wave_step,
    due_in_wave,
    newly_due,
)

__all__ = [
    "FINAL",
    "AbortAsked",
    "AbortOn",
    "Action",
    "Ambiguous",
    "ArmOn",
    "CallHuman",
    "CutoverDone",
    "DeadlinePassed",
    "Finish",
    "Migration",
    "MigrationEvent",
    "MigrationState",
    "NodeClean",
    "NodeFailed",
    "NodeSwitched",
    "NodeVerified",
    "OfWave",
    "ReportStalled",
    "SeenAck",
    "StageOn",
    "Start",
    "TryCutover",
    "Wave",
    "WaveEvent",
    "WaveState",
    "WorldLost",
    "advance_migration",
    "advance_wave",
    "check_migration",
    "check_wave",
    "contradiction",
    "due",
    "may_cut",
    "planned",
    "resume",
]

FINAL = frozenset({MigrationState.DONE, MigrationState.STOPPED, MigrationState.ABORTED})
_BEFORE_CUTOVER = (WaveState.PENDING, WaveState.STAGING, WaveState.VERIFIED)
_OPEN = (WaveState.STAGING, WaveState.VERIFIED, WaveState.SWITCHING)


@dataclass(frozen=True, slots=True)
class Migration:
    """The execution of plan `plan` in `world`, from epoch `base_epoch`. `waves` in order, numbered from 1."""

    id: str
    plan: str
    group: str
    world: str
    base_epoch: int
    waves: tuple[Wave, ...]
    state: MigrationState = MigrationState.PLANNED
    reason: str = ""

    @property
    def nodes(self) -> tuple[str, ...]:
        return self.waves[0].nodes

    @property
    def live(self) -> int:
        """Waves that made their epoch."""
        return sum(wave.cut for wave in self.waves)

    @property
    def epoch(self) -> int:
        """The epoch that is the truth as far as this migration made it."""
        return self.base_epoch + self.live

    def identity(self, wave: int) -> Identity:
        at = self.waves[wave - 1]
        return Identity(self.world, self.id, wave, at.epoch, at.target_digest)


@dataclass(frozen=True, slots=True)
class OfWave:
    """`event` happened to wave `wave`."""

    wave: int
    event: WaveEvent


@dataclass(frozen=True, slots=True)
class Ambiguous:
    """What the engines report fits no state that this migration can have led to."""

    reason: str


@dataclass(frozen=True, slots=True)
class SeenAck:
    """An ack as read from the store."""

    wave: int
    kind: AckKind
    node: str
    reason: str = ""


MigrationEvent = Start | AbortAsked | WorldLost | Ambiguous | OfWave


def planned(plan: Plan, migration: str, nodes: tuple[str, ...]) -> Migration:
    """The migration that will execute `plan` on `nodes` (all nodes of the world)."""
    waves = tuple(
        Wave(w.number, plan.base_epoch + w.number, w.base_digest, w.target_digest, nodes, w.overlaps)
        for w in plan.waves
    )
    result = Migration(migration, plan.id, plan.group, plan.world, plan.base_epoch, waves)
    check_migration(result)
    return result


def advance_migration(migration: Migration, event: MigrationEvent) -> tuple[Migration, tuple[Action, ...]]:
    """The migration after `event`, and what has become due by it.

    Raises IllegalTransition where a table has an x, InvariantBroken where a rule would be broken; the migration given
    stays as it is.
    """
    after = _settle(_apply(migration, event))
    if after == migration:
        return migration, ()
    check_migration(after)
    _check_step(migration, after)
    return after, newly_due(due(migration), due(after))


def resume(stored: Migration, acks: Iterable[SeenAck]) -> tuple[Migration, tuple[Action, ...]]:
    """The migration as a new leader finds it: stored records (some may be a step behind others) and all acks.

    Returns everything that is due. The result does not depend on the order of `acks`, nor on how many of them the
    stored waves have noted already.
    """
    order = [AckKind.VERIFIED, AckKind.FAILED, AckKind.SWITCHED, AckKind.CLEAN]
    at = _settle(stored)
    check_migration(at)
    for ack in sorted(acks, key=lambda a: (a.wave, order.index(a.kind), a.node, a.reason)):
        at, _ = advance_migration(at, OfWave(ack.wave, _event_of(ack)))
    return at, due(at)


def due(migration: Migration) -> tuple[Action, ...]:
    """All that must be done in this state. Doing it again does no harm."""
    match migration.state:
        case MigrationState.PLANNED:
            return ()
        case MigrationState.DEAD:
            return (CallHuman(migration.reason),)
        case MigrationState.RUNNING | MigrationState.STOPPING:
            return tuple(
                action
                for wave in migration.waves
                for action in due_in_wave(wave)
                if not isinstance(action, TryCutover) or may_cut(migration, wave.number)
            )
    return (Finish(migration.state, migration.reason),)


def may_cut(migration: Migration, number: int) -> bool:
    """Whether the cutover of wave `number` may be tried now."""
    wave = migration.waves[number - 1]
    return (
        migration.state is MigrationState.RUNNING
        and wave.state is WaveState.VERIFIED
        and (number == 1 or migration.waves[number - 2].all_switched)
    )


def contradiction(migration: Migration, live: Mapping[int, str]) -> str | None:
    """A sentence if a rank of this world reports a live placement that it can not have; `live`: digest by rank.

    Only reports newer than the stored state count: an old one shows an old placement and proves nothing.
    """
    cut = [wave for wave in migration.waves if wave.cut]
    if not cut:
        possible = {migration.waves[0].base_digest}
    elif cut[-1].all_switched:
        possible = {cut[-1].target_digest}
    else:
        possible = {cut[-1].base_digest, cut[-1].target_digest}
    for rank, digest in sorted(live.items()):
        if digest not in possible:
            return (
                f"rank {rank} serves placement {digest}, epoch {migration.epoch} allows {', '.join(sorted(possible))}"
            )
    return None


def check_migration(migration: Migration) -> None:
    """Raises InvariantBroken unless the waves form a chain and agree with each other and with the state."""
    waves, state = migration.waves, migration.state

    def rule(holds: bool, sentence: str) -> None:
        if not holds:
            raise InvariantBroken(f"migration {migration.id} in {state.value}", sentence)

    rule(bool(waves), "a migration has at least one wave")
    for place, wave in enumerate(waves, start=1):
        check_wave(wave)
        rule(wave.number == place and wave.epoch == migration.base_epoch + place, "waves and epochs grow by one")
        rule(wave.nodes == waves[0].nodes, "every wave switches all nodes")
        if place > 1:
            rule(wave.base_digest == waves[place - 2].target_digest, "a wave starts where the one before ends")
            # So at most one epoch is armed at any time.
            switched = waves[place - 2].all_switched
            rule(not wave.cut or switched, f"wave {place} was cut before all switched for the last")
        rule(wave.state not in _OPEN or _may_open(waves, place), f"wave {place} opened too early")
    staging = [w for w in waves if w.state in (WaveState.STAGING, WaveState.VERIFIED)]
    rule(len(staging) <= 1, "two waves stage at once")
    _check_state(migration, rule)


def _check_state(migration: Migration, rule: Rule) -> None:
    states = [wave.state for wave in migration.waves]
    aborted = [wave for wave in migration.waves if wave.state is WaveState.ABORTED]
    lost = any(wave.lost for wave in migration.waves)
    ended = all(w.state is WaveState.RETIRED or (w.state is WaveState.ABORTED and w.all_clean) for w in migration.waves)
    match migration.state:
        case MigrationState.PLANNED:
            rule(all(s is WaveState.PENDING for s in states), "no wave can have begun")
        case MigrationState.RUNNING:
            rule(not aborted and not ended and any(s in _OPEN for s in states), "a wave is under way, none aborted")
        case MigrationState.STOPPING:
            rule(bool(aborted) and not ended and not lost, "something aborted, something still to wait for")
            rule(not any(s in _BEFORE_CUTOVER for s in states), "no wave is left that could still be cut over")
        case MigrationState.DONE:
            rule(all(s is WaveState.RETIRED for s in states), "done means that every wave is live")
        case MigrationState.STOPPED:
            rule(ended and bool(aborted) and migration.live >= 1 and not lost, "some waves live, the rest cleaned up")
        case MigrationState.ABORTED:
            rule(ended and bool(aborted) and (lost or migration.live == 0), "no wave live, or the world lost")
        case MigrationState.DEAD:
            rule(not lost, "a lost world is not ambiguous")
    rule(migration.state is not MigrationState.DEAD or bool(migration.reason), "a dead migration says why")


def _check_step(before: Migration, after: Migration) -> None:
    if before.state is not after.state and after.state not in _MAY_FOLLOW[before.state]:
        raise InvariantBroken(f"migration {before.id}", f"{after.state.value} can not follow {before.state.value}")
    if len(before.waves) != len(after.waves) or (before.id, before.world) != (after.id, after.world):
        raise InvariantBroken(f"migration {before.id}", "what the migration is about was changed")
    for old, new in zip(before.waves, after.waves, strict=True):
        if old != new:
            check_wave_step(old, new)


def _apply(migration: Migration, event: MigrationEvent) -> Migration:
    state = migration.state
    match event:
        case Start():
            if state is MigrationState.PLANNED:
                return replace(migration, state=MigrationState.RUNNING)
            return _refuse(migration, event) if state in (MigrationState.ABORTED, MigrationState.DEAD) else migration
        case AbortAsked():
            return _abort(migration, event)
        case WorldLost():
            return migration if state in FINAL else _lose(migration, event)
        case Ambiguous():
            if state in (MigrationState.RUNNING, MigrationState.STOPPING):
                return replace(migration, state=MigrationState.DEAD, reason=event.reason)
            return migration if state is MigrationState.DEAD else _refuse(migration, event)
        case OfWave():
            return _of_wave(migration, event)


def _of_wave(migration: Migration, event: OfWave) -> Migration:
    if migration.state is MigrationState.DEAD:
        return migration
    own = isinstance(event.event, Start | WorldLost)
    if migration.state is MigrationState.PLANNED or own or not 1 <= event.wave <= len(migration.waves):
        return _refuse(migration, event)
    wave = migration.waves[event.wave - 1]
    early = wave.state is WaveState.VERIFIED and not may_cut(migration, event.wave)
    if isinstance(event.event, CutoverDone) and early:
        return _refuse(migration, event)
    after, _ = advance_wave(wave, event.event)
    return _with_wave(migration, after)


def _abort(migration: Migration, event: AbortAsked) -> Migration:
    match migration.state:
        case MigrationState.STOPPING | MigrationState.ABORTED:
            return migration
        case MigrationState.DONE | MigrationState.STOPPED | MigrationState.DEAD:
            return _refuse(migration, event)
    if not any(wave.state in _BEFORE_CUTOVER for wave in migration.waves):
        return _refuse(migration, event)
    return _stop(migration, event)


def _stop(migration: Migration, event: AbortAsked) -> Migration:
    """Abort every wave that is not past its cutover. The rest goes forward."""
    waves = tuple(advance_wave(wave, event)[0] if wave.state in _BEFORE_CUTOVER else wave for wave in migration.waves)
    reason = migration.reason or f"{event.actor}: {event.reason}"
    return replace(migration, waves=waves, state=MigrationState.STOPPING, reason=reason)


def _lose(migration: Migration, event: WorldLost) -> Migration:
    waves = tuple(advance_wave(wave, event)[0] for wave in migration.waves)
    if all(wave.state is WaveState.RETIRED for wave in waves):
        return replace(migration, waves=waves)
    reason = f"world lost, {event.new_world} follows" if event.new_world else "world lost"
    return replace(migration, waves=waves, state=MigrationState.ABORTED, reason=reason)


def _settle(migration: Migration) -> Migration:
    """Follow the rules of order as far as they lead without any further event."""
    at = migration
    if at.state is MigrationState.RUNNING:
        broken = next((wave for wave in at.waves if wave.state is WaveState.ABORTED), None)
        if broken is not None:
            at = replace(at, state=MigrationState.STOPPING, reason=at.reason or broken.reason)
    if at.state is MigrationState.STOPPING:
        at = _stop(at, AbortAsked("migration", f"stopping, {at.reason}" if at.reason else "stopping"))
    elif at.state is MigrationState.RUNNING:
        following = next((wave for wave in at.waves if wave.state is WaveState.PENDING), None)
        if following is not None and _may_open(at.waves, following.number):
            at = _with_wave(at, advance_wave(following, Start())[0])
    return _ended(at)


def _ended(migration: Migration) -> Migration:
    if migration.state not in (MigrationState.RUNNING, MigrationState.STOPPING):
        return migration
    if not all(
        wave.state is WaveState.RETIRED or (wave.state is WaveState.ABORTED and wave.all_clean)
        for wave in migration.waves
    ):
        return migration
    if all(wave.state is WaveState.RETIRED for wave in migration.waves):
        outcome = MigrationState.DONE
    elif migration.live and not any(wave.lost for wave in migration.waves):
        outcome = MigrationState.STOPPED
    else:
        outcome = MigrationState.ABORTED
    return replace(migration, state=outcome)


def _may_open(waves: tuple[Wave, ...], number: int) -> bool:
    """Whether wave `number` may stage (or may have staged), as far as the waves before it go."""
    if not all(wave.state is WaveState.RETIRED for wave in waves[: max(number - 2, 0)]):
        return False
    before = waves[number - 2].state if number > 1 else WaveState.RETIRED
    return before is WaveState.RETIRED or (waves[number - 1].overlaps and before is WaveState.SWITCHING)


def _with_wave(migration: Migration, wave: Wave) -> Migration:
    at = wave.number
    return replace(migration, waves=(*migration.waves[: at - 1], wave, *migration.waves[at:]))


def _event_of(ack: SeenAck) -> WaveEvent:
    match ack.kind:
        case AckKind.VERIFIED:
            return NodeVerified(ack.node)
        case AckKind.FAILED:
            return NodeFailed(ack.node, ack.reason)
        case AckKind.SWITCHED:
            return NodeSwitched(ack.node)
        case AckKind.CLEAN:
            return NodeClean(ack.node)


def _refuse(migration: Migration, event: MigrationEvent) -> Migration:
    raise IllegalTransition(f"migration {migration.id} is {migration.state.value}: {event} does not fit")


Rule = Callable[[bool, str], None]
_MAY_FOLLOW = {
    MigrationState.PLANNED: (MigrationState.RUNNING, MigrationState.ABORTED),
    MigrationState.RUNNING: (
        MigrationState.STOPPING,
        MigrationState.DONE,
        MigrationState.ABORTED,
        MigrationState.DEAD,
    ),
    MigrationState.STOPPING: (MigrationState.STOPPED, MigrationState.ABORTED, MigrationState.DEAD),
    MigrationState.DEAD: (MigrationState.ABORTED,),
    MigrationState.DONE: (),
    MigrationState.STOPPED: (),
    MigrationState.ABORTED: (),
}
