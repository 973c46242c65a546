"""`eplane`, first form: from the present placement, best swap or copy against the hottest rank, moves priced."""

from __future__ import annotations

import numpy as np

from controller.solver.answer import Answer
from controller.solver.policies.eplb import eplb_placement, fill_gaps
from controller.solver.problem import Problem
from controller.solver.repair import repair


class EPlanePolicy:
    """Balance near the present placement."""

    name = "eplane"

    def solve(self, problem: Problem) -> Answer:
        load = problem.observed()
        start = eplb_placement(problem, load, False) if problem.prior is None else problem.prior
        placement = repair(problem, start, load)
        if problem.prior is None:
            placement = fill_gaps(problem, placement, load)
        return Answer.of(problem, np.asarray(placement), policy=self.name, strategy="near", decisions=["first form"])
