"""Sentences: what was done in each layer and why nothing was done in the others."""

from __future__ import annotations

import numpy as np

from controller.forecast import Forecast
from controller.solver.measure import came_to, count_moves, even_shares, rank_loads
from controller.solver.problem import Bools, Floats, Ints, Problem

TOLD = 3
MENDED = "what is placed breaks a hard goal and is mended first; "
ORDINALS = ("no", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def explain_layers(
    problem: Problem, seen: Forecast, start: Ints, placement: Ints, still: Bools, anew: list[int]
) -> list[str]:
    """One sentence a layer. Loads are forecast rank loads over their mean, even split."""
    before, after = _peaks(problem, seen, start), _peaks(problem, seen, placement)
    moves = count_moves(problem.prior, placement, problem.ranks, problem.experts)
    prior = start if problem.prior is None else problem.prior
    mended = (start != prior).any(axis=1)
    came, went = _changes(problem, prior, placement), _changes(problem, placement, prior)
    sentences = []
    for layer in range(problem.layers):
        here = f"layer {layer}: " + (MENDED if mended[layer] else "")
        change = f"predicted max load {before[layer]:.2f} -> {after[layer]:.2f}"
        told = _told(problem, prior[layer], came.get(layer, []), went.get(layer, []))
        if problem.prior is None:
            sentences.append(f"{here}placed from scratch, predicted max load {after[layer]:.2f}")
        elif still[layer]:
            few = "not enough tokens to act on (low confidence), "
            sentences.append(here + few + (f"{told}: {_moves(moves[layer])}" if moves[layer] else "stays"))
        elif layer in anew:
            kept = "placed anew, ranks relabelled to keep what they hold"
            sentences.append(f"{here}{kept}: {change}, {_moves(moves[layer])}")
        elif not moves[layer]:
            sentences.append(f"{here}stays, no change pays for its moves (predicted max load {after[layer]:.2f})")
        else:
            sentences.append(f"{here}{told}: {change}, {_moves(moves[layer])}")
    return sentences


def _moves(count: int) -> str:
    return "1 move" if count == 1 else f"{count} moves"


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
    rest = len(parts) - TOLD
    more = ["1 more change" if rest == 1 else f"{rest} more changes"] if rest > 0 else []
    return ", ".join(parts[:TOLD] + more)


def _ordinal(number: int) -> str:
    return ORDINALS[number] if number < len(ORDINALS) else f"{number}th"


def _peaks(problem: Problem, seen: Forecast, placement: Ints) -> Floats:
    load = seen.mean.astype(np.float64)
    loads = rank_loads(load, placement, even_shares(placement, problem.experts), problem.ranks) / problem.capacity
    return np.asarray(loads.max(axis=1) * problem.capacity[~problem.drained].sum())
