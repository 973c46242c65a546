"""`swift`: SwiftBalance of vllm-ascend, written anew from its published description.

From the present placement, hottest rank first: a redundant copy on it gives way to another expert, then its slots are
exchanged with those of cold ranks. At most one exchange for each pair of ranks, at most 100 in a layer; an exchange must
gain 1 % of the mean; a layer under max / mean 1.01 is left alone; the whole answer is dropped unless the summed maximum
falls by 5 %. It is not idempotent, as published.
"""

from __future__ import annotations

import numpy as np

from controller.solver.answer import Answer
from controller.solver.methods.heat import copies, slot_heat, start_table
from controller.solver.problem import EMPTY, Floats, Ints, Problem
from controller.solver.repair import repair

THRESHOLD, GAIN, KEEP, SWAPS = 1.01, 0.01, 0.95, 100


class SwiftPolicy:
    """Few moves, from the present placement."""

    name = "swift"

    def solve(self, problem: Problem) -> Answer:
        load = problem.observed()
        start = start_table(problem, load)
        table = start.copy()
        before = after = 0.0
        for layer in range(problem.layers):
            before += float(slot_heat(load[layer], table[layer], problem.experts).sum(axis=1).max())
            _layer(problem, layer, table[layer], load[layer])
            after += float(slot_heat(load[layer], table[layer], problem.experts).sum(axis=1).max())
        kept = problem.prior is not None and after > KEEP * before
        placement = repair(problem, (start if kept else table).reshape(problem.layers, problem.slots), load)
        note = f"summed maximum {before:.4g} -> {after:.4g}" + (", below 5 %: nothing moves" if kept else "")
        return Answer.of(problem, placement, policy=self.name, strategy="incremental", decisions=[note])


def _layer(problem: Problem, layer: int, table: Ints, load: Floats) -> None:
    use = problem.usable[layer] > 0
    heat = slot_heat(load, table, problem.experts).sum(axis=1)
    mean = float(heat[use].mean())
    if mean <= 0 or heat.max() / mean <= THRESHOLD:
        return
    pairs: set[tuple[int, int]] = set()
    _redundant(problem, table, load, use, pairs, mean)
    for _ in range(SWAPS):
        if not _exchange(problem, table, load, use, pairs, mean):
            return


def _redundant(
    problem: Problem, table: Ints, load: Floats, use: np.ndarray, pairs: set[tuple[int, int]], mean: float
) -> None:
    """A spare copy on the hottest ranks gives way to the expert elsewhere whose copy lowers the maximum most."""
    for hot in np.argsort(-slot_heat(load, table, problem.experts).sum(axis=1), kind="stable").tolist():
        if not use[hot]:
            continue
        ranks = slot_heat(load, table, problem.experts).sum(axis=1)
        worst = int(ranks.argmax())
        counts = copies(table, problem.experts)
        spare = [(r, k) for r, k in np.argwhere(table != EMPTY).tolist() if counts[table[r, k]] > 1 and r != worst]
        best, change = float(ranks.max()) - GAIN * mean, None
        experts = table[worst][table[worst] != EMPTY]
        for expert in experts[np.argsort(-load[experts] / counts[experts], kind="stable")].tolist()[:2]:
            holders = (table == expert).any(axis=1)
            for rank, place in spare:
                old = int(table[rank, place])
                if holders[rank] or old == expert or (min(worst, rank), max(worst, rank)) in pairs:
                    continue
                after = ranks.copy()
                after[holders] += load[expert] / (counts[expert] + 1) - load[expert] / counts[expert]
                after[rank] += load[expert] / (counts[expert] + 1)
                after[(table == old).any(axis=1)] += load[old] / (counts[old] - 1) - load[old] / counts[old]
                after[rank] -= load[old] / (counts[old] - 1)
                if after.max() < best:
                    best, change = float(after.max()), (rank, place, expert)
        if change is None:
            return
        rank, place, expert = change
        table[rank, place] = expert
        pairs.add((min(worst, rank), max(worst, rank)))


def _exchange(
    problem: Problem, table: Ints, load: Floats, use: np.ndarray, pairs: set[tuple[int, int]], mean: float
) -> bool:
    """The exchange with a cold rank that lowers the hotter of the two most."""
    heat = slot_heat(load, table, problem.experts)
    ranks = heat.sum(axis=1)
    hot = int(ranks.argmax())
    for cold in np.argsort(ranks, kind="stable").tolist():
        if not use[cold] or cold == hot or (min(hot, cold), max(hot, cold)) in pairs or ranks[cold] >= ranks[hot]:
            continue
        shift = heat[hot][:, None] - heat[cold][None, :]
        legal = (table[hot] != EMPTY)[:, None] & (table[cold] != EMPTY)[None, :]
        legal &= ~np.isin(table[hot], table[cold])[:, None] & ~np.isin(table[cold], table[hot])[None, :]
        after = np.where(legal, np.maximum(ranks[hot] - shift, ranks[cold] + shift), np.inf)
        mine, theirs = (int(i) for i in np.unravel_index(int(after.argmin()), after.shape))
        if ranks[hot] - after[mine, theirs] > GAIN * mean:
            table[hot, mine], table[cold, theirs] = int(table[cold, theirs]), int(table[hot, mine])
            pairs.add((min(hot, cold), max(hot, cold)))
            return True
    return False
