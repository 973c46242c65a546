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
from controller.solver.problem import Bools, Floats, Ints, Problem, RankCost, ShareMode, Strategy
from controller.solver.repair import keep_places, repair
from controller.solver.touched import counts_nodes

if TYPE_CHECKING:
    from controller.solver.search import Search

MOVE_WEIGHT, LAYER_WEIGHT = 0.001, 0.08
"""Default price of a move: a layer's max / mean must fall by 0.001 for each, or by 0.08 for moving every slot,
whichever is less: the more slots a layer has, the less one of them can gain and the smaller a part of the work it is."""
PART_SEEN = 0.3
"""The power mean sees about this part of a gain on the slowest rank, so prices are scaled by it."""
RISK = 1.0
"""Weight of a rank's spread under the forecast's error, in standard deviations."""
KICKS, KICK_SLOTS, KICK_GAP = 200, 20_000, 0.003
"""Random restarts a layer, slots they may cost in all, and the gap to the bound that is good enough."""
PAIRED = 2
"""Places a rank at which a new copy is tried together with the exchanges of partners it makes possible."""
SCRATCH_GAP, SCRATCH_PART = 0.05, 0.3
"""A placement from scratch is tried where the slowest rank is this far above the bound, and above the price of that part
of the slots moving."""
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
        deadline = None if problem.budget_ms is None else started + problem.budget_ms / 1e3
        known = load_known(problem)
        search, seen, most_used = prepare(problem)
        start = self._start(problem, search, seen, most_used)
        held = problem.observed().sum(axis=1) < problem.min_tokens
        search.start(start)
        search.done |= held & (problem.prior is not None)
        finished = search.run(deadline)
        if problem.per_rank == PAIRED and problem.spread == 1:
            for layer in np.argsort(-search.objective, kind="stable").tolist():
                if not held[layer] or problem.prior is None:
                    search.probe(layer, deadline)
        if known and problem.prior is None and problem.spread == 1:
            _kick(problem, search, deadline)
        anew = _from_scratch(problem, search, held, deadline) if problem.prior is not None else []
        _undo_small(problem, search, start)
        placement = search.tables.reshape(problem.layers, problem.slots).copy()
        if problem.prior is None:
            placement = fill_gaps(problem, placement, seen.mean.astype(np.float64))
        placement = repair(problem, placement, seen.mean.astype(np.float64))
        if problem.fixed_slots:
            placement = keep_places(problem, placement)
        decisions = explain_layers(problem, seen, start.reshape(placement.shape), placement, search.steps, held, anew)
        if not finished:
            decisions.append(f"time ran out after {problem.budget_ms:g} ms: the best placement so far")
        return Answer.of(
            problem,
            placement,
            policy=self.name,
            strategy=_strategy(problem, anew),
            decisions=decisions,
            shares=weighted(problem, placement, seen) if problem.shares is ShareMode.WEIGHTED else None,
        )

    def _start(self, problem: Problem, search: Search, seen: Forecast, most_used: Ints) -> Ints:
        """[L, R, K] the prior made legal, or a placement from nothing."""
        shape = (problem.layers, problem.ranks, problem.per_rank)
        mean = seen.mean.astype(np.float64)
        if problem.prior is not None:
            return trim(problem, repair(problem, problem.prior, mean), mean, most_used).reshape(shape)
        tables = np.stack([search.scratch(layer) for layer in range(problem.layers)])
        return repair(problem, tables.reshape(problem.layers, problem.slots), mean).reshape(shape)


def load_known(problem: Problem) -> bool:
    """The load is taken as it is: no forecast is asked for, or there is nothing to make one from."""
    return not problem.forecast or problem.load.shape[0] == 1


def prepare(problem: Problem) -> tuple[Search, Forecast, Ints]:
    """The search of a problem, without a placement yet; the forecast it stands on; [L] most slots in use."""
    from controller.solver.search import Search, Tuning

    seen = forecast(problem.load, problem.window) if problem.forecast else last_window(problem.load, problem.window)
    mean = seen.mean.astype(np.float64)
    homes = home_nodes(problem, problem.prior, mean) if problem.strategy is Strategy.HIERARCHICAL else None
    most_used = allot(problem, mean, problem.load.sum(axis=(0, 2)))
    known = load_known(problem)
    kind, knee = rank_cost(problem)
    risk = np.zeros(problem.layers) if known else RISK * seen.error.astype(np.float64)
    tuning = Tuning(price_of_move(problem), risk, kind, knee, known)
    return Search(problem, seen, tuning, homes, most_used), seen, most_used


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


def _from_scratch(problem: Problem, search: Search, held: Bools, deadline: float | None) -> list[int]:
    """Layers that were placed anew because that wins after its moves are paid."""
    from controller.solver.search import relabel

    if problem.prior is None or problem.max_moves is not None or problem.fixed_slots:
        return []
    if (
        problem.spread > 1
    ):  # a placement from scratch looks at no nodes: mended afterwards it would not be what was weighed
        return []
    prior = problem.prior.reshape(search.tables.shape)
    taken = []
    for layer in np.argsort(-search.objective, kind="stable").tolist():
        least = search.goal[layer] * (1 + SCRATCH_GAP) + SCRATCH_PART * problem.slots * search.tuning.price
        if held[layer] or search.peak(layer) < least or (deadline is not None and time.perf_counter() >= deadline):
            continue
        kept, price, moved = search.tables[layer].copy(), search.price_of(layer), search.moved[layer]
        objective = search.objective[layer]
        table = search.scratch(layer)
        pinned = search.state.locked.copy()
        search.begin(layer, table)
        if search.objective[layer] >= price:
            search.tables[layer], search.objective[layer], search.moved[layer] = kept, objective, moved
            search.done[layer] = True
            continue
        table = relabel(
            table, prior[layer], problem.node_of_rank, problem.usable_of(layer), problem.capacity, pinned,
            search.homes is not None or problem.spread > 1,
        )  # fmt: skip
        search.begin(layer, table)
        if search.price_of(layer) < price and (table != -1).sum() >= (kept != -1).sum():
            taken.append(layer)
            search.steps[:] = [step for step in search.steps if step.layer != layer]
            continue
        search.tables[layer], search.objective[layer], search.moved[layer] = kept, objective, moved
        search.done[layer] = True
    search.run(deadline)
    return sorted(taken)


def _undo_small(problem: Problem, search: Search, start: Ints) -> None:
    """Put back layers whose gain is below min_improvement."""
    if problem.prior is None or problem.min_improvement <= 0:
        return
    for layer in np.flatnonzero(search.moved > 0).tolist():
        after, table = search.objective[layer], search.tables[layer].copy()
        search.begin(layer, start[layer])
        gain = (search.objective[layer] - after) / max(float(search.objective[layer]), 1e-30)
        if gain >= problem.min_improvement:
            search.tables[layer] = table
        else:
            search.steps[:] = [step for step in search.steps if step.layer != layer]


def _kick(problem: Problem, search: Search, deadline: float | None) -> None:
    """A known load and free moves: close the gap to the bound where local search left one."""
    rounds = max(1, min(KICKS, KICK_SLOTS // (problem.slots * problem.layers)))
    for layer in range(problem.layers):
        if search.peak(layer) > search.goal[layer] * (1 + KICK_GAP):
            search.kick(layer, float(search.goal[layer]) * (1 + KICK_GAP), rounds, deadline)


def _strategy(problem: Problem, anew: list[int]) -> str:
    scope = "hierarchical" if problem.strategy is Strategy.HIERARCHICAL else "global"
    if problem.prior is None:
        return f"{scope}, from scratch"
    return f"{scope}, near the present placement" + (f", {len(anew)} layers from scratch" if anew else "")
