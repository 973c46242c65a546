"""One term of leadership of one group: everything that decides and writes, and the task that drives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from controller.adoption import Adopter
from controller.decide import UNDECIDED, Found, Said, undecided
from controller.driver import Driver, Round, sentence_of
from controller.facts import Facts, gather
from controller.group import Group, Hint
from controller.history import measure
from controller.making import PlanDesk
from controller.observe import mean_balancedness
from controller.term import Term
from controller.verdict import Verdict, VerdictKind
from eplane.clock import wait_for_event
from eplane.errors import (
    Conflict,
    FieldError,
    InvariantBroken,
    LeaseLost,
    NotFound,
    RefusedByGoal,
    StoreError,
)
from eplane.migration import MigrationState
from eplane.placement import FloatTable, Placement
from eplane.plan import Plan, PlanKind, PlanState, Ruling
from eplane.records import Mode

log = logging.getLogger(__name__)
ACTOR = "controller"
# A proposal stands while it keeps this part of what it promised.
STANDING_PART = 0.5


class Lead:
    """Made when the seat is won, dropped when it is lost."""

    def __init__(self, group: Group, term: Term, beat: Callable[[], None], tick_s: float) -> None:
        self.group = group
        self.state = group.state
        self.term = term
        self.decider = group.new_decider()
        self.adopter = Adopter(group.state, term, group.roster, group.clock, group.name)
        self.driver = Driver(group.state, term, group.roster, group.clock, self._first_shares)
        self.plans = PlanDesk(group.state, term, self.driver, group.clock, group.name)
        self.trouble: str | None = None
        self.round: Round | None = None
        self.nudge = asyncio.Event()
        # One decision at a time, whoever asks for it.
        self.deciding = asyncio.Lock()
        self._beat = beat
        self._tick_s = tick_s

    # --- the steps of the loop ---

    async def guarded(self, cycle: Callable[[], Awaitable[Said]]) -> Said:
        """Run a cycle; what can go wrong in one becomes its sentence. LeaseLost ends the term and is passed on."""
        with self.group.metrics.cycle_seconds.labels(self.group.name).time():
            async with self.deciding:
                try:
                    return await cycle()
                except RefusedByGoal as error:
                    return VerdictKind.THROTTLED, str(error)
                except UNDECIDED as error:
                    said = undecided(error)
                    if said[0] is VerdictKind.FAILED:
                        self.group.metrics.solver_failures.labels(self.group.name).inc()
                    return said
                except (Conflict, NotFound) as error:
                    return VerdictKind.FAILED, f"the group changed meanwhile: {error}"
                except LeaseLost:
                    raise
                except StoreError as error:
                    return VerdictKind.FAILED, f"the store does not take it: {error}"
                except (FieldError, InvariantBroken) as error:
                    log.error("group %s: %s", self.group.name, error)
                    return VerdictKind.BROKEN_RECORD, f"nothing is done: {error}"

    def observe(self) -> Facts | None:
        self.group.open_book()
        facts = gather(self.state, self.group.book, self.group.clock.now())
        self._show(facts)
        return facts

    def migrating(self) -> Said | None:
        active = self.state.active()
        if active is None:
            return None
        shown = self.round.migration if self.round is not None else None
        if shown is None:
            return VerdictKind.MIGRATING, f"migration {active.migration} is active"
        kind = VerdictKind.DEAD if shown.state is MigrationState.DEAD else VerdictKind.MIGRATING
        return kind, sentence_of(shown)

    async def share(self, facts: Facts) -> None:
        """The fast path: a better split for the live placement rides back on the replies to load reports."""
        placement, out = facts.placement, self.group.hint
        if out is not None and out.digest != placement.digest:
            out = self.group.hint = None
        shares = await self.decider.resplit(facts, out.shares if out is not None else None)
        if shares is None:
            self.group.hint = None
        elif out is None or shares is not out.shares:
            self.group.hint = Hint(placement.digest, shares)

    async def measure(self, facts: Facts) -> None:
        gain = await measure(self.state, self.term, self.decider, facts)
        if gain is not None:
            log.info("group %s: epoch %d gained %.2f s over the horizon", self.group.name, facts.pointer.epoch, gain)

    async def standing(self, facts: Facts) -> str | None:
        """In mode propose: the sentence of the plan that waits for a person. One that no longer pays is set aside."""
        plan = self.plans.standing(facts)
        if plan is None or self.state.mode() is not Mode.PROPOSE or plan.actor != ACTOR:
            return None
        target = plan.applied_to(facts.placement)[-1]
        now = await self.decider.judged(facts, target, plan.policy)
        if now.forced or (
            now.verdict.ruling is not Ruling.NO and now.estimate.gain_s >= plan.predicted.gain_s * STANDING_PART
        ):
            return f"plan {plan.id} waits for a person: {now.estimate.sentence}"
        await self.plans.set_state(plan, PlanState.STALE)
        return None

    async def plan(self, facts: Facts, found: Found, actor: str = ACTOR, reason: str | None = None) -> Plan:
        """Store a change as a plan; its table will start with the shares that were found for it."""
        self.group.start_with(found.target.digest, found.after.shares)
        why = reason or ("a hard goal asks for it" if found.forced else found.estimate.sentence)
        kind = PlanKind.DRAIN if found.forced else PlanKind.REBALANCE
        return await self.plans.propose(facts, found, actor, why, kind)

    async def execute(self, plan_id: str) -> str:
        migration = await self.plans.execute(plan_id, None, ACTOR)
        self.nudge.set()
        return migration

    def speak(self, kind: VerdictKind, sentence: str) -> Verdict:
        return self.group.speak(kind, sentence)

    # --- the task that drives ---

    async def drive(self) -> None:
        """Adopt and drive, again and again, woken by every change; at least each tick. Ends when the seat is lost."""
        while True:
            self.nudge.clear()
            self._beat()
            if not await self.turn():
                await wait_for_event(self.group.clock, self.nudge, self._tick_s)

    async def turn(self) -> bool:
        """One round; whether another may find more to do at once."""
        group = self.group
        try:
            before = self.state.epoch()
            self.trouble = await self.adopter.step()
            after = self.state.epoch()
            if after != before:
                group.metrics.adoptions.labels(group.name).inc()
                group.open_book()
            self.round = await self.driver.step()
        except LeaseLost:
            raise
        except StoreError as error:
            log.warning("group %s: the store does not take it: %s", group.name, error)
            return False
        except (FieldError, InvariantBroken, NotFound) as error:
            self.trouble = f"nothing is done: {error}"
            log.error("group %s: %s", group.name, error)
            return False
        self._count(self.round)
        return self.round.wrote

    def _count(self, turn: Round) -> None:
        name, metrics = self.group.name, self.group.metrics
        metrics.stalled.labels(name).set(len(turn.stalled))
        pointer = self.state.epoch()
        if pointer is not None:
            metrics.epoch.labels(name).set(pointer.epoch)
            self.group.open_book()
        if turn.ended is None:
            return
        metrics.migrations.labels(name, turn.ended.state.value).inc()
        metrics.cutovers.labels(name).inc(turn.ended.live)
        for moved in self.state.moves():
            if moved.migration == turn.ended.id:
                metrics.moves.labels(name).inc(sum(moved.moves.values()))
                metrics.moved_bytes.labels(name).inc(sum(moved.bytes.values()))

    def _show(self, facts: Facts | None) -> None:
        name, group = self.group.name, self.group
        group.metrics.agents.labels(name).set(len(self.state.agents()))
        if group.book.completeness is not None:
            group.metrics.completeness.labels(name).set(group.book.completeness)
        if facts is not None and facts.seen:
            now = mean_balancedness(facts.seen[-1].balancedness)
            if now is not None:
                group.metrics.balancedness.labels(name).set(now)
                group.balance.append((group.clock.now(), now))

    def _first_shares(self, placement: Placement) -> FloatTable | None:
        """Shares that a wave's table starts with: what is known of the load now, else evenly."""
        return self.group.first_shares.get(placement.digest)
