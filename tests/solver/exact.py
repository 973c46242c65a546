"""The exact optimum of small layers with even splits, by integer programming (HiGHS)."""

from __future__ import annotations

from collections.abc import Sequence

import highspy
import numpy as np


def optimum(load: Sequence[float], slots: Sequence[int]) -> float:
    """Least slowest rank for `load [E]` over ranks of `slots [R]`.

    Binary hold[e, r]; one binary for each number of copies n of e; part[e, r] >= load / n when both are set.
    """
    model = highspy.Highs()
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)
    model.setOptionValue("mip_rel_gap", 0.0)
    experts, ranks = len(load), len(slots)
    most = [min(ranks, sum(slots) - experts + 1)] * experts
    peak = model.addVariable(lb=0.0)
    hold = [[model.addBinary() for _ in range(ranks)] for _ in range(experts)]
    count = [[model.addBinary() for _ in range(most[e])] for e in range(experts)]
    part = [[model.addVariable(lb=0.0) for _ in range(ranks)] for _ in range(experts)]
    for e in range(experts):
        model.addConstr(sum(count[e]) == 1)
        model.addConstr(sum(hold[e]) == sum((n + 1) * count[e][n] for n in range(most[e])))
        model.addConstr(sum(part[e]) == float(load[e]))
        for r in range(ranks):
            for n in range(most[e]):
                each = float(load[e]) / (n + 1)
                model.addConstr(part[e][r] >= each * hold[e][r] - float(load[e]) * (1 - count[e][n]))
                model.addConstr(part[e][r] <= each + float(load[e]) * (1 - count[e][n]))
            model.addConstr(part[e][r] <= float(load[e]) * hold[e][r])
    for r in range(ranks):
        model.addConstr(sum(hold[e][r] for e in range(experts)) <= slots[r])
        model.addConstr(sum(part[e][r] for e in range(experts)) <= peak)
    model.minimize(peak)
    return float(np.asarray(model.getInfo().objective_function_value))
