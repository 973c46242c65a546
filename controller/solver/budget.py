"""One memory budget of redundant slots, spent over the layers where it helps most."""

from __future__ import annotations

import heapq

import numpy as np

from controller.solver.problem import Floats, Ints, Problem

DRIFT_WEIGHT = 0.02
"""Worth of a lower sum of squared copies (less drift) beside a lower peak."""


def allot(problem: Problem, share: Floats, tokens: Floats) -> Ints:
    """[L] most slots in use. share [L, E] expected parts of a layer's load; tokens [L] how much the layer weighs.

    Each next slot goes to the layer where the next copy of its worst expert lowers predicted time most: the peak an
    expert puts on one rank, as far as it is above a perfect split, and a little for the drift that smaller copies save.
    """
    least = problem.min_replicas.sum(axis=1)
    room = problem.usable.sum(axis=1)
    if problem.slot_budget is None:
        return np.asarray(room, dtype=np.int64)
    used: Ints = least.astype(np.int64)
    ranks = float((~problem.drained).sum())
    copies = problem.min_replicas.astype(np.float64).copy()
    weight = np.where(tokens.sum() > 0, tokens / max(float(tokens.sum()), 1e-30), 1.0 / problem.layers)
    spare = int(problem.slot_budget - (least - problem.experts).sum())
    heap: list[tuple[float, int, int]] = []

    def offer(layer: int) -> None:
        per_copy = np.where(copies[layer] < problem.max_replicas[layer], share[layer] * ranks / copies[layer], -1.0)
        worst = int(per_copy.argmax())
        if per_copy[worst] < 0 or used[layer] >= room[layer]:
            return
        after = share[layer, worst] * ranks / (copies[layer, worst] + 1)
        rest = max(float(np.delete(per_copy, worst).max(initial=0.0)), after, 1.0)
        peak = max(float(per_copy[worst]), 1.0) - rest
        square = DRIFT_WEIGHT * float(per_copy[worst]) * (float(per_copy[worst]) - after)
        heapq.heappush(heap, (-float(weight[layer]) * (peak + square), layer, worst))

    for layer in range(problem.layers):
        offer(layer)
    while spare > 0 and heap:
        _, layer, worst = heapq.heappop(heap)
        copies[layer, worst] += 1
        used[layer] += 1
        spare -= 1
        offer(layer)
    return np.asarray(used)
