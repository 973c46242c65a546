"""Placement of experts on ranks: `solve(Problem) -> Answer`."""

from __future__ import annotations

import time
from dataclasses import replace

from controller.solver.answer import Answer, validate
from controller.solver.policy import Policy, policies, policy_named
from controller.solver.problem import Problem, RankCost, ShareMode, Strategy, least_redundant

__all__ = [
    "Answer",
    "Policy",
    "Problem",
    "RankCost",
    "ShareMode",
    "Strategy",
    "least_redundant",
    "policies",
    "solve",
    "validate",
]


def solve(problem: Problem) -> Answer:
    """Solve with the policy that the problem names. The answer has been checked against every hard goal.

    Raises Infeasible when the hard goals exclude every placement, ProblemError for an unknown policy, AnswerError when
    a policy broke a goal (a defect: nothing should be done with its answer).
    """
    started = time.perf_counter()
    answer = policy_named(problem.policy).solve(problem)
    validate(problem, answer)
    ignored = _ignored(problem)
    note = (f"{problem.policy} does not know {', '.join(ignored)}",) if ignored else ()
    return replace(answer, decisions=answer.decisions + note, seconds=time.perf_counter() - started)


def _ignored(problem: Problem) -> list[str]:
    """Wishes of the problem that its policy, restated as published, has no notion of. Hard goals it meets all the same."""
    if problem.policy == "eplane":
        return []
    wishes = {
        "max_moves": problem.max_moves is not None,
        "min_improvement": problem.min_improvement > 0,
        "min_tokens": problem.min_tokens > 0,
        "move_weight": problem.move_weight is not None,
        "budget_ms": problem.budget_ms is not None,
        "shares": problem.shares is ShareMode.WEIGHTED,
        "rank_cost": problem.rank_cost is not RankCost.TOKENS,
    }
    return [name for name, asked in wishes.items() if asked and not (problem.policy == "static" and name != "shares")]
