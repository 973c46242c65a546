"""Copies where they are wanted now: a layer balanced for long keeps copies of experts that are hot no more.

Each single exchange of copies upsets a balance that was fitted around the old ones, so local search never takes it. Here all
exchanges that pay are made at once, the search balances what they upset, and the whole is kept if it wins with its moves paid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from controller.solver.problem import EMPTY, Ints

if TYPE_CHECKING:
    from controller.solver.search import Search

DEAR = 1.5
"""Moves of a renewal count this many times: many changes made at once on one forecast keep less of what they promise."""
GAIN = 1e-5
"""Part of the objective that a renewal must save: more than rounding makes of nothing."""
AT_ONCE = (None, 2)
"""Exchanges made at once: all that pay, or where that does not win, the two that pay most."""
WORTH = 1.3
"""An exchange must lower the sum of squared copies by this much more than it raises it."""


def renew(search: Search, layer: int) -> bool:
    """Exchange copies of the layer, balance it anew, keep the better. True if it is another placement."""
    return any(_tried(search, layer, most) for most in AT_ONCE)


def _tried(search: Search, layer: int, most: int | None) -> bool:
    if search.late():
        return False
    table = exchanged(search, layer, most)
    if table is None or search.count_moves(layer, table) > search.room(layer):
        return False
    kept = search.keep(layer)
    search.begin(layer, table)
    search.settle(layer)
    more = max(int(search.moved[layer]) - kept.moved, 0) * search.tuning.price
    if search.price_of(layer) + (DEAR - 1) * more < kept.price - GAIN * kept.objective:
        return True
    search.put_back(layer, kept)
    return False


def exchanged(search: Search, layer: int, most: int | None = None) -> Ints | None:
    """[R, K] the present table with at most `most` copies exchanged, or None where no exchange pays."""
    p, w = search.problem, search.mean[layer][:-1]
    table = search.tables[layer].copy()
    copies = np.bincount(table[table != EMPTY], minlength=p.experts)
    each = np.append(w / np.maximum(copies, 1), 0.0)
    load = each[table].sum(axis=1) / p.capacity
    pinned = {(rank, expert) for expert, rank in search.pins.get(layer, ())}
    low, high = p.min_replicas[layer], p.max_replicas[layer]
    done = 0
    for _ in range(p.slots if most is None else most):
        gain = np.where(copies < high, w * w / (copies * (copies + 1)), -1.0)
        loss = np.where(copies > np.maximum(low, 1), w * w / np.maximum(copies * (copies - 1), 1), np.inf)
        taker, giver = int(gain.argmax()), int(loss.argmin())
        if taker == giver or not gain[taker] > WORTH * loss[giver]:
            break
        rank = _place(search, layer, table, load, taker, giver, pinned)
        if rank < 0:
            break
        table[rank, int((table[rank] == giver).argmax())] = taker
        copies[taker] += 1
        copies[giver] -= 1
        each[:-1] = w / copies
        load = each[table].sum(axis=1) / p.capacity
        done += 1
    return table if done else None


def _place(
    search: Search, layer: int, table: Ints, load: Ints, taker: int, giver: int, pinned: set[tuple[int, int]]
) -> int:
    """The coolest rank where `taker` may take the place of `giver`, or -1."""
    free = (table == giver).any(axis=1) & ~(table == taker).any(axis=1)
    for rank in np.flatnonzero(free).tolist():
        if (rank, giver) in pinned:
            free[rank] = False
    if search.homes is not None:
        free &= search.problem.node_of_rank == search.homes[layer][taker]
    return int(np.where(free, load, np.inf).argmin()) if free.any() else -1
