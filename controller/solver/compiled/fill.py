"""A layer's placement from nothing, and exact shares for a placement."""

from __future__ import annotations

import numpy as np

from controller.solver.compiled.state import compiled


@compiled
def scratch(s, q, mean, room):  # type: ignore[no-untyped-def]
    """Fill `table` from nothing (locked places stay): replicate the hottest, then longest first on the lightest rank.

    mean [E + 1] expected load; room [nodes + 1] places of each node, the last of all nodes together.
    """
    ranks_n, places = s.table.shape
    experts = s.count.shape[0] - 1
    nodes = room.shape[0] - 1
    copies = s.low.copy()
    total = 0
    for e in range(experts):
        total += copies[e]
        room[s.home[e] if s.home[e] >= 0 else nodes] -= copies[e]
        if s.home[e] >= 0:
            room[nodes] -= copies[e]
    spare = min(room[nodes], q.most_used - total)
    while spare > 0:
        best = -1
        for e in range(experts):
            if (
                copies[e] < s.high[e]
                and (s.home[e] < 0 or room[s.home[e]] > 0)
                and (best < 0 or mean[e] / copies[e] > mean[best] / copies[best])
            ):
                best = e
        if best < 0:
            break
        copies[best] += 1
        spare -= 1
        if s.home[best] >= 0:
            room[s.home[best]] -= 1
    held = np.zeros(ranks_n, dtype=np.int64)
    weight = np.zeros(ranks_n, dtype=np.float64)
    on = np.zeros((ranks_n, experts), dtype=np.bool_)
    for r in range(ranks_n):
        for k in range(places):
            e = s.table[r, k]
            if e >= 0 and s.locked[r, k]:
                on[r, e] = True
                held[r] += 1
                weight[r] += mean[e] / copies[e]
            else:
                s.table[r, k] = -1
    placed = np.zeros(experts, dtype=np.bool_)
    for _ in range(experts):
        e = -1
        for i in range(experts):
            if not placed[i] and (e < 0 or mean[i] / copies[i] > mean[e] / copies[e]):
                e = i
        placed[e] = True
        there = 0
        for r in range(ranks_n):
            there += on[r, e]
        for _ in range(copies[e] - there):
            best = -1
            for r in range(ranks_n):
                if on[r, e] or held[r] >= s.usable[r] or (s.home[e] >= 0 and s.home[e] != s.node[r]):
                    continue
                if (
                    best < 0
                    or (weight[r] + mean[e] / copies[e]) * s.speed[r]
                    < (weight[best] + mean[e] / copies[e]) * s.speed[best]
                ):
                    best = r
            if best < 0:
                break
            on[best, e] = True
            held[best] += 1
            weight[best] += mean[e] / copies[e]
            for k in range(s.usable[best]):
                if s.table[best, k] < 0:
                    s.table[best, k] = e
                    break


@compiled
def level_shares(table, load, speed, share, sweeps):  # type: ignore[no-untyped-def]
    """Split each expert's load over its copies so that the slowest rank is as fast as it can be; share [R, K] in place.

    Coordinate descent: one expert at a time is poured as water over its ranks. It minimises the sum of squared rank
    times, whose minimiser over all splits also has the least maximum (the least majorised point of the polytope).
    """
    ranks_n, places = table.shape
    experts = load.shape[0]
    count = np.zeros(experts, dtype=np.int64)
    x = np.zeros(ranks_n)
    for r in range(ranks_n):
        for k in range(places):
            if table[r, k] >= 0:
                count[table[r, k]] += 1
    start = np.zeros(experts + 1, dtype=np.int64)
    for e in range(experts):
        start[e + 1] = start[e] + count[e]
    fill = start.copy()
    at = np.zeros((start[experts], 2), dtype=np.int64)
    for r in range(ranks_n):
        for k in range(places):
            e = table[r, k]
            if e >= 0:
                at[fill[e], 0], at[fill[e], 1] = r, k
                fill[e] += 1
                share[r, k] = 1.0 / count[e]
                x[r] += load[e] * share[r, k]
    worst = 0.0
    for r in range(ranks_n):
        worst = max(worst, x[r] * speed[r])
    for _ in range(sweeps):
        moved = 0.0
        for e in range(experts):
            if count[e] < 2 or load[e] <= 0:
                continue
            moved = max(moved, _pour(at, start[e], count[e], load[e], speed, share, x))
        if moved < 1e-7 * worst:
            break


@compiled
def _pour(at, first, c, load, speed, share, x):  # type: ignore[no-untyped-def]
    """Water-fill one expert over its places `at[first : first + c]`; returns the largest change of a rank's load."""
    at = at[first : first + c]
    level = np.empty(c)
    for i in range(c):
        r = at[i, 0]
        x[r] -= load * share[r, at[i, 1]]
        level[i] = x[r] * speed[r]
    # The water rises over the lowest ranks first: sort the places by level (few of them).
    for i in range(1, c):
        j = i
        while j > 0 and level[j - 1] > level[j]:
            level[j - 1], level[j] = level[j], level[j - 1]
            at[j - 1, 0], at[j, 0] = at[j, 0], at[j - 1, 0]
            at[j - 1, 1], at[j, 1] = at[j, 1], at[j - 1, 1]
            j -= 1
    base = 0.0
    width = 0.0
    height = 0.0
    for i in range(c):
        base += x[at[i, 0]]
        width += 1.0 / speed[at[i, 0]]
        height = (load + base) / width
        if i + 1 == c or height <= level[i + 1]:
            break
    most = 0.0
    for i in range(c):
        r, k = at[i, 0], at[i, 1]
        part = max(0.0, height / speed[r] - x[r]) / load
        most = max(most, abs(part - share[r, k]) * load)
        share[r, k] = part
        x[r] += load * part
    return most
