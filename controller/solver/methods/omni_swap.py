"""`omni-swap`: the instruction greedy of OmniPlacement (omni-infer), written anew from its published behaviour.

Cold start: the static form of `omni`. From a placement: REMOVE a redundant copy from a hot rank while that lowers max
/ min; then alternate HIGH (the hottest rank swaps with, or adds a copy over, any slot elsewhere) and LOW (the coldest
rank takes a hotter expert in a swap), at most `STEPS`, until max / min < 1.1 or two steps in a row fail. Layers whose
max / min exceeds 300 are left alone, as published. It is not idempotent, as published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from controller.solver.answer import Answer
from controller.solver.methods.eplb import fill_gaps
from controller.solver.methods.heat import copies, slot_heat, start_table
from controller.solver.methods.omni import LIMIT, OUTLIER, RATIO, static_form
from controller.solver.problem import EMPTY, Floats, Ints, Problem
from controller.solver.repair import repair

STEPS = 32


class OmniSwapPolicy:
    """From scratch at a cold start, then add, remove and swap."""

    name = "omni-swap"

    def solve(self, problem: Problem) -> Answer:
        load = problem.observed()
        if problem.prior is None:
            table = static_form(problem, load)
            note = "static form: copies to the hottest, longest first"
        else:
            table = start_table(problem, load)
            changed = sum(_dynamic(problem, layer, table[layer], load[layer]) for layer in range(problem.layers))
            note = f"dynamic form: {changed} instructions on the load window"
        placement = repair(problem, table.reshape(problem.layers, problem.slots), load)
        if problem.prior is None:
            placement = fill_gaps(problem, placement, load)
        return Answer.of(problem, placement, policy=self.name, strategy="greedy", decisions=[note])


def _ratio(heat: Floats) -> float:
    return float(heat.max() / max(1.0, heat.min()))


def _dynamic(problem: Problem, layer: int, table: Ints, load: Floats) -> int:
    """Change one layer's table [R, K] in place; returns the number of instructions."""
    usable = problem.usable[layer]
    use = usable > 0
    heat = slot_heat(load, table, problem.experts)
    ranks = heat.sum(axis=1)
    ratio = _ratio(ranks[use])
    if ratio > OUTLIER or ratio <= 1.0:
        return 0
    count = _remove(problem, table, load, use)
    failures, high = 0, True
    for _ in range(STEPS):
        ranks = slot_heat(load, table, problem.experts).sum(axis=1)
        if _ratio(ranks[use]) < RATIO or failures >= 2:
            break
        done = _high(problem, table, load, usable) if high else _low(problem, table, load, use)
        failures = 0 if done else failures + 1
        count += done
        high = not high
    return count


def _remove(problem: Problem, table: Ints, load: Floats, use: Ints) -> int:
    passed = ~use
    count = 0
    while not passed.all():
        ranks = slot_heat(load, table, problem.experts).sum(axis=1)
        best = np.floor(ranks[use].mean())
        hot = int(np.where(passed, -1.0, ranks).argmax())
        if ranks[hot] <= best:
            break
        for place in range(table.shape[1]):
            expert = int(table[hot, place])
            if expert == EMPTY or copies(table, problem.experts)[expert] < 2:
                continue
            before = _ratio(slot_heat(load, table, problem.experts).sum(axis=1)[use])
            table[hot, place] = EMPTY
            if _ratio(slot_heat(load, table, problem.experts).sum(axis=1)[use]) < before:
                count += 1
            else:
                table[hot, place] = expert
        passed[hot] = True
    return count


def _high(problem: Problem, table: Ints, load: Floats, usable: Ints) -> int:
    """The best swap of a slot of the hottest rank, or the best copy of one of its experts elsewhere."""
    use = usable > 0
    heat = slot_heat(load, table, problem.experts)
    ranks = heat.sum(axis=1)
    hot = int(np.where(use, ranks, -1.0).argmax())
    counts = copies(table, problem.experts)
    on = _on(table, problem.experts)
    spots, relieved = _free_spots(table, load, ranks, counts, on, usable)
    best, change = _ratio(ranks[use]), None
    for place in np.flatnonzero(table[hot] != EMPTY).tolist():
        expert = int(table[hot, place])
        swap = _swap_ratios(table, heat, ranks, on, use, hot, place, less=True)
        other, there = np.unravel_index(int(swap.argmin()), swap.shape)
        if swap[other, there] < best:
            best, change = float(swap[other, there]), (int(other), int(there), place, expert, True)
        if counts[expert] >= min(LIMIT, problem.ranks) or not len(spots):
            continue
        part, now = load[expert] / (counts[expert] + 1), load[expert] / counts[expert]
        after = relieved + np.where(on[:, expert], part - now, 0.0)
        after[np.arange(len(spots)), spots[:, 0]] += part
        ratio = after[:, use].max(axis=1) / np.maximum(1.0, after[:, use].min(axis=1))
        ratio[on[spots[:, 0], expert]] = np.inf
        if ratio.min() < best:
            rank, spot = spots[int(ratio.argmin())].tolist()
            best, change = float(ratio.min()), (rank, spot, place, expert, False)
    if change is None:
        return 0
    rank, spot, place, expert, swapped = change
    if swapped:
        table[hot, place] = table[rank, spot]
    table[rank, spot] = expert
    return 1


def _free_spots(
    table: Ints, load: Floats, ranks: Floats, counts: Ints, on: np.ndarray, usable: Ints
) -> tuple[Ints, Floats]:
    """(spots [n, 2] rank and place that are empty or hold a redundant copy; rank loads [n, R] once each is cleared)."""
    there = np.arange(table.shape[1]) < usable[:, None]
    spots = np.argwhere(there & ((table == EMPTY) | (np.append(counts, 2)[table] > 1)))
    old = table[spots[:, 0], spots[:, 1]]
    now = np.where(old == EMPTY, 0.0, load[old] / counts[old])
    more = np.where(old == EMPTY, 0.0, load[old] / np.maximum(counts[old] - 1, 1)) - now
    after = ranks + np.where(on[:, old].T, more[:, None], 0.0)
    after[np.arange(len(spots)), spots[:, 0]] -= now + more
    return spots, after


def _low(problem: Problem, table: Ints, load: Floats, use: Ints) -> int:
    """The coldest rank takes a hotter expert in exchange for one of its own."""
    heat = slot_heat(load, table, problem.experts)
    ranks = heat.sum(axis=1)
    cold = int(np.where(use, ranks, np.inf).argmin())
    on = _on(table, problem.experts)
    best, change = _ratio(ranks[use]), None
    for place in np.flatnonzero(table[cold] != EMPTY).tolist():
        swap = _swap_ratios(table, heat, ranks, on, use, cold, place, less=False)
        other, there = np.unravel_index(int(swap.argmin()), swap.shape)
        if swap[other, there] < best:
            best, change = float(swap[other, there]), (int(other), int(there), place)
    if change is None:
        return 0
    rank, spot, place = change
    table[cold, place], table[rank, spot] = int(table[rank, spot]), int(table[cold, place])
    return 1


def _on(table: Ints, experts: int) -> np.ndarray:
    on = np.zeros((len(table), experts + 1), dtype=np.bool_)
    on[np.arange(len(table))[:, None], table] = True
    return on[:, :-1]


def _swap_ratios(
    table: Ints, heat: Floats, ranks: Floats, on: np.ndarray, use: np.ndarray, rank: int, place: int, less: bool
) -> Floats:
    """[R, K] max / min after exchanging (rank, place) with each slot elsewhere; infinite where it may not be."""
    expert = int(table[rank, place])
    shift = heat[rank, place] - heat
    legal = (table != EMPTY) & ~on[:, expert][:, None] & ~on[rank][table] & use[:, None]
    legal &= (shift >= 0) if less else (shift <= 0)
    # Of the ranks that are neither of the pair only the extremes matter.
    rest = np.where(use, ranks, np.nan)
    rest[rank] = np.nan
    top, bottom = _without_each(rest, np.nanmax, 0.0), _without_each(rest, np.nanmin, np.inf)
    mine, theirs = ranks[rank] - shift, ranks[:, None] + shift
    peak = np.maximum(top[:, None], np.maximum(mine, theirs))
    least = np.maximum(1.0, np.minimum(bottom[:, None], np.minimum(mine, theirs)))
    return np.where(legal, peak / least, np.inf)


def _without_each(values: Floats, extreme: Callable[[Floats], Any], nothing: float) -> Floats:
    """[R] the extreme of all others for each rank; nan does not count."""
    known = np.flatnonzero(~np.isnan(values))
    if not known.size:
        return np.full(len(values), nothing)
    first = known[int(np.flatnonzero(values[known] == extreme(values[known]))[0])]
    others = known[known != first]
    out = np.full(len(values), float(values[first]))
    out[first] = float(extreme(values[others])) if others.size else nothing
    return out
