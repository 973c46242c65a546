"""`flash`: FlashLB of vllm-ascend, written anew from its published behaviour.

Looks at the entries of the window, not at their sum. Experts weigh their mean plus 0.674 standard deviations; how
many copies each of four groups of experts (by weight) gets is searched around the greedy answer; a copy goes to the
rank whose mean plus deviation, with the full covariance of what it holds, stays lowest; a plan is worth the mean over
the entries of the slowest rank. Its rows go to the ranks that hold most of them already (assignment of largest
overlap).

A layer is left alone while its balancedness is at least 0.85 and 0.9 of what it was when it was last placed (0.9 and
0.95 below 32 ranks), and moves only to a better one. The original remembers what it was; this one has no memory and
takes what the plan reaches now, which is nearly the same number. One copy of an expert for each rank at most, where
the original gives out more than fit and then drops the plan.
"""

from __future__ import annotations

import numpy as np

from controller.solver.answer import Answer
from controller.solver.measure import count_moves
from controller.solver.methods.eplb import fill_gaps
from controller.solver.methods.heat import copies, start_table
from controller.solver.problem import Bools, Floats, Ints, Problem, Strategy
from controller.solver.repair import keep_places, repair

QUANTILE, DEPTH, WIDTH, SAMPLES = 0.6744897501960817, 4, 8, 64
AGAIN = 3
FEW_RANKS, OF_FEW, OF_MANY = 32, (0.95, 0.9), (0.9, 0.85)
"""(part of the balancedness when last placed, balancedness) under which a layer is placed anew."""


class FlashPolicy:
    """Risk-aware placement over the window's entries, ranks aligned with the present ones."""

    name = "flash"

    def solve(self, problem: Problem) -> Answer:
        """As published, and again from its own answer while that moves anything: solving again shall move nothing."""
        placement, count = self._once(problem)
        for _ in range(AGAIN if problem.prior is not None else 0):
            if not count_moves(problem.prior, placement, problem.ranks, problem.experts).any():
                break
            again, _ = self._once(problem.with_prior(placement))
            if np.array_equal(again, placement):
                break
            placement = keep_places(problem, again)
        note = f"{count} of {problem.layers} layers placed anew and aligned with the present ranks"
        return Answer.of(problem, placement, policy=self.name, strategy="risk aware", decisions=[note])

    def _once(self, problem: Problem) -> tuple[Ints, int]:
        load = problem.observed()
        entries = _grouped(problem.load[-problem.window :]) + 1.0
        start = start_table(problem, load)
        table, changed = start.copy(), []
        for layer in range(problem.layers):
            plan = _plan(problem, layer, entries[:, layer], start[layer])
            if plan is not None:
                table[layer] = plan
                changed.append(layer)
        placement = repair(problem, table.reshape(problem.layers, problem.slots), load)
        placement = fill_gaps(problem, placement, load)
        worse = self._not_better(problem, entries, start, placement, changed)
        placement[worse] = start.reshape(placement.shape)[worse]
        placement = keep_places(problem, repair(problem, placement, load))
        return placement, len(changed) - int(worse.sum())

    def _not_better(self, problem: Problem, entries: Floats, start: Ints, placement: Ints, changed: list[int]) -> Bools:
        """[L] layers whose plan, made to meet the hard goals, is no better than what is there."""
        out = np.zeros(problem.layers, dtype=np.bool_)
        for layer in changed if problem.prior is not None else ():
            usable, after = problem.usable[layer], placement[layer].reshape(start[layer].shape)
            before, now = (_score(entries[:, layer], t, usable) for t in (start[layer], after))
            out[layer] = now >= before
        return out


def _grouped(load: Floats) -> Floats:
    """[T, L, E] the window's entries, runs of them summed when there are more than `SAMPLES`."""
    run = max(len(load) // SAMPLES, 1)
    kept = load[len(load) % run :]
    return np.asarray(kept.reshape(-1, run, *load.shape[1:]).sum(axis=1)[-SAMPLES:])


def _score(x: Floats, table: Ints, usable: Ints) -> float:
    from controller.solver.compiled import flash as kernel

    return float(kernel.score(np.ascontiguousarray(x), copies(table, x.shape[1]), table, usable))


def _plan(problem: Problem, layer: int, x: Floats, present: Ints) -> Ints | None:
    """[R, K] the layer's new table, or None when it stays."""
    from controller.solver.compiled import flash as kernel

    usable = problem.usable[layer]
    x = np.ascontiguousarray(x)
    ratio, value = OF_FEW if int((usable > 0).sum()) < FEW_RANKS else OF_MANY
    warm = problem.prior is not None
    now = 1 / _score(x, present, usable)
    if warm and now >= max(ratio, value):
        return None
    spare = x - x.mean(axis=0)
    spread = x.std(axis=0, ddof=1) if len(x) > 1 else np.zeros(x.shape[1])
    table = np.empty_like(present)
    reached = 1 / kernel.plan(x, x.mean(axis=0), spare, spread, usable, QUANTILE, DEPTH, WIDTH, table)
    if warm and (reached <= now or (now >= ratio * reached and now >= value)):
        return None
    if reached == 0:
        return None
    # Goals that tie experts to ranks or nodes leave no rank to be exchanged for another.
    bound = problem.spread > 1 or problem.strategy is Strategy.HIERARCHICAL or problem.pinned.size > 0
    return table if bound else _align(table, present, usable)


def _align(new: Ints, old: Ints, usable: Ints) -> Ints:
    """[R, K] the rows of `new`, each on a rank with as many places, so that the most experts stay where they are."""
    from controller.solver.compiled import flash as kernel

    ranks, experts = len(new), int(max(new.max(), old.max())) + 1
    rows = np.arange(ranks)[:, None]
    a, b = np.zeros((ranks, experts + 1)), np.zeros((ranks, experts + 1))
    a[rows, new], b[rows, old] = 1, 1
    overlap = np.where(usable[:, None] == usable[None, :], a[:, :-1] @ b[:, :-1].T, -float(ranks * old.shape[1]))
    row_of = np.empty(ranks, dtype=np.int64)
    kernel.assign(overlap, row_of)
    return np.asarray(new[row_of])
