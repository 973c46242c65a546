"""Drives the active migration: reads what is stored, sees what is due, writes the next state. Agents do the work.

Each round begins from the store, so a round can be repeated, interrupted anywhere, and taken up by another leader. The
records are what agents act on: a wave STAGING is to be staged, SWITCHING to be armed, ABORTED to be dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from controller.adoption import ending
from controller.roster import Roster
from controller.state import GroupState, Journey
from controller.term import Term, put
from eplane.clock import Clock
from eplane.crash import crash_point
from eplane.errors import Conflict, IllegalTransition, InvariantBroken, NotFound
from eplane.migration import (
    FINAL,
    AbortAsked,
    Ambiguous,
    DeadlinePassed,
    Migration,
    MigrationState,
    OfWave,
    WaveState,
    WorldLost,
    advance_migration,
    contradiction,
    due,
    may_cut,
    resume,
)
from eplane.placement import FloatTable, Placement
from eplane.plan import WavePlan
from eplane.records import HistoryKind, HistoryRecord, MovesRecord, encode, new_nonce
from eplane.transactions import Transaction, cutover, placement_parts, write_wave
from eplane.wave import CutoverDone, ReportStalled, Wave
from eplane.work import MigrationRecord, WaveRecord, seen_acks

log = logging.getLogger(__name__)

# What a rank reports contradicts the store only if it was heard this long after the store last changed.
SETTLED_S = 5.0
_BEFORE_CUTOVER = (WaveState.STAGING, WaveState.VERIFIED)

Shares = Callable[[Placement], FloatTable | None]


@dataclass(frozen=True, slots=True)
class Round:
    """What a round of the driver came to. `wrote`: something went on, so another round may find more to do."""

    wrote: bool
    sentence: str
    migration: Migration | None = None
    stalled: tuple[ReportStalled, ...] = ()
    ended: Migration | None = None


IDLE = Round(False, "no migration is active")


class Driver:
    """Drives for one term of leadership. `shares` says how the tokens of a placement are best split now."""

    def __init__(self, state: GroupState, term: Term, roster: Roster, clock: Clock, shares: Shares) -> None:
        self._state = state
        self._term = term
        self._roster = roster
        self._clock = clock
        self._shares = shares
        self._timers: dict[tuple[object, ...], float] = {}

    async def step(self) -> Round:
        """One round: note acks and deadlines, write what changed, cut over when all is ready, finish at the end."""
        active = self._state.active()
        if active is None:
            self._timers.clear()
            return IDLE
        journey = self._state.journey(active.migration)
        at = self._noted(journey)
        if at.state in FINAL:
            return await self._finish(journey, at)
        if at != journey.stored:
            wrote = await self._save(journey, at)
            if wrote is not None:
                return Round(wrote, sentence_of(at), at, _stalled(at))
        ready = next((w for w in at.waves if may_cut(at, w.number)), None)
        pause = self._state.pause()
        if ready is not None and pause is not None:
            sentence = f"wave {ready.number} is verified and waits: paused by {pause.actor}"
            return Round(False, sentence, at, _stalled(at))
        if ready is not None:
            return Round(await self._cut_over(journey, at, ready), sentence_of(at), at, _stalled(at))
        wrote = await self._save(journey, at) if self._of_an_older_leader(journey) else None
        return Round(bool(wrote), sentence_of(at), at, _stalled(at))

    async def abort(self, migration: str, actor: str, reason: str) -> Migration:
        """End a migration before its next cutover. Conflict when every wave is past its cutover, or it has ended."""
        for _ in range(8):
            journey = self._state.journey(migration)
            active = self._state.active()
            if journey.record.state in FINAL or active is None or active.migration != migration:
                raise Conflict(f"migration {migration} has ended already: {journey.record.state.value}")
            try:
                at, _ = advance_migration(self._noted(journey), AbortAsked(actor, reason))
            except IllegalTransition as error:
                raise Conflict(f"migration {migration} can not be aborted any more: {error}") from error
            crash_point("controller.abort.before")
            done = await self._save(journey, at)
            crash_point("controller.abort.after")
            if done is not False:
                return at
        raise Conflict(f"migration {migration} changes faster than it can be aborted; try again")

    # --- noting what happened ---

    def _noted(self, journey: Journey) -> Migration:
        """The migration with all acks, the end of its world, contradictions and deadlines noted. Nothing is written."""
        world = self._state.world()
        if world is None or world.world.world != journey.record.world:
            return advance_migration(journey.stored, WorldLost(world.world.world if world else ""))[0]
        try:
            at, _ = resume(journey.stored, seen_acks(journey.stored, journey.acks))
        except (IllegalTransition, InvariantBroken) as error:
            at = advance_migration(journey.stored, Ambiguous(f"the stored acks contradict the waves: {error}"))[0]
        if at.state in FINAL or at.state is MigrationState.DEAD:
            return at
        self._keep_timers(at)
        return self._overdue(self._checked(at))

    def _checked(self, at: Migration) -> Migration:
        """Dead, if ranks surely serve what this migration can not have led to."""
        changed = self._since(at, ("state", at.state, tuple((w.state, w.cut, w.switched) for w in at.waves)))
        heard = self._roster.live(at.world)
        late = {r: live.digest for r, live in heard.items() if live.heard_at > changed + SETTLED_S}
        wrong = contradiction(at, late)
        return at if wrong is None else advance_migration(at, Ambiguous(wrong))[0]

    def _overdue(self, at: Migration) -> Migration:
        settings, now = self._state.settings(), self._clock.monotonic()
        for wave in at.waves:
            event = None
            if wave.state in _BEFORE_CUTOVER:
                lasted = now - self._since(at, ("stage", wave.number))
                if lasted > settings.stage_timeout_s:
                    waits = ", ".join(wave.without(wave.verified)) or "its turn"
                    event = DeadlinePassed(f"not ready after {lasted:.0f} s, waiting for {waits}")
            elif wave.state is WaveState.SWITCHING or (wave.state is WaveState.ABORTED and not wave.all_clean):
                seen = (wave.verified, wave.switched, wave.clean)
                lasted = now - self._since(at, ("progress", wave.number, wave.state, seen))
                if lasted > settings.stall_s and not wave.stalled:
                    waits = ", ".join(wave.without(wave.clean))
                    event = DeadlinePassed(f"no progress for {lasted:.0f} s, waiting for {waits}")
            if event is not None and not wave.stalled:
                at = advance_migration(at, OfWave(wave.number, event))[0]
        return at

    def _since(self, at: Migration, what: tuple[object, ...]) -> float:
        """When this leader first saw `what` (monotonic)."""
        return self._timers.setdefault((at.id, *what), self._clock.monotonic())

    def _keep_timers(self, at: Migration) -> None:
        if self._state.pause() is not None:
            # A pause is no fault of the nodes: the time until the cutover starts anew after it.
            self._timers = {key: since for key, since in self._timers.items() if key[1] != "stage"}
        self._timers = {key: since for key, since in self._timers.items() if key[0] == at.id}

    # --- writing ---

    def _of_an_older_leader(self, journey: Journey) -> bool:
        """Open waves must carry the newest leader epoch: engines refuse commands of an older one."""
        open_ = (r for r in journey.waves.values() if not (r.wave.state is WaveState.RETIRED or _clean(r.wave)))
        return any(record.leader != self._term.epoch for record in open_)

    async def _save(self, journey: Journey, at: Migration) -> bool | None:
        """Write the waves and the migration as they are in `at`. None when there is nothing to write."""
        parts = [t for wave in at.waves for t in self._written(journey, wave)]
        if (at.state, at.reason) != (journey.record.state, journey.record.reason):
            key = self._state.keys.migration(at.id)
            parts.append(put(key, encode(self._record(journey, at)), self._state.unchanged(key)))
        if not parts:
            return None
        opens = any(w.state is WaveState.STAGING and w.number not in journey.waves for w in at.waves)
        keys = self._state.keys
        fence = Transaction((self._state.unchanged(keys.world), self._state.unchanged(keys.active)), ())
        if opens:
            crash_point("controller.stage.before")
        done = await self._term.apply(fence, *parts)
        if opens:
            crash_point("controller.stage.after")
        return done

    def _written(self, journey: Journey, wave: Wave) -> tuple[Transaction, ...]:
        """What writes one wave, if it changed. A wave gets its record when it opens."""
        stored, keys, now = journey.waves.get(wave.number), self._state.keys, self._clock.now()
        key = keys.wave(journey.record.id, wave.number)
        revision = self._state.unchanged(key).revision
        if stored is None:
            if wave.state is not WaveState.STAGING:
                return ()
            record = self.opened(journey.record.id, journey.record.world, wave, journey.plan.waves[wave.number - 1])
            return (write_wave(keys, self._term.revision, 0, record),)
        if stored.wave == wave and (
            stored.leader == self._term.epoch or wave.state is WaveState.RETIRED or _clean(wave)
        ):
            return ()
        record = stored.at(wave, now=now, leader=self._term.epoch, nonce=new_nonce())
        return (write_wave(keys, self._term.revision, revision, record),)

    def opened(self, migration: str, world: str, wave: Wave, work: WavePlan) -> WaveRecord:
        """The record of a wave that opens, with all that agents need: delta, sources, first shares, rate limit."""
        target = work.applied_to(self._state.placement())
        return WaveRecord(
            world=world,
            migration=migration,
            wave=wave,
            work=work,
            shares=self._shares(target),
            bytes_per_s=self._state.settings().bytes_per_s,
            since=self._clock.now(),
            leader=self._term.epoch,
            nonce=new_nonce(),
        )

    def _record(self, journey: Journey, at: Migration) -> MigrationRecord:
        return MigrationRecord.of(
            at,
            actor=journey.record.actor,
            created_at=journey.record.created_at,
            now=self._clock.now(),
            leader=self._term.epoch,
            nonce=new_nonce(),
        )

    async def _cut_over(self, journey: Journey, at: Migration, wave: Wave) -> bool:
        """The point of no return, as one transaction. False when a compare failed: the next round sees why."""
        keys, revision, pointer = self._state.keys, self._term.revision, self._state.epoch()
        found = None if pointer is None else (pointer.epoch + 1, pointer.digest, pointer.world)
        if pointer is None or found != (wave.epoch, wave.base_digest, at.world):
            stop = AbortAsked("controller", f"epoch {wave.epoch} does not follow the live one")
            return bool(await self._save(journey, advance_migration(at, stop)[0]))
        full = pointer.needs_full()
        after, _ = advance_migration(at, OfWave(wave.number, CutoverDone(wave.epoch)))
        record = journey.waves[wave.number].at(
            after.waves[wave.number - 1], now=self._clock.now(), leader=self._term.epoch, nonce=new_nonce()
        )
        crash_point("controller.cutover.before")
        if full:
            target = record.work.applied_to(self._state.placement())
            await self._term.apply_each(placement_parts(keys, revision, target))
        done = await self._term.apply(
            cutover(
                keys,
                revision,
                self._state.unchanged(keys.wave(at.id, wave.number)).revision,
                self._state.unchanged(keys.epoch).revision,
                self._state.unchanged(keys.world).revision,
                record,
                replace(
                    pointer,
                    epoch=wave.epoch,
                    digest=wave.target_digest,
                    full_epoch=wave.epoch if full else pointer.full_epoch,
                    nonce=new_nonce(),
                ),
                self._history(journey, record, full),
                self._moves(record),
            ),
            Transaction((self._state.unchanged(keys.active),), ()),
        )
        crash_point("controller.cutover.after")
        if done:
            log.info("epoch %d is the truth: wave %d of migration %s", wave.epoch, wave.number, at.id)
        return done

    def _history(self, journey: Journey, record: WaveRecord, full: bool) -> HistoryRecord:
        work, plan = record.work, journey.plan
        last = work.number == len(plan.waves)
        return HistoryRecord(
            epoch=record.wave.epoch,
            made_by=HistoryKind.WAVE,
            world=record.world,
            digest=work.target_digest,
            base_digest=work.base_digest,
            changes=work.changes,
            full=full,
            actor=journey.record.actor,
            reason=plan.reason,
            at=self._clock.now(),
            nonce=new_nonce(),
            plan=plan.id,
            migration=record.migration,
            wave=work.number,
            moves=len(work.loads),
            bytes=work.bytes,
            predicted_gain_s=plan.predicted.gain_s if last else None,
        )

    def _moves(self, record: WaveRecord) -> MovesRecord:
        world = self._state.world()
        if world is None:
            raise NotFound("the world is not known any more")
        moves: dict[str, int] = {}
        for rank, count in record.work.incoming(world.world.slots).items():
            node = world.world.node_of_rank[rank]
            moves[node] = moves.get(node, 0) + count
        each = world.world.shape.bundle_bytes
        weights = {node: count * each for node, count in moves.items()}
        return MovesRecord(record.migration, record.wave.number, self._clock.now(), moves, weights)

    async def _finish(self, journey: Journey, at: Migration) -> Round:
        """Write the outcome and let the next migration come."""
        crash_point("controller.finish.before")
        done = await self._term.apply(*ending(self._state, self._term, self._clock, journey, at))
        crash_point("controller.finish.after")
        if done:
            log.info("migration %s ends: %s", at.id, sentence_of(at))
        return Round(done, sentence_of(at), at, (), at if done else None)


def _clean(wave: Wave) -> bool:
    return wave.state is WaveState.ABORTED and wave.all_clean


def _stalled(at: Migration) -> tuple[ReportStalled, ...]:
    return tuple(action for action in due(at) if isinstance(action, ReportStalled))


def sentence_of(at: Migration) -> str:
    """Where a migration stands, in one sentence."""
    if at.state in FINAL or at.state is MigrationState.DEAD:
        why = f": {at.reason}" if at.reason else ""
        return f"migration {at.id} is {at.state.value}, {at.live} of {len(at.waves)} waves live{why}"
    open_ = [w for w in at.waves if w.state in (*_BEFORE_CUTOVER, WaveState.SWITCHING) or not _settled(w)]
    if not open_:
        return f"migration {at.id} is {at.state.value}"
    wave = open_[0]
    waits = {
        WaveState.STAGING: wave.without(wave.verified),
        WaveState.SWITCHING: wave.without(wave.clean),
        WaveState.ABORTED: wave.without(wave.clean),
    }.get(wave.state, ())
    on = f", waiting for {', '.join(waits)}" if waits else ""
    stalled = " (STALLED)" if wave.stalled else ""
    return f"migration {at.id}: wave {wave.number} of {len(at.waves)} is {wave.state.value}{stalled}{on}"


def _settled(wave: Wave) -> bool:
    return wave.state in (WaveState.PENDING, WaveState.RETIRED) or _clean(wave)
