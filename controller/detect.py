"""Has the traffic changed its kind? How far back the load windows still tell of the load that comes next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eplane.load import FloatLoad

# Tokens of one text are not drawn independently: their counts scatter about this much more than a multinomial's.
SCATTER = 2.5
# A distance in kind that matters whatever the sample size.
LEAST_SHIFT = 0.06


def distance(a: FloatLoad, b: FloatLoad) -> tuple[float, float]:
    """(total variation distance of the loads `a`, `b` `[L, E]`, what chance alone makes of it), layers weighed by tokens.

    The expected distance of two samples of one multinomial: half the sum over experts of E|difference|, each about
    sqrt(2/pi) times its standard deviation sqrt(p(1-p)(1/n + 1/m)).
    """
    n, m = a.sum(axis=1), b.sum(axis=1)
    both = (n > 0) & (m > 0)
    if not both.any():
        return 0.0, 0.0
    n, m, a, b = n[both], m[both], a[both], b[both]
    far = 0.5 * np.abs(a / n[:, None] - b / m[:, None]).sum(axis=1)
    p = (a + b) / (n + m)[:, None]
    chance = 0.5 * np.sqrt(2 / np.pi * p * (1 - p) * (1 / n + 1 / m)[:, None]).sum(axis=1)
    weight = n + m
    return float((far * weight).sum() / weight.sum()), float((chance * weight).sum() / weight.sum())


def shifted(a: FloatLoad, b: FloatLoad) -> bool:
    """Whether the loads differ by more than chance and by enough to matter."""
    far, chance = distance(a, b)
    return far > max(LEAST_SHIFT, SCATTER * chance)


def steady_tail(loads: Sequence[FloatLoad], at_least: int = 2) -> int:
    """How many of the newest loads (each `[L, E]`, oldest first) are of one kind with the newest `at_least`."""
    if len(loads) <= at_least:
        return len(loads)
    newest = np.sum(loads[len(loads) - at_least :], axis=0)
    count = at_least
    for older in range(len(loads) - at_least - 1, -1, -1):
        # Two neighbours together: one window is small, and a single odd one is no shift.
        pair = np.sum(loads[max(0, older - 1) : older + 1], axis=0)
        if shifted(pair, newest):
            break
        count += 1
    return count
