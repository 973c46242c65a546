"""Sentences: what was done in each layer and why nothing was done in the others."""

from __future__ import annotations

import numpy as np

from controller.forecast import Forecast
from controller.solver.measure import came_to, count_moves, even_shares, rank_loads
from controller.solver.problem import Bools, Floats, Ints, Problem

TOLD = 3
ORDINALS = ("no", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def explain_layers(
    problem: Problem, seen: Forecast, start: Ints, placement: Ints, still: Bools, anew: list[int]
) -> list[str]:
    """One sentence a layer. Loads are forecast rank loads over their mean, even split."""
    before, after = _peaks(problem, seen, start), _peaks(problem, seen, placement)
    moves = count_moves(problem.prior, placement, problem.ranks, problem.experts)
    came, went = _changes(problem, start, placement), _changes(problem, placement, start)
    sentences = []
    for layer in range(problem.layers):
        here = f"layer {layer}: "
        change = f"predicted max load {before[layer]:.2f} -> {after[layer]:.2f}"
        if problem.prior is None:
            sentences.append(f"{here}placed from scratch, predicted max load {after[layer]:.2f}")
        elif still[layer]:
            sentences.append(f"{here}not enough tokens to act on, stays (low confidence)")
        elif layer in anew:
            sentences.append(
                f"{here}placed anew, ranks relabelled to keep what they hold: {change}, {moves[layer]} moves"
            )
        elif not moves[layer]:
            sentences.append(f"{here}stays, no change pays for its moves (predicted max load {after[layer]:.2f})")
        else:
            told = _told(problem, start[layer], came.get(layer, []), went.get(layer, []))
            sentences.append(f"{here}{told}: {change}, {moves[layer]} moves")
    return sentences


def _changes(problem: Problem, before: Ints, after: Ints) -> dict[int, list[tuple[int, int]]]:
    """(expert, rank) pairs of each layer that hold after and did not before."""
    found: dict[int, list[tuple[int, int]]] = {}
    for layer, rank, expert in np.argwhere(came_to(before, after, problem.ranks, problem.experts)).tolist():
        found.setdefault(layer, []).append((expert, rank))
    return found


def _told(problem: Problem, before: Ints, came: list[tuple[int, int]], went: list[tuple[int, int]]) -> str:
    """What became of the experts that ranks must receive, in the order of their numbers."""
    left: dict[int, list[int]] = {}
    for expert, where in went:
        left.setdefault(expert, []).append(where)
    copies = np.bincount(before[before >= 0], minlength=problem.experts)
    parts = []
    for expert, where in sorted(came):
        if left.get(expert):
            parts.append(f"expert {expert} goes from rank {left[expert].pop(0)} to rank {where}")
        else:
            copies[expert] += 1
            parts.append(f"expert {expert} gets a {_ordinal(int(copies[expert]))} copy on rank {where}")
    if not parts:
        return "a hard goal asks for it"
    more = [f"{len(parts) - TOLD} more changes"] if len(parts) > TOLD else []
    return ", ".join(parts[:TOLD] + more)


def _ordinal(number: int) -> str:
    return ORDINALS[number] if number < len(ORDINALS) else f"{number}th"


def _peaks(problem: Problem, seen: Forecast, placement: Ints) -> Floats:
    load = seen.mean.astype(np.float64)
    loads = rank_loads(load, placement, even_shares(placement, problem.experts), problem.ranks) / problem.capacity
    return np.asarray(loads.max(axis=1) * problem.capacity[~problem.drained].sum())
