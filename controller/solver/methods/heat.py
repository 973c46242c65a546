"""What the published incremental policies share: the heat of slots under an even split of the last window."""

from __future__ import annotations

import numpy as np

from controller.solver.measure import even_shares, slot_loads
from controller.solver.problem import EMPTY, Floats, Ints, Problem
from controller.solver.repair import repair
from controller.solver.start import linear_start


def start_table(problem: Problem, load: Floats) -> Ints:
    """[L, R, K] the prior made legal, or the linear start these policies begin from."""
    start = linear_start(problem) if problem.prior is None else problem.prior
    return repair(problem, start, load).reshape(problem.layers, problem.ranks, problem.per_rank).copy()


def slot_heat(load: Floats, table: Ints, experts: int) -> Floats:
    """[R, K] tokens of each slot of one layer, `load [E]` split evenly; 0 where empty."""
    row = table.reshape(1, -1)
    return slot_loads(load[None, :], row, even_shares(row, experts)).reshape(table.shape)


def copies(table: Ints, experts: int) -> Ints:
    """[E] copies of each expert in one layer's table."""
    return np.bincount(table[table != EMPTY], minlength=experts)
