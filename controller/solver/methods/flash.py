"""`flash`: FlashLB of vllm-ascend, written anew from its published description.

Looks at the last entries of the window, not at their sum: a rank's cost is its mean load plus 0.674 standard deviations
over those entries, with the full covariance of the experts on it. Replica counts by a small beam search around the
greedy ones, longest first for each, the best kept; ranks aligned with the present placement so that few weights move.
A layer moves only when its cost falls below 0.9 of the present one, or its balancedness is under 0.85 and it gains.
"""

from __future__ import annotations

import numpy as np

from controller.solver.answer import Answer
from controller.solver.methods.eplb import fill_gaps, pack_apart
from controller.solver.methods.heat import copies, start_table
from controller.solver.problem import EMPTY, Floats, Ints, Problem, Strategy
from controller.solver.repair import repair

QUANTILE, RATIO, VALUE = 0.674, 0.9, 0.85
DEPTH, WIDTH, SAMPLES = 4, 8, 16


class FlashPolicy:
    """Risk-aware placement over the window's entries, ranks aligned with the present ones."""

    name = "flash"

    def solve(self, problem: Problem) -> Answer:
        load = problem.observed()
        entries = problem.load[-problem.window :][-SAMPLES:]
        table = start_table(problem, load)
        plans = np.stack([_plan(problem, layer, entries[:, layer]) for layer in range(problem.layers)])
        plans = repair(problem, plans.reshape(problem.layers, problem.slots), load).reshape(table.shape)
        # Goals that tie experts to ranks or nodes leave no rank to be exchanged for another.
        bound = problem.spread > 1 or problem.strategy is Strategy.HIERARCHICAL or problem.pinned.size > 0
        changed = 0
        for layer, plan in enumerate(plans):
            if problem.prior is not None and not _better(problem, entries[:, layer], table[layer], plan):
                continue
            warm = problem.prior is not None and not bound
            table[layer] = _align(plan, table[layer], problem.usable[layer]) if warm else plan
            changed += 1
        placement = fill_gaps(problem, repair(problem, table.reshape(problem.layers, problem.slots), load), load)
        note = f"{changed} of {problem.layers} layers placed anew and aligned with the present ranks"
        return Answer.of(problem, placement, policy=self.name, strategy="risk aware", decisions=[note])


def _rank_cost(problem: Problem, entries: Floats, table: Ints) -> Floats:
    """[R] mean + 0.674 standard deviations of each rank's load over entries [T, E], even split."""
    counts = copies(table, problem.experts)
    each = entries / np.maximum(counts, 1)
    loads = np.where(table == EMPTY, 0.0, each[:, table]).sum(axis=2)
    return np.asarray(loads.mean(axis=0) + QUANTILE * loads.std(axis=0))


def _better(problem: Problem, entries: Floats, old: Ints, new: Ints) -> bool:
    before, after = (float(_rank_cost(problem, entries, t).max()) for t in (old, new))
    use = (old != EMPTY).any(axis=1)
    mean = float(entries.sum(axis=1).mean() / max(use.sum(), 1))
    return after < RATIO * before or (before > 0 and mean / before < VALUE and after < before)


def _plan(problem: Problem, layer: int, entries: Floats) -> Ints:
    """[R, K] best of a beam over replica counts: from the greedy counts, shift copies to the expert that is worst."""
    usable = problem.usable[layer]
    weight = entries.mean(axis=0) + QUANTILE * entries.std(axis=0)
    limit = int((usable > 0).sum())
    counts = np.ones(problem.experts, dtype=np.int64)
    for _ in range(min(int(usable.sum()), problem.experts * limit) - problem.experts):
        counts[int(np.where(counts < limit, weight / counts, -1.0).argmax())] += 1
    best, cost = _packed(problem, entries, weight, counts, usable)
    beam = [counts]
    for _ in range(DEPTH):
        found: list[tuple[float, tuple[int, ...], Ints]] = []
        for state in beam:
            for trial in _neighbours(state, weight, limit):
                table, value = _packed(problem, entries, weight, trial, usable)
                found.append((value, tuple(trial.tolist()), trial))
                if value < cost:
                    best, cost = table, value
        if not found:
            break
        beam = [state for _, _, state in sorted(found, key=lambda f: (f[0], f[1]))[:2]]
    return best


def _neighbours(counts: Ints, weight: Floats, limit: int) -> list[Ints]:
    """Take a copy where it is least missed, give it to one of the experts with the hottest copies."""
    rest = np.where(counts > 1, weight / np.maximum(counts - 1, 1), np.inf)
    out = []
    for giver in np.argsort(rest, kind="stable")[:2].tolist():
        if not np.isfinite(rest[giver]):
            continue
        for taker in np.argsort(-weight / counts, kind="stable")[: WIDTH // 2].tolist():
            if taker != giver and counts[taker] < limit:
                trial = counts.copy()
                trial[giver] -= 1
                trial[taker] += 1
                out.append(trial)
    return out


def _packed(problem: Problem, entries: Floats, weight: Floats, counts: Ints, usable: Ints) -> tuple[Ints, float]:
    table = np.full((problem.ranks, problem.per_rank), EMPTY, dtype=np.int32)
    pack_apart(weight, np.repeat(np.arange(problem.experts), counts).tolist(), usable, table)
    if np.unique(table[table != EMPTY]).size < problem.experts:
        return table, float("inf")
    return table, float(_rank_cost(problem, entries, table).max())


def _align(new: Ints, old: Ints, usable: Ints) -> Ints:
    """Give each group of experts the rank, of the same size, that holds most of them: largest overlap first."""
    ranks = len(new)
    experts = int(max(new.max(), old.max())) + 1
    rows = np.arange(ranks)[:, None]
    a, b = np.zeros((ranks, experts + 1), dtype=np.float32), np.zeros((ranks, experts + 1), dtype=np.float32)
    a[rows, new], b[rows, old] = 1, 1
    overlap = np.where(usable[:, None] == usable[None, :], a[:, :-1] @ b[:, :-1].T, -1.0)
    out = np.full_like(new, EMPTY)
    source_free, place_free = np.ones(ranks, dtype=np.bool_), np.ones(ranks, dtype=np.bool_)
    for flat in np.argsort(-overlap, axis=None, kind="stable").tolist():
        source, place = divmod(flat, ranks)
        if source_free[source] and place_free[place] and overlap[source, place] >= 0:
            out[place] = new[source]
            source_free[source] = place_free[place] = False
    return out
