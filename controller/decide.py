"""From facts to a change worth making: solve from the present placement, judge by every goal, confirm on later traffic.

Neither store nor clock: what the controller decides on facts it observed, a simulation decides on facts it replays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from controller.facts import Facts
from controller.gate import Estimate, Split, confirmed, estimate, level
from controller.goals import ALL, Case, Verdict, judge
from controller.goals.hard import drained_rank, too_few_replicas, unpinned
from controller.planner import Room, keep_slots, plan_waves
from controller.solver import Answer
from controller.verdict import VerdictKind
from eplane.errors import AnswerError, EPlaneError, Infeasible, PlanImpossible, ProblemError, SolverFailed
from eplane.load import FloatLoad
from eplane.placement import FloatTable, IntTable, Placement, check_shares
from eplane.plan import Ruling, WavePlan
from eplane.wording import counted

# A new split is worth telling when it levels the load by this much more than the one that is out.
LEAST_SHARE_GAIN = 0.005
# What can go wrong while a change is looked for; nothing is changed then.
UNDECIDED = (Infeasible, PlanImpossible, SolverFailed, ProblemError, AnswerError)

Said = tuple[VerdictKind, str]


class Solver(Protocol):
    """What a decision needs of the solver's process."""

    async def solve(self, problem: Mapping[str, Any], timeout_s: float) -> Answer: ...

    async def shares(self, p2l: IntTable, ranks: int, load: FloatLoad, timeout_s: float) -> FloatTable: ...


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A change: from `before` to `after`, in waves, with what every goal says of it.

    `world`, `at_step`: the newest step it knew of, counted in the life of that world.
    """

    before: Split
    after: Split
    waves: tuple[WavePlan, ...]
    estimate: Estimate
    verdict: Verdict
    forced: bool
    policy: str
    sentences: tuple[str, ...]
    at_step: int
    world: str

    @property
    def target(self) -> Placement:
        return self.after.placement

    @property
    def moves(self) -> int:
        """Bundles that travel."""
        return sum(len(wave.loads) for wave in self.waves)

    @property
    def told(self) -> str:
        what = f"{counted(self.moves, 'move')} in {counted(len(self.waves), 'wave')}"
        return f"{what}: {self.estimate.sentence}"


def problem_of(facts: Facts, policy: str, options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The placement problem, in the solver's own terms. `options` may replace any of its fields."""
    s, world = facts.settings, facts.world
    number = {node: i for i, node in enumerate(world.nodes)}
    loads = np.stack([seen.window.total for seen in facts.history]) if facts.history else facts.load[None]
    window = max(1, len(facts.window))
    problem: dict[str, Any] = {
        "loads": loads,
        "window": window,
        "ranks": world.ranks,
        "slots_per_rank": world.slots,
        "node_of_rank": [number[node] for node in world.node_of_rank],
        "prior": facts.placement.p2l,
        "shares": "weighted" if s.shares and world.capabilities.weighted_shares else "equal",
        "fixed_slots": not world.capabilities.free_slot_order,
        "policy": policy,
        "hardware": s.hardware,
        "bundle_bytes": world.shape.bundle_bytes,
        "budget_ms": s.solver_budget_ms,
        "drained": [rank for rank, node in enumerate(world.node_of_rank) if node in s.drained],
        "pinned": [list(pin) for pin in s.pinned],
        "min_replicas": s.min_replicas,
        "spread": min(s.spread, len(world.nodes)),
        "node_slack": s.node_slack,
    }
    if facts.steps_a_second is not None:
        # As many as the gate lets a gain count for; until the rate was measured, the solver's own default.
        problem["horizon_steps"] = max(1, round(facts.steps_a_second * s.horizon_s))
    if s.move_weight is not None:
        problem["move_weight"] = s.move_weight
    if s.cross_node_weight is not None:
        problem["cross_node_weight"] = s.cross_node_weight
    if s.max_moves_per_layer is not None:
        problem["max_moves"] = s.max_moves_per_layer
    if facts.step_tokens is not None:
        problem["step_tokens"] = facts.step_tokens
    if facts.routings is not None:
        problem["routing_sample"] = facts.routings
    return {**problem, **(options or {})}


def too_little(facts: Facts) -> Said | None:
    """Why there is nothing yet to judge by, if so."""
    if facts.enough():
        return None
    tokens, needed = facts.load.sum(axis=1).max(), facts.settings.min_window_tokens
    return VerdictKind.NO_LOAD, f"the load window has {tokens:.0f} of {needed} tokens a layer"


def undecided(error: EPlaneError) -> Said:
    """The verdict of a cycle in which one of UNDECIDED came up."""
    return (VerdictKind.INFEASIBLE if isinstance(error, Infeasible | PlanImpossible) else VerdictKind.FAILED), str(
        error
    )


class Decider:
    """Finds changes for one group. Keeps the one that waits for later traffic to confirm it.

    `timed` measures each search for a new change. `refused_by`: the goal that refused or throttled what `decide` found
    last, or `confirm` where later traffic did not confirm it.
    """

    def __init__(self, solver: Solver, timed: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._solver = solver
        self._timed = timed
        self._waiting: Found | None = None
        self.refused_by: str | None = None

    async def decide(self, facts: Facts) -> Found | Said:
        """A change that every goal agrees to and that later traffic confirmed; else the sentence why there is none.

        Raises one of UNDECIDED.
        """
        now = f"measured balancedness {facts.balancedness:.3f}"
        self.refused_by = None
        confirmed = await self._confirmed(facts)
        if isinstance(confirmed, tuple):
            return confirmed
        found = confirmed
        if found is None:
            with self._timed():
                found = await self.find(facts, facts.settings.policy)
        if found is None and facts.settings.policy == "static":
            return VerdictKind.STATIC, f"{now}; the policy is static: nothing moves"
        if found is None:
            return VerdictKind.LEVEL, f"{now}; no change would help"
        self.refused_by = found.verdict.refused_by
        if found.verdict.ruling is Ruling.NO:
            return VerdictKind.NOT_WORTH_IT, f"{now}; {found.verdict.sentence}"
        if found.verdict.ruling is Ruling.THROTTLE:
            return VerdictKind.THROTTLED, f"{now}; {found.verdict.sentence}"
        if confirmed is None and facts.settings.confirm and not found.forced:
            self._waiting = found
            return VerdictKind.CONFIRMING, f"waiting for later traffic to confirm: {found.estimate.sentence}"
        return found

    async def _confirmed(self, facts: Facts) -> Found | Said | None:
        """The waiting change once later traffic confirmed it; a sentence while it waits or when it did not hold."""
        waiting = self.waiting(facts)
        if waiting is None:
            return None
        holds, later = await self.confirm(facts, waiting)
        if holds is None:
            return VerdictKind.CONFIRMING, f"waiting for later traffic to confirm: {waiting.estimate.sentence}"
        self._waiting = None
        if holds:
            return await self.judged(facts, waiting.target, waiting.policy, waiting.sentences)
        self.refused_by = "confirm"
        gained = 0.0 if later is None else later.part
        sentence = f"a change that promised {waiting.estimate.part:.1%} would have gained {gained:.1%}"
        return VerdictKind.NOT_WORTH_IT, sentence

    async def resplit(self, facts: Facts, out: FloatTable | None) -> FloatTable | None:
        """The fast path, which moves no bytes: the split that should be out for the live placement, None for none.

        `out`: the one that is. It stays unless another levels the load by enough more. With the policy `static` nothing
        is changed, this neither.
        """
        s, placement = facts.settings, facts.placement
        if not s.shares or not facts.world.capabilities.weighted_shares or s.policy == "static":
            return None
        best = check_shares(placement, await self.shares(facts, placement))
        if out is None:
            return best
        gained = self._level(facts, placement, best) - self._level(facts, placement, out)
        return best if gained > LEAST_SHARE_GAIN else out

    @staticmethod
    def _level(facts: Facts, placement: Placement, shares: FloatTable) -> float:
        return level(facts.load, Split(placement, shares), facts.speeds)

    async def find(self, facts: Facts, policy: str, options: Mapping[str, Any] | None = None) -> Found | None:
        """The solver's change, judged on the load window; None if it changes nothing.

        Raises Infeasible, ProblemError, SolverFailed, PlanImpossible: nothing is changed then.
        """
        answer = await self._solver.solve(problem_of(facts, policy, options), facts.settings.solver_timeout_s)
        world = facts.world
        target = Placement(answer.placement, world.ranks, world.shape.experts)
        if world.capabilities.free_slot_order:
            target = keep_slots(facts.placement, target)
        if target.digest == facts.placement.digest:
            return None
        return await self.judged(facts, target, policy, answer.decisions)

    async def judged(self, facts: Facts, target: Placement, policy: str, sentences: tuple[str, ...] = ()) -> Found:
        """A given target, planned and judged on the load window."""
        settings, world = facts.settings, facts.world
        waves = plan_waves(facts.placement, target, world, Room(settings.spare_min, settings.max_moves_per_wave))
        before, after = await self.split(facts, facts.placement), await self.split(facts, target)
        worth = estimate(
            world, facts.load, before, after, waves, settings, facts.step_tokens, facts.routings, facts.speeds
        )
        case = Case(world, facts.placement, target, waves, settings, worth, facts.spent)
        forced = must_move(case)
        verdict = judge(replace(case, forced=forced), ALL)
        return Found(before, after, waves, worth, verdict, forced, policy, sentences, facts.last_step, world.world)

    async def split(self, facts: Facts, placement: Placement) -> Split:
        """A placement with the best shares for the load window, where the engine can weigh them; else even ones."""
        return Split(placement, await self.shares(facts, placement))

    async def shares(self, facts: Facts, placement: Placement) -> FloatTable:
        weighs = facts.settings.shares and facts.world.capabilities.weighted_shares
        if not weighs or not facts.load.any() or int(placement.replica_count.max()) < 2:
            return placement.even_shares()
        return await self._solver.shares(placement.p2l, placement.ranks, facts.load, facts.settings.solver_timeout_s)

    def waiting(self, facts: Facts) -> Found | None:
        """The change that waits to be confirmed, while it still starts from the live placement.

        A world that was started again with the same placement counts its steps anew: nothing would be later than it.
        """
        found = self._waiting
        base = (facts.world.world, facts.placement.digest)
        if found is not None and (found.world, found.before.placement.digest) != base:
            found = self._waiting = None
        return found

    async def confirm(self, facts: Facts, found: Found) -> tuple[bool | None, Estimate | None]:
        """Does the waiting change also pay on traffic that came after it was found? None: not enough of it yet.

        Both sides keep the shares that they were found with: fitted to the later traffic, either would look level.
        """
        later = facts.since(found.at_step)
        if not later.enough():
            return None, None
        seen = estimate(
            facts.world, later.load, found.before, found.after, found.waves, facts.settings, later.step_tokens,
            later.routings, later.speeds,
        )  # fmt: skip
        return confirmed(found.estimate, seen, facts.settings), seen


def must_move(case: Case) -> bool:
    """Whether the present placement breaks a hard goal that the target meets."""
    rules = (drained_rank, unpinned, too_few_replicas)
    return any(rule(case, case.base) is not None and rule(case, case.target) is None for rule in rules)
