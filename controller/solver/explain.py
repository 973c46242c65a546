"""Sentences: what was done in each layer and why nothing was done in the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from controller.forecast import Forecast
from controller.solver.measure import count_moves, even_shares, rank_loads
from controller.solver.problem import Bools, Floats, Ints, Problem

if TYPE_CHECKING:
    from controller.solver.search import Step

TOLD = 3
ORDINALS = ("no", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")


def explain_layers(
    problem: Problem, seen: Forecast, start: Ints, placement: Ints, steps: list[Step], still: Bools, anew: list[int]
) -> list[str]:
    """One sentence a layer. Loads are forecast rank loads over their mean, even split."""
    before, after = _peaks(problem, seen, start), _peaks(problem, seen, placement)
    moves = count_moves(problem.prior, placement, problem.ranks, problem.experts)
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
            sentences.append(
                here + _told(problem, placement[layer], start[layer], steps, layer, change, int(moves[layer]))
            )
    return sentences


def _told(problem: Problem, row: Ints, old: Ints, steps: list[Step], layer: int, change: str, moves: int) -> str:
    mine = [step for step in steps if step.layer == layer]
    parts = []
    counts = np.bincount(old[old >= 0], minlength=problem.experts)
    for step in mine[:TOLD]:
        if step.kind:
            counts[step.expert] += 1
            number = (
                ORDINALS[counts[step.expert]] if counts[step.expert] < len(ORDINALS) else f"{counts[step.expert]}th"
            )
            parts.append(f"expert {step.expert} gets a {number} copy on rank {step.to}")
        else:
            parts.append(f"expert {step.expert} goes from rank {step.hot} to rank {step.to}")
    if len(mine) > TOLD:
        parts.append(f"{len(mine) - TOLD} more changes")
    if not parts:
        parts.append("a hard goal asks for it")
    return f"{', '.join(parts)}: {change}, {moves} moves"


def _peaks(problem: Problem, seen: Forecast, placement: Ints) -> Floats:
    load = seen.mean.astype(np.float64)
    loads = rank_loads(load, placement, even_shares(placement, problem.experts), problem.ranks) / problem.capacity
    return np.asarray(loads.max(axis=1) * problem.capacity[~problem.drained].sum())
