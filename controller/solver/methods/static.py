"""`static`: keep what is there. A cold start gets the linear start; only hard goals move anything."""

from __future__ import annotations

from controller.solver.answer import Answer
from controller.solver.measure import count_moves
from controller.solver.problem import Problem
from controller.solver.repair import repair
from controller.solver.start import linear_start
from eplane.wording import counted


class StaticPolicy:
    """The placement the world has. Moves only what a hard goal forces."""

    name = "static"

    def solve(self, problem: Problem) -> Answer:
        start = linear_start(problem) if problem.prior is None else problem.prior
        placement = repair(problem, start)
        moves = count_moves(problem.prior, placement, problem.ranks, problem.experts)
        told = [(layer, counted(n, "expert moves", "experts move")) for layer, n in enumerate(moves.tolist()) if n]
        decisions = [f"layer {layer}: {what}, a hard goal asks for it" for layer, what in told]
        if not decisions:
            decisions = ["cold start: experts in order" if problem.prior is None else "the placement stays as it is"]
        return Answer.of(problem, placement, policy=self.name, strategy="keep", decisions=decisions)
