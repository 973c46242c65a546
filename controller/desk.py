"""The desk of one group: what the API may ask and order. Reads from the mirror on any controller; only the leader changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from numpy.typing import NDArray

from controller import views
from controller.decide import Found, problem_of
from controller.explain import anomalies, explain
from controller.facts import facts_of, gather
from controller.goals import ALL
from controller.group import Group
from controller.lead import Lead
from controller.limits import Spent
from controller.roster import RankLive, RankSaid
from controller.settings import GroupSettings
from controller.solver import Problem
from controller.term import Term, delete, put
from eplane.errors import (
    Conflict,
    Invalid,
    LoadReportError,
    NotLeader,
    RecordError,
    RefusedByGoal,
    SettingsError,
)
from eplane.load import LoadReport, Refusal
from eplane.plan import Decision, Plan, PlanKind, Ruling
from eplane.records import Mode, ModeRecord, PauseRecord, SettingsRecord, encode, new_nonce
from eplane.routing import read_samples
from eplane.store.base import Missing
from eplane.transactions import Transaction
from eplane.wording import counted

Json = Any
MAX_RANKS_A_REPORT = 4096
# A person is offered moves that save at least this part of the predicted step time, or, with the option ANYWAY, any.
LEAST_OFFERED = 0.001
ANYWAY = "anyway"
# Settings that say what a placement must be like, whatever it gains.
GOALS_OF_PLACEMENT = frozenset({"drained", "pinned", "min_replicas", "spread"})
# What a person may set for one proposal: the solver's own fields that bend no hard goal of the group.
OPTIONS = frozenset(
    {"window", "move_weight", "max_moves", "budget_ms", "forecast", "strategy", "rank_cost", "slot_budget"}
)


@dataclass(frozen=True, slots=True)
class Desk:
    """`lead` gives the present term, None while another controller leads."""

    group: Group
    lead: Callable[[], Lead | None]

    # --- reading, on any controller ---

    async def status(self) -> Json:
        lead = self.lead()
        return views.status(self.group, lead.term.epoch if lead else None, lead.trouble if lead else None)

    async def load(self) -> Json:
        return views.load(self.group)

    async def windows(self, since_step: int = -1) -> Json:
        return views.windows(self.group, since_step)

    async def recording(self, since_step: int = -1, world: str | None = None) -> Mapping[str, NDArray[Any]] | None:
        """All windows that are kept, as arrays; None where none is newer."""
        return views.recording(self.group, since_step, world)

    async def placement(self, epoch: int | None = None) -> Json:
        return views.placement(self.group, epoch)

    async def plans(self) -> Json:
        """Newest first."""
        state = self.group.state
        return [views.plan_view(plan, state, False) for plan in reversed(state.plans())]

    async def plan(self, plan_id: str) -> Json:
        return views.plan_view(self.group.state.plan(plan_id), self.group.state, True)

    async def migrations(self) -> Json:
        """Newest first."""
        return [views.migration_line(m) for m in reversed(self.group.state.migrations())]

    async def migration(self, migration_id: str) -> Json:
        return views.migration_view(self.group.state, self.group.state.journey(migration_id))

    async def nodes(self) -> Json:
        return views.nodes(self.group)

    async def history(self, limit: int) -> Json:
        """Newest first."""
        records = sorted(self.group.state.histories().values(), key=lambda h: -h.epoch)
        return [views.history_view(record) for record in records[: max(0, limit)]]

    async def goals(self) -> Json:
        """Every goal, with what it said of the newest plan."""
        plans = self.group.state.plans()
        said = {d.goal: d for d in plans[-1].decisions} if plans else {}
        result: list[Json] = []
        for goal in ALL:
            of = said.get(goal.name)
            ruling, sentence = (of.ruling.value, of.sentence) if of else (None, "no plan was judged yet")
            result.append({"goal": goal.name, "hard": goal.hard, "ruling": ruling, "sentence": sentence})
        return result

    async def anomalies(self) -> Json:
        lead = self.lead()
        return anomalies(self.group, lead.trouble if lead else None)

    async def explain(self, layer: int, expert: int) -> Json:
        return explain(self.group, layer, expert)

    async def config(self) -> Json:
        return self.group.state.settings().shown()

    async def verdicts(self, limit: int = 64) -> Json:
        """The last sentences of this controller's cycles, newest first."""
        return [v.to_json() for v in list(self.group.verdicts)[::-1][:limit]]

    # --- changing, on the leader ---

    async def propose(
        self,
        policy: str | None = None,
        actor: str = "operator",
        reason: str = "",
        options: Mapping[str, Json] | None = None,
    ) -> Json:
        """A plan, stored but not begun; or one sentence why there is none."""
        lead = self._lead()
        fields, anyway = _options(options or {})
        async with lead.deciding:
            facts = gather(lead.state, self.group.book, self.group.clock.now())
            if facts is None:
                raise Conflict("no world has been adopted yet: there is nothing to plan for")
            wanted = self._policy(facts.settings, policy)
            found = await lead.decider.find(facts, wanted, fields)
            if found is None:
                return f"{wanted} finds no better placement than the live one"
            if not (found.forced or anyway) and not found.estimate.part >= LEAST_OFFERED:
                return _nothing_to_gain(wanted, found)
            self._no_hard_no(found.verdict.decisions)
            plan = await lead.plan(facts, found, actor, reason or found.estimate.sentence)
        return self._shown(plan)

    async def execute(self, plan_id: str, if_match_epoch: int | None, actor: str, reason: str = "") -> Json:
        lead = self._lead()
        migration = await lead.plans.execute(plan_id, if_match_epoch, actor)
        lead.nudge.set()
        return views.migration_view(lead.state, lead.state.journey(migration))

    async def discard(self, plan_id: str, actor: str, reason: str = "") -> Json:
        return self._shown(await self._lead().plans.discard(plan_id))

    async def abort(self, migration_id: str, actor: str, reason: str = "") -> Json:
        lead = self._lead()
        await lead.driver.abort(migration_id, actor, reason or "aborted")
        lead.nudge.set()
        return views.migration_view(lead.state, lead.state.journey(migration_id))

    async def rollback(self, to_epoch: int, actor: str, reason: str = "") -> Json:
        """A plan that leads back to the placement of an earlier epoch; executed like any other."""
        lead = self._lead()
        async with lead.deciding:
            facts = gather(lead.state, self.group.book, self.group.clock.now())
            if facts is None:
                raise Conflict("no world has been adopted yet: there is nothing to go back to")
            if to_epoch >= facts.pointer.epoch:
                raise Conflict(f"epoch {to_epoch} is not in the past; the live one is {facts.pointer.epoch}")
            target = lead.state.placement(to_epoch)
            if target.p2l.shape != facts.placement.p2l.shape or target.experts != facts.placement.experts:
                raise Conflict(f"epoch {to_epoch} is of a world with another shape")
            if target.ranks != facts.placement.ranks:
                raise Conflict(f"epoch {to_epoch} is of a world with {target.ranks} ranks")
            if target.digest == facts.placement.digest:
                return f"the live placement is that of epoch {to_epoch} already"
            found = await lead.decider.judged(facts, target, "rollback", (f"back to epoch {to_epoch}",))
            self._no_hard_no(found.verdict.decisions)
            plan = await lead.plans.propose(
                facts, found, actor, reason or f"back to epoch {to_epoch}", PlanKind.ROLLBACK
            )
        return self._shown(plan)

    async def pause(self, actor: str, reason: str = "") -> Json:
        """From now on nothing is cut over. A pause of someone else stands as it is."""
        lead, key = self._lead(), self.group.keys.pause
        if lead.state.pause() is None:
            record = PauseRecord(actor, reason, self.group.clock.now(), new_nonce())
            await lead.term.apply(put(key, encode(record), Missing(key)))
        return {"paused": lead.state.pause() is not None}

    async def resume(self, actor: str, reason: str = "") -> Json:
        lead, key = self._lead(), self.group.keys.pause
        if lead.state.pause() is not None:
            await self._must(lead.term, delete(key, lead.state.unchanged(key)))
        lead.nudge.set()
        return {"paused": lead.state.pause() is not None}

    async def set_mode(self, mode: str, actor: str, reason: str = "") -> Json:
        lead, key = self._lead(), self.group.keys.mode
        known = {m.value: m for m in Mode}
        if mode not in known:
            raise Invalid("mode", f"is {mode!r:.40}, must be one of {', '.join(known)}")
        record = ModeRecord(known[mode], actor, reason, self.group.clock.now(), new_nonce())
        await self._must(lead.term, put(key, encode(record), lead.state.unchanged(key)))
        active = lead.state.active()
        if active is None or known[mode] is Mode.AUTO:
            return {"mode": lead.state.mode().value}
        note = f"migration {active.migration} is running; it ends by itself; abort it with: "
        return {
            "mode": lead.state.mode().value,
            "note": f"{note}eplane migration abort {active.migration} -g {self.group.name}",
        }

    async def set_settings(self, patch: Mapping[str, Json], actor: str, reason: str = "") -> Json:
        """Change settings of the group while it runs. Only what differs from the defaults is stored."""
        lead, key = self._lead(), self.group.keys.settings
        try:
            settings = _present(lead).patched(patch)
        except SettingsError as error:
            raise Invalid(error.field, error.reason) from error
        self._meetable(lead, settings, patch)
        default, shown = GroupSettings().shown(), settings.shown()
        values = {name: value for name, value in shown.items() if value != default[name]}
        record = SettingsRecord(values, actor, reason, self.group.clock.now(), new_nonce())
        await self._must(lead.term, put(key, encode(record), lead.state.unchanged(key)))
        return await self.config()

    # --- reports of agents ---

    async def ingest(self, body: Mapping[str, Json]) -> Json:
        """Take a report: counts, descriptions, statuses. What is wrong in it is refused by itself, never poisons the rest."""
        lead = self._lead()
        try:
            report, unreadable = LoadReport.from_json(body.get("report"))
        except LoadReportError as error:
            raise Invalid(error.field, error.reason) from error
        if report.group != self.group.name:
            raise Invalid("report.group", f"is {report.group!r:.80}, this is group {self.group.name}")
        refused = [*self._described(body, report), *self._statuses(body, report)]
        self.group.open_book()
        samples, unread = read_samples(body.get("samples"))
        self.group.book.refused["sample"] += len(unread)
        refused.extend(unread)
        took = self.group.book.take(report, unreadable, samples, self.group.clock.monotonic())
        metrics, name = self.group.metrics, self.group.name
        metrics.subwindows.labels(name).inc(took.accepted)
        for cause, count in self.group.new_refusals().items():
            metrics.refused.labels(name, cause).inc(count)
        world = lead.state.world()
        ranks = world.world.ranks_of(report.node) if world and world.world.world == report.world else ()
        return {
            "accepted": took.accepted,
            "refused": [{"rank": r.rank, "seq": r.seq, "reason": r.reason} for r in (*took.refused, *refused)],
            "shares": self.group.hint_for(report.node, report.incarnation) if ranks else None,
            "want_describe": not self.group.roster.knows(report.world, report.node) or lead.adopter.wanted_table(),
            "window_after": self.group.book.seq_of(ranks),
        }

    def _described(self, body: Mapping[str, Json], report: LoadReport) -> list[Refusal]:
        lead, now, refused = self._lead(), self.group.clock.monotonic(), []
        said: RankSaid | None = None
        for item in _items(body, "describe"):
            try:
                said = RankSaid.read(item)
                if said.node != report.node or said.world != report.world:
                    raise LoadReportError("describe.node", f"is of {said.node} in {said.world}, the report is not")
                self.group.roster.describe(said, now)
            except LoadReportError as error:
                refused.append(Refusal(-1, -1, str(error)))
        if said is not None and body.get("placement") is not None:
            try:
                self.group.roster.table(body.get("placement"), said)
            except LoadReportError as error:
                refused.append(Refusal(-1, -1, str(error)))
        if said is not None:
            lead.nudge.set()
        return refused

    def _statuses(self, body: Mapping[str, Json], report: LoadReport) -> list[Refusal]:
        now, refused = self.group.clock.monotonic(), []
        for item in _items(body, "statuses"):
            try:
                live = RankLive.read(item, now)
                if live.world == report.world:
                    self.group.roster.status(live)
            except LoadReportError as error:
                refused.append(Refusal(-1, -1, str(error)))
        return refused

    # --- shared ---

    def _meetable(self, lead: Lead, settings: GroupSettings, patch: Mapping[str, Json]) -> None:
        """Raises Infeasible where a change asks more of a placement than the adopted world can hold.

        Only a change of these settings is judged, so that those that a smaller world made impossible can be mended one
        by one. What names something that is not in the world is an anomaly, not impossible: another world may have it.
        """
        world, pointer = lead.state.world(), lead.state.epoch()
        if world is None or pointer is None or not GOALS_OF_PLACEMENT & patch.keys():
            return
        size = world.world.shape.layers, world.world.shape.experts, world.world.ranks
        there = tuple(pin for pin in settings.pinned if all(at < of for at, of in zip(pin, size, strict=True)))
        wanted = replace(settings, pinned=there)
        facts = facts_of(wanted, world.world, pointer, lead.state.placement(), (), Spent())
        Problem.from_dict(problem_of(facts, settings.policy))

    def _lead(self) -> Lead:
        lead = self.lead()
        if lead is None or lead.term.ended:
            leader = self.group.state.leader()
            raise NotLeader(leader[0].url if leader else None)
        return lead

    def _shown(self, plan: Plan) -> Json:
        return views.plan_view(self.group.state.plan(plan.id), self.group.state, True)

    async def _must(self, term: Term, transaction: Transaction) -> None:
        if not await term.apply(transaction):
            raise Conflict("someone else changed it at the same moment; look again")

    @staticmethod
    def _no_hard_no(decisions: tuple[Decision, ...]) -> None:
        hard = {goal.name for goal in ALL if goal.hard}
        for decision in decisions:
            if decision.goal in hard and decision.ruling is Ruling.NO:
                raise RefusedByGoal(f"{decision.goal}: {decision.sentence}")

    @staticmethod
    def _policy(settings: GroupSettings, asked: str | None) -> str:
        if asked is None:
            return settings.policy
        try:
            return settings.patched({"policy": asked}).policy
        except SettingsError as error:
            raise Invalid(error.field, error.reason) from error


def _present(lead: Lead) -> GroupSettings:
    """The present settings; the defaults where the store holds what can not be read, so that a change can mend it."""
    try:
        return lead.state.settings()
    except RecordError:
        return GroupSettings()


def _options(options: Mapping[str, Json]) -> tuple[dict[str, Json], bool]:
    """Fields of the solver, and whether to offer the plan whatever it gains."""
    for name in options:
        if name not in OPTIONS | {ANYWAY}:
            raise Invalid(f"options.{name}"[:80], f"is not known; known are {', '.join(sorted(OPTIONS | {ANYWAY}))}")
    anyway = options.get(ANYWAY, False)
    if not isinstance(anyway, bool):
        raise Invalid(f"options.{ANYWAY}", "must be true or false")
    return {name: value for name, value in options.items() if name != ANYWAY}, anyway


def _nothing_to_gain(policy: str, found: Found) -> str:
    worth, moves = found.estimate, sum(len(wave.loads) for wave in found.waves)
    return (
        f"{policy} finds nothing to gain: {counted(moves, 'move')} would change predicted balancedness from {worth.balancedness_before:.3f} "
        f"to {worth.balancedness_after:.3f} and save {worth.part:.1%} of the step time"
    )


def _items(body: Mapping[str, Json], name: str) -> list[Json]:
    found = body.get(name)
    return found[:MAX_RANKS_A_REPORT] if isinstance(found, list) else []
