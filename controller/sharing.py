"""How the tokens of replicated experts are best split over their replicas: the fast path, which moves no bytes.

Every replica gives the same answer, so any split is right; a good one keeps the fullest rank as empty as it can be.
"""

from __future__ import annotations

import numpy as np

from controller.solver.shares import level
from eplane.load import FloatLoad
from eplane.placement import EMPTY, FloatTable, IntTable


def level_shares(p2l: IntTable, ranks: int, load: FloatLoad, speeds: FloatLoad | None = None) -> FloatTable:
    """`[L, P]` shares that make the fullest rank of each layer as empty as a split can. Runs in the solver's process.

    `speeds [R]`: relative ones of the ranks, None: all alike; then the slowest rank is made as fast as a split can.
    """
    return settled(p2l, level(p2l, load, np.ones(ranks) if speeds is None else speeds), load.shape[1])


def settled(p2l: IntTable, shares: FloatTable, experts: int) -> FloatTable:
    """The shares made exact: not negative, 0 on empty slots, summing to 1 for every expert."""
    held = p2l != EMPTY
    table = np.where(held, np.clip(np.nan_to_num(shares), 0.0, 1.0), 0.0)
    layers, slots = p2l.shape
    key = (np.arange(layers)[:, None] * experts + np.maximum(p2l, 0)).ravel()
    sums = np.bincount(key[held.ravel()], weights=table[held], minlength=layers * experts)
    counts = np.bincount(key[held.ravel()], minlength=layers * experts)
    total, count = sums[key].reshape(layers, slots), counts[key].reshape(layers, slots)
    even = np.where(held, 1.0 / np.maximum(count, 1), 0.0)
    return np.where(held & (total > 1e-9), table / np.where(total > 1e-9, total, 1.0), even)
