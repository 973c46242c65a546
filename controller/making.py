"""The life of a plan in the store: proposed, executed, discarded, gone stale."""

from __future__ import annotations

import logging
from dataclasses import replace

from controller.decide import Found
from controller.driver import Driver
from controller.facts import Facts
from controller.gate import Estimate
from controller.goals import HARD, LIMITS, Case, judge
from controller.goals.soft import SOFT
from controller.state import GroupState
from controller.term import Term, put
from eplane.clock import Clock
from eplane.crash import crash_point
from eplane.errors import Conflict, RefusedByGoal
from eplane.migration import Start, advance_migration, planned
from eplane.plan import Plan, PlanKind, PlanState, Ruling
from eplane.records import ActiveRecord, new_nonce
from eplane.store.base import Missing
from eplane.transactions import Transaction, begin, plan_parts
from eplane.work import MigrationRecord, encode_plan

log = logging.getLogger(__name__)


class PlanDesk:
    """Writes plans for one term of leadership."""

    def __init__(self, state: GroupState, term: Term, driver: Driver, clock: Clock, group: str) -> None:
        self._state = state
        self._term = term
        self._driver = driver
        self._clock = clock
        self._group = group

    async def propose(
        self, facts: Facts, found: Found, actor: str, reason: str, kind: PlanKind = PlanKind.REBALANCE
    ) -> Plan:
        """Store the change as a plan. It commands nothing until it is executed."""
        plan = Plan(
            id=f"p-{new_nonce()}",
            group=self._group,
            world=facts.world.world,
            base_epoch=facts.pointer.epoch,
            base_digest=facts.pointer.digest,
            target_digest=found.target.digest,
            waves=found.waves,
            created_at=self._clock.now(),
            reason=reason,
            actor=actor,
            policy=found.policy,
            predicted=found.estimate.prediction(found.waves),
            decisions=found.verdict.decisions,
            kind=kind,
        )
        stored = encode_plan(plan, new_nonce())
        keys = self._state.keys
        crash_point("controller.plan.before")
        await self._term.apply_each(plan_parts(keys, self._term.revision, plan.id, stored))
        await self._term.apply(put(keys.plan(plan.id), stored.main, Missing(keys.plan(plan.id))))
        crash_point("controller.plan.after")
        return plan

    async def execute(self, plan_id: str, if_match_epoch: int | None, actor: str) -> str:
        """Begin a plan's migration and return its id. Conflict or RefusedByGoal say why not; nothing is changed then."""
        plan = self._state.plan(plan_id)
        world, pointer = self._state.world(), self._state.epoch()
        if world is None or pointer is None:
            raise Conflict("no world is adopted: there is nothing to move")
        if plan.state is not PlanState.PROPOSED:
            raise Conflict(f"plan {plan_id} is {plan.state.value}; only a PROPOSED plan can be executed")
        based_on = (plan.world, plan.base_epoch, plan.base_digest)
        if based_on != (pointer.world, pointer.epoch, pointer.digest):
            await self.set_state(plan, PlanState.STALE)
            raise Conflict(
                f"plan {plan_id} is stale: it starts from epoch {plan.base_epoch}, the live one is {pointer.epoch}"
            )
        if if_match_epoch is not None and if_match_epoch != pointer.epoch:
            raise Conflict(f"epoch {if_match_epoch} was expected, the live one is {pointer.epoch}")
        active, pause = self._state.active(), self._state.pause()
        if active is not None:
            raise Conflict(f"migration {active.migration} is active; one at a time")
        if pause is not None:
            raise Conflict(f"the group is paused by {pause.actor}: {pause.reason}")
        self._judge(plan)
        migration = f"m-{new_nonce()}"
        if not await self._begin(plan, migration, actor):
            raise Conflict(f"the group changed while plan {plan_id} was to begin; look again")
        return migration

    def _judge(self, plan: Plan) -> None:
        """The hard goals and the limits, once more: settings may have changed since the plan was made."""
        world = self._state.world()
        if world is None:
            raise Conflict("no world is adopted")
        base = self._state.placement()
        target = plan.applied_to(base)[-1]
        promised = plan.predicted
        estimate = Estimate(
            True,
            0.0,
            promised.balancedness_before,
            promised.balancedness_after,
            promised.gain_s,
            promised.cost_s,
            "as planned",
        )
        settings = self._state.settings()
        case = Case(world.world, base, target, plan.waves, settings, estimate, self._state.spent(self._clock.now()))
        goals = (*HARD, *(goal for goal in SOFT if goal.name in LIMITS))
        verdict = judge(case, goals)
        if verdict.ruling is not Ruling.YES:
            raise RefusedByGoal(f"{verdict.refused_by}: {verdict.sentence}")

    async def _begin(self, plan: Plan, migration: str, actor: str) -> bool:
        world = self._state.world()
        if world is None:
            return False
        keys, now = self._state.keys, self._clock.now()
        at, _ = advance_migration(planned(plan, migration, world.world.nodes), Start())
        record = MigrationRecord.of(
            at, actor=actor, created_at=now, now=now, leader=self._term.epoch, nonce=new_nonce()
        )
        wave = self._driver.opened(migration, plan.world, at.waves[0], plan.waves[0])
        crash_point("controller.stage.before")
        done = await self._term.apply(
            begin(
                keys,
                self._term.revision,
                self._state.unchanged(keys.world).revision,
                self._state.unchanged(keys.epoch).revision,
                record,
                wave,
                ActiveRecord(migration, new_nonce()),
                encode_plan(replace(plan, state=PlanState.EXECUTING), new_nonce()).main,
            ),
            Transaction((self._state.unchanged(keys.plan(plan.id)),), ()),
        )
        crash_point("controller.stage.after")
        if done:
            log.info(
                "migration %s begins: plan %s, %d waves, %d moves", migration, plan.id, len(plan.waves), plan.moves
            )
        return done

    async def discard(self, plan_id: str) -> Plan:
        plan = self._state.plan(plan_id)
        if plan.state is PlanState.DISCARDED:
            return plan
        if plan.state is not PlanState.PROPOSED:
            raise Conflict(f"plan {plan_id} is {plan.state.value}; only a PROPOSED plan can be discarded")
        if not await self.set_state(plan, PlanState.DISCARDED):
            raise Conflict(f"plan {plan_id} changed while it was to be discarded; look again")
        return self._state.plan(plan_id)

    async def forget_stale(self) -> None:
        """Mark proposed plans whose base is no longer live."""
        pointer = self._state.epoch()
        for plan in self._state.plans():
            live = pointer is not None and (plan.world, plan.base_epoch) == (pointer.world, pointer.epoch)
            if plan.state is PlanState.PROPOSED and not live:
                await self.set_state(plan, PlanState.STALE)

    def standing(self, facts: Facts) -> Plan | None:
        """The newest plan that is proposed for the live epoch."""
        mine = (p for p in reversed(self._state.plans()) if p.state is PlanState.PROPOSED)
        return next((p for p in mine if (p.world, p.base_epoch) == (facts.world.world, facts.pointer.epoch)), None)

    async def set_state(self, plan: Plan, state: PlanState) -> bool:
        key = self._state.keys.plan(plan.id)
        value = encode_plan(replace(plan, state=state), new_nonce()).main
        return await self._term.apply(put(key, value, self._state.unchanged(key)))
