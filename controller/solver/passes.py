"""What the policy tries once no single change pays any more: each layer, worst first, keeps what wins with its moves paid."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from controller.solver.problem import EMPTY, Bools, Ints

if TYPE_CHECKING:
    from controller.solver.search import Search

MENDED = 4
PAIR, FEW_RANKS = 2, 8
"""Places a rank up to which copies and pairs are settled together; ranks up to which copies are not renewed: on recorded loads over
4 and 8 ranks that moved half as much again and was no better balanced, over 16 it was."""
KICKS, KICK_SLOTS, KICK_GAP = 200, 20_000, 0.003
"""Random restarts a layer, slots they may cost in all, and the gap to the bound that is good enough."""
SCRATCH_GAP, SCRATCH_PART = 0.05, 0.3
"""A placement from scratch is tried where the slowest rank is this far above the bound, and above the price of that part
of the slots moving."""


def improve_layers(search: Search, held: Bools) -> list[int]:
    """Pairs under a limit, copies renewed, kicks, placements from scratch. Returns the layers that were placed anew.

    held [L]: layers that must stay as they are.
    """
    p = search.problem
    # A placement from scratch looks at no nodes: mended afterwards it would not be what was weighed.
    anew = p.prior is not None and p.max_moves is None and not p.fixed_slots and p.spread == 1
    taken = []
    for layer in np.argsort(-search.objective, kind="stable").tolist():
        if held[layer]:
            continue
        _mend(search, layer)
        if anew and _from_scratch(search, layer):
            taken.append(layer)
            search.settle(layer)
            _mend(search, layer)
    if p.prior is None and search.tuning.sharp and p.spread == 1:
        _kick(search)
    return sorted(taken)


def _mend(search: Search, layer: int) -> None:
    """Several changes at once, until none of them pays: what is left is a fixed point, and solving again moves nothing."""
    # The kernels are compiled where they are first imported: never by whoever only reads a problem.
    from controller.solver import pairing
    from controller.solver.renewal import renew

    if search.problem.spread > 1:
        return
    pairs = pairing.paired(search, layer)
    many = search.problem.per_rank > PAIR and search.problem.ranks > FEW_RANKS
    for _ in range(MENDED):
        changed = pairing.fit(search, layer) if pairs else many and renew(search, layer)
        if not changed or search.late():
            return


def _from_scratch(search: Search, layer: int) -> bool:
    """The layer placed anew, ranks relabelled to keep what they hold, if that wins with its moves paid."""
    from controller.solver.search import relabel

    p = search.problem
    least = search.goal[layer] * (1 + SCRATCH_GAP) + SCRATCH_PART * p.slots * search.tuning.price
    if p.prior is None or search.late() or search.peak(layer) < least:
        return False
    kept = search.keep(layer)
    table = search.scratch(layer)
    pinned = search.state.locked.copy()
    search.begin(layer, table)
    # Its moves come on top: where it is no better without them, they need not be counted.
    if search.objective[layer] < kept.price:
        prior: Ints = p.prior[layer].reshape(table.shape)
        near = search.homes is not None
        table = relabel(table, prior, p.node_of_rank, p.usable_of(layer), p.capacity, pinned, near)
        search.begin(layer, table)
        if search.price_of(layer) < kept.price and (table != EMPTY).sum() >= (kept.table != EMPTY).sum():
            return True
    search.put_back(layer, kept)
    return False


def undo_small(search: Search, start: Ints) -> None:
    """Put layers back to `start [L, R, K]` whose gain is below min_improvement."""
    for layer in np.flatnonzero(search.moved > 0).tolist():
        kept = search.keep(layer)
        search.begin(layer, start[layer])
        before = float(search.objective[layer])
        if before - kept.objective >= search.problem.min_improvement * max(before, 1e-30):
            search.put_back(layer, kept)


def _kick(search: Search) -> None:
    """A known load and free moves: close the gap to the bound where local search left one."""
    p = search.problem
    rounds = max(1, min(KICKS, KICK_SLOTS // (p.slots * p.layers)))
    for layer in range(p.layers):
        goal = float(search.goal[layer]) * (1 + KICK_GAP)
        if search.peak(layer) > goal:
            search.kick(layer, goal, rounds)
