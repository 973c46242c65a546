"""Shares: how tokens split over the copies that exist. The fast loop: no bytes move."""

from __future__ import annotations

import numpy as np

from controller.solver.measure import even_shares
from controller.solver.problem import EMPTY, Floats, Ints

SWEEPS = 60


def level(placement: Ints, load: Floats, capacity: Floats, part: float = 1.0) -> Floats:
    """[L, P] shares that make the slowest rank as fast as the placement allows on `load [L, E]`, exact to about 1e-6.

    part: 1 exact, 0 even, between: a blend (what was fitted to one load overfits the next).
    """
    from controller.solver.compiled.fill import level_shares

    layers, slots = placement.shape
    even = even_shares(placement, load.shape[1])
    table = np.ascontiguousarray(placement.reshape(layers, len(capacity), -1).astype(np.int32))
    exact = np.zeros((layers, len(capacity), slots // len(capacity)))
    speed = 1.0 / capacity
    for layer in range(layers):
        level_shares(table[layer], np.ascontiguousarray(load[layer], dtype=np.float64), speed, exact[layer], SWEEPS)
    return part * exact.reshape(layers, slots) + (1 - part) * even


def multiplicities(placement: Ints, shares: Floats, experts: int, entries: int = 16) -> tuple[Ints, ...]:
    """For engines that pick evenly from a table: each layer `[E, entries]`, slots repeated in proportion to their shares.

    Largest remainders; a copy with any share keeps at least one entry as long as there are entries for all copies.
    """
    tables = []
    for row, parts in zip(placement, shares, strict=True):
        table = np.full((experts, entries), EMPTY, dtype=np.int32)
        for expert in range(experts):
            slots = np.flatnonzero(row == expert)
            if slots.size:
                table[expert] = np.repeat(slots, _round(parts[slots], entries))
        tables.append(table)
    return tuple(tables)


def _round(parts: Floats, entries: int) -> Ints:
    """Whole numbers that sum to `entries`, in proportion to `parts`."""
    total = float(parts.sum())
    wanted = parts / total * entries if total > 0 else np.full(parts.size, entries / parts.size)
    counts = np.floor(wanted).astype(np.int64)
    if entries >= parts.size:
        counts = np.where((counts == 0) & (parts > 0), 1, counts)
    while counts.sum() != entries:
        miss = wanted - counts
        if counts.sum() < entries:
            counts[int(miss.argmax())] += 1
        else:
            counts[int(np.where(counts > (1 if entries >= parts.size else 0), miss, np.inf).argmin())] -= 1
    return counts
