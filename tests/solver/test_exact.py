"""Gaps against exact optima on small layers, and the proved bound against them."""

from __future__ import annotations

import numpy as np
import pytest

from controller.solver import Problem, solve
from tests.solver.exact import optimum

RNG = np.random.default_rng(11)
SMALL = [
    (RNG.integers(1, 100, 6).tolist(), [2, 2, 2, 2]),
    (RNG.integers(1, 100, 8).tolist(), [3, 3, 3]),
    (np.round(RNG.lognormal(3, 1, 7)).tolist(), [3, 3, 3]),
    (np.round(RNG.lognormal(3, 1, 6)).tolist(), [4, 2, 2]),
    ([100, 1, 1, 1, 1, 1], [2, 2, 2, 2]),
    ([5, 5, 5, 5, 5, 5], [3, 3, 2]),
]


@pytest.mark.parametrize(("load", "slots"), SMALL)
def test_small_layers_reach_the_optimum_within_two_hundredths(load: list[float], slots: list[int]) -> None:
    best = optimum(load, slots)
    answer = solve(Problem.of([load], len(slots), slots))
    assert answer.rank_load.max() <= 1.02 * best
    assert answer.rank_load.max() >= best * (1 - 1e-6), "the programme and the solver mean the same problem"
    proved = sum(load) / len(slots) / float(answer.bound[0])
    assert proved <= best * (1 + 1e-6), "the bound is proved: no placement is below it"


def test_the_gap_to_the_bound_at_a_real_shape() -> None:
    """Forecast off, moves free, several slots a rank: within 1 % of the proved bound."""
    load = np.random.default_rng(3).lognormal(0, 1, (4, 128)) * 1000
    answer = solve(Problem.of(load, 16, 10, forecast=False))
    assert float((1 - answer.balancedness / answer.bound).mean()) < 0.01
