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
    return replace(answer, seconds=time.perf_counter() - started)
