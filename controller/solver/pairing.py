"""Layers with two places a rank: every rank is a pair, so a limit on the slowest pair says almost all about a placement.

A single change seldom pays there: one more copy of a hot expert helps only once other pairs have been taken apart. So a
limit is chosen first. Copies that can be paired under it are found from those there are, pairs that hold stay, and only
what does not fit is paired anew. The best of several limits, with its moves paid, is kept and improved further.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from controller.solver.compiled import pairs
from controller.solver.problem import EMPTY, Ints

if TYPE_CHECKING:
    from controller.solver.search import Search

LIMITS, PATIENCE = 10, 2
"""Limits tried for one layer, from the present slowest rank down to the best any placement could do, and how many may fail in
a row."""
HALVINGS = 10
SLACK = 1 + 1e-9
GAIN = 1e-3
"""Part of the objective that several changes at once must save, so that rounding and luck move nothing."""


def paired(search: Search, layer: int) -> bool:
    """Two places on every rank in use, ranks alike, and no goal that ties an expert to a rank or a node."""
    p = search.problem
    free = p.spread == 1 and search.homes is None and layer not in search.pins and p.slot_budget is None
    alike = bool((p.capacity == p.capacity[0]).all())
    return free and alike and p.per_rank == 2 and bool(np.isin(p.usable_of(layer), (0, 2)).all())


def fit(search: Search, layer: int) -> bool:
    """Try limits between the bound and the present slowest rank; keep the best placement. True if it is another."""
    p, w = search.problem, np.ascontiguousarray(search.mean[layer][:-1])
    kept = first = search.keep(layer)
    before = kept.table.astype(np.int32)
    copies = np.bincount(before[before != EMPTY], minlength=p.experts).astype(np.int64)
    room, worse = search.room(layer), 0
    for limit in np.geomspace(search.peak(layer), float(search.goal[layer]), LIMITS).tolist():
        if search.late() or worse > PATIENCE:
            break
        table = before.copy()
        if not _under(search, layer, w, copies.copy(), limit, table):
            break
        if search.count_moves(layer, table) > room:
            continue
        search.begin(layer, table)
        search.settle(layer)
        if search.price_of(layer) < kept.price - GAIN * first.objective:
            kept, worse = search.keep(layer), 0
        else:
            worse += 1
        search.put_back(layer, first)
    if kept is first:
        return False
    search.put_back(layer, kept)
    return True


def scratch(search: Search, layer: int) -> Ints | None:
    """[R, 2] pairs from nothing, for the forecast mean, under the least limit that halving finds; None if none is found."""
    p, w = search.problem, np.ascontiguousarray(search.mean[layer][:-1])
    copies, found = p.min_replicas[layer].astype(np.int64), None
    pairs.replicate(w, p.max_replicas[layer].astype(np.int64), int(p.usable_of(layer).sum()), copies)
    sizes = np.sort(np.repeat(w / copies, copies))
    sizes = np.concatenate([np.zeros(int(p.usable_of(layer).sum()) - sizes.size), sizes])
    low, high = float(search.goal[layer]), float((sizes + sizes[::-1]).max())
    for step in range(HALVINGS):
        limit, trial = high if step == 0 else 0.5 * (low + high), copies.copy()
        table = np.full((p.ranks, 2), EMPTY, dtype=np.int32)
        if _under(search, layer, w, trial, limit, table):
            found, high = table, limit
        else:
            low = limit
    return found


def _under(search: Search, layer: int, w: Ints, copies: Ints, limit: float, table: Ints) -> bool:
    """Change `table` so that its pairs are under `limit`; False where none are found."""
    p = search.problem
    usable = p.usable_of(layer).astype(np.int64)
    low, high = p.min_replicas[layer].astype(np.int64), p.max_replicas[layer].astype(np.int64)
    if pairs.settle(w, low, high, limit, copies, int(usable.sum())) > 0:
        return False
    return bool(pairs.pair_up(usable, w, copies, limit * SLACK, table, search.tuning.sharp))
