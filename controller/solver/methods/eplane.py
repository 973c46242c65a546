"""`eplane`: balance on the NEXT window for few moves.

Forecast with an error bar; scenarios that carry how experts move together; a risk term for the drift of each; local
search from the present placement with every move priced in the objective; a placement from scratch, relabelled to the
present ranks, where that wins after its moves are paid; shares by water-filling, shrunk towards even.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from controller.costs import hardware_named, move_price
from controller.forecast import Forecast, forecast, last_window
from controller.solver.answer import Answer
from controller.solver.budget import allot
from controller.solver.explain import explain_layers
from controller.solver.grouping import home_nodes
from controller.solver.methods.eplb import fill_gaps
from controller.solver.passes import improve_layers, undo_small
from controller.solver.problem import Bools, Floats, Ints, Problem, RankCost, ShareMode, Strategy
from controller.solver.repair import keep_places, repair
from controller.solver.touched import counts_nodes
from eplane.wording import counted

if TYPE_CHECKING:
    from controller.solver.search import Search

MOVE_WEIGHT, LAYER_WEIGHT = 0.0015, 0.12
"""Default price of a move: a layer's max / mean must fall by 0.0015 for each, or by 0.12 for moving every slot,
whichever is less: the more slots a layer has, the less one of them can gain and the smaller a part of the work it is."""
PART_SEEN = 0.3
"""The power mean sees about this part of a gain on the slowest rank, so prices are scaled by it."""
RISK = 1.0
"""Weight of a rank's spread under the forecast's error, in standard deviations."""
SHARP, BLUR = 0.9, 0.1
"""Floor of the objective, as a part of the best any placement could do, when the load is known; none is left at this error
of the forecast: what is known well is fitted to the slowest rank, what is not to all that may become it."""
PASSES = 4
FINISH = 0.8
"""Time from the end of the search to the answer, as a part of what came before it."""
SHRINK = 0.5
"""Weighted shares lean this far from even: exact shares fit the forecast too closely."""


class EPlanePolicy:
    """Near the present placement, for the window to come."""

    name = "eplane"

    def solve(self, problem: Problem) -> Answer:
        if counts_nodes(problem):
            from controller.solver.coactivation import solve_near

            return solve_near(problem, self.balanced)
        return self.balanced(problem)

    def balanced(self, problem: Problem) -> Answer:
        """The answer for balance and moves alone."""
        started = time.perf_counter()
        search, seen, most_used = prepare(problem)
        if problem.budget_ms is not None:
            # To measure and explain the answer takes about as long as to prepare for it.
            prepared = time.perf_counter() - started
            search.deadline = started + max(problem.budget_ms / 1e3 - FINISH * prepared, prepared)
        mean = seen.mean.astype(np.float64)
        few = problem.observed().sum(axis=1) < problem.min_tokens
        held = few & (problem.prior is not None)
        start = self._start(problem, search, mean, most_used)
        placement, anew = self._pass(problem, search, mean, start, held)
        before = problem.prior
        # Until a pass from its own answer changes nothing: only then does solving again move nothing.
        for _ in range(PASSES if problem.max_moves is None else 0):
            held = few | (False if before is None else (placement == before).all(axis=1))
            if held.all() or search.late():
                break
            before, again = placement, problem.with_prior(placement)
            search.leave_from(again, homes_of(again, mean))
            placement, more = self._pass(again, search, mean, self._start(again, search, mean, most_used), held)
            anew = sorted({*anew, *more})
        if problem.fixed_slots:
            # An expert that left its rank in one pass and came back in another takes its old place again.
            placement = keep_places(problem, placement)
        few &= problem.prior is not None
        decisions = explain_layers(problem, seen, start, placement, few, anew)
        if search.late():
            decisions.append(f"time ran out after {problem.budget_ms:g} ms: the best placement so far")
        return Answer.of(
            problem,
            placement,
            policy=self.name,
            strategy=_strategy(problem, anew),
            decisions=decisions,
            shares=weighted(problem, placement, seen) if problem.shares is ShareMode.WEIGHTED else None,
        )

    def _start(self, problem: Problem, search: Search, mean: Floats, most_used: Ints) -> Ints:
        """[L, P] the prior made legal, or a placement from nothing."""
        if problem.prior is not None:
            return trim(problem, repair(problem, problem.prior, mean), mean, most_used)
        tables = np.stack([search.scratch(layer) for layer in range(problem.layers)])
        return repair(problem, tables.reshape(problem.layers, problem.slots), mean)

    def _pass(self, problem: Problem, search: Search, mean: Floats, start: Ints, held: Bools) -> tuple[Ints, list[int]]:
        """[L, P] a placement from `start [L, P]` without the layers `held [L]`, and the layers placed anew."""
        tables = start.reshape(search.tables.shape)
        search.start(tables)
        search.done[:] = held
        search.run()
        anew = improve_layers(search, held)
        if problem.prior is not None and problem.min_improvement > 0:
            undo_small(search, tables)
        placement = search.tables.reshape(start.shape).copy()
        if problem.prior is None:
            placement = fill_gaps(problem, placement, mean)
        placement = repair(problem, placement, mean)
        return (keep_places(problem, placement) if problem.fixed_slots else placement), anew


def load_known(problem: Problem) -> bool:
    """The load is taken as it is: no forecast is asked for, or there is nothing to make one from."""
    return not problem.forecast or problem.load.shape[0] == 1


def prepare(problem: Problem) -> tuple[Search, Forecast, Ints]:
    """The search of a problem, without a placement yet; the forecast it stands on; [L] most slots in use."""
    from controller.solver.search import Search, Tuning

    seen = forecast(problem.load, problem.window) if problem.forecast else last_window(problem.load, problem.window)
    mean = seen.mean.astype(np.float64)
    most_used = allot(problem, mean, problem.load.sum(axis=(0, 2)))
    known = load_known(problem)
    kind, knee = rank_cost(problem)
    error = np.zeros(problem.layers) if known else seen.error.astype(np.float64)
    floor = np.maximum(SHARP * (1 - error / BLUR), 0.0) * float(problem.rank_cost is RankCost.TOKENS)
    tuning = Tuning(price_of_move(problem), RISK * error, kind, knee, floor, known)
    return Search(problem, seen, tuning, homes_of(problem, mean), most_used), seen, most_used


def homes_of(problem: Problem, mean: Floats) -> Ints | None:
    """[L, E] node of each expert where groups are bound to nodes."""
    return home_nodes(problem, problem.prior, mean) if problem.strategy is Strategy.HIERARCHICAL else None


def price_of_move(problem: Problem) -> float:
    """Price in the units of the search: given, or from the hardware, or the default."""
    if problem.move_weight is not None:
        weight = problem.move_weight
    elif problem.hardware is not None:
        weight = move_price(problem, hardware_named(problem.hardware))
    else:
        weight = min(MOVE_WEIGHT, LAYER_WEIGHT / problem.slots)
    return weight * PART_SEEN


def rank_cost(problem: Problem) -> tuple[int, float]:
    """Cost kind of the search and its knee, in units of the mean rank load."""
    from controller.solver.compiled import state as kernel

    if problem.rank_cost is RankCost.TOKENS:
        return kernel.TOKENS, 1.0
    hardware = hardware_named(problem.hardware or "demo")
    ranks = float(problem.capacity[~problem.drained].sum())
    a_rank = (problem.step_tokens or hardware.tokens_a_rank * ranks) / ranks
    if problem.rank_cost is RankCost.ACTIVATED:
        return kernel.ACTIVATED, 1.0 / a_rank
    return kernel.FLOOR, hardware.crossover_tokens(problem.bundle_bytes) / a_rank


def trim(problem: Problem, placement: Ints, mean: Floats, most_used: Ints) -> Ints:
    """Drop the copies that matter least in layers that hold more than `most_used [L]`; only under a slot budget."""
    if problem.slot_budget is None:
        return placement
    out = placement.copy()
    pins = {(layer, expert, rank) for layer, expert, rank in problem.pinned.tolist()}
    for layer in range(problem.layers):
        row = out[layer]
        while int((row >= 0).sum()) > most_used[layer]:
            counts = np.bincount(row[row >= 0], minlength=problem.experts)
            rest = np.where(counts > problem.min_replicas[layer], mean[layer] / np.maximum(counts - 1, 1), np.inf)
            free = [
                s
                for s in np.flatnonzero(row >= 0).tolist()
                if np.isfinite(rest[row[s]]) and (layer, int(row[s]), s // problem.per_rank) not in pins
            ]
            if not free:
                break
            row[min(free, key=lambda s: (float(rest[row[s]]), -s))] = -1
    return repair(problem, out, mean)


def weighted(problem: Problem, placement: Ints, seen: Forecast) -> Floats:
    """[L, P] water-filled shares for the forecast, shrunk towards even."""
    from controller.solver.shares import level

    return level(placement, seen.mean.astype(np.float64), problem.capacity, SHRINK)


def _strategy(problem: Problem, anew: list[int]) -> str:
    scope = "hierarchical" if problem.strategy is Strategy.HIERARCHICAL else "global"
    if problem.prior is None:
        return f"{scope}, from scratch"
    return f"{scope}, near the present placement" + (f", {counted(len(anew), 'layer')} from scratch" if anew else "")
