"""Kernels of the `flash` policy: how many copies, where they go, what that is worth, which rank takes which row.

One layer: x [T, E] loads of the window's entries; spare [T, E] the same less their mean; mean, spread [E] mean and
standard deviation; count [E] copies; usable [R] places of each rank.
"""

from __future__ import annotations

import numpy as np

from controller.solver.compiled.state import compiled


@compiled
def copies_in_turn(weight, room, most):  # type: ignore[no-untyped-def]
    """[room + 1, E] copies after each further one, to the expert with most weight a copy, at most `most` of one."""
    history = np.ones((room + 1, weight.size), dtype=np.int64)
    for step in range(1, room + 1):
        best, top = -1, -1.0
        for e in range(weight.size):
            history[step, e] = history[step - 1, e]
            if history[step, e] < most and weight[e] / history[step, e] > top:
                best, top = e, weight[e] / history[step, e]
        if best >= 0:
            history[step, best] += 1
    return history


@compiled
def place(mean, spare, count, usable, factor, order, table):  # type: ignore[no-untyped-def]
    """Fill `table [R, K]`, experts in `order`, each copy to the rank whose mean + factor x deviation stays lowest.

    The deviation is that of the rank's whole load over the entries, so experts that rise and fall together stay apart.
    Returns False when a copy finds no rank.
    """
    entries, ranks = spare.shape[0], usable.size
    over = 1.0 / max(entries - 1, 1)
    load = np.zeros(ranks)
    swing = np.zeros((ranks, entries))
    square = np.zeros(ranks)
    used = np.zeros(ranks, dtype=np.int64)
    mine = np.empty(entries)
    table[:] = -1
    for e in order:
        own = 0.0
        for t in range(entries):
            mine[t] = spare[t, e] / count[e]
            own += mine[t] * mine[t]
        part = mean[e] / count[e]
        for _ in range(count[e]):
            best, least, grown = -1, np.inf, 0.0
            for r in range(ranks):
                if used[r] >= usable[r] or load[r] + part >= least:
                    continue
                holds = False
                for k in range(used[r]):
                    holds |= table[r, k] == e
                if holds:
                    continue
                total = square[r] + own
                for t in range(entries):
                    total += 2.0 * swing[r, t] * mine[t]
                risk = load[r] + part + factor * np.sqrt(max(total, 0.0) * over)
                if risk < least:
                    best, least, grown = r, risk, total
            if best < 0:
                return False
            table[best, used[best]] = e
            used[best] += 1
            load[best] += part
            square[best] = grown
            for t in range(entries):
                swing[best, t] += mine[t]
    return True


@compiled
def score(x, count, table, usable):  # type: ignore[no-untyped-def]
    """Mean over the entries of slowest rank / mean over the ranks in use."""
    out = 0.0
    ranks = 0
    for r in range(usable.size):
        ranks += usable[r] > 0
    for t in range(x.shape[0]):
        top, total = 0.0, 0.0
        for r in range(table.shape[0]):
            load = 0.0
            for k in range(table.shape[1]):
                e = table[r, k]
                if e >= 0:
                    load += x[t, e] / count[e]
            total += load
            top = max(top, load)
        out += (top * ranks + 1e-2) / (total + 1e-2)
    return out / x.shape[0]


@compiled
def plan(x, mean, spare, spread, usable, factor, depth, width, table):  # type: ignore[no-untyped-def]
    """Write the layer's plan to `table [R, K]`; returns its score, or infinity when a copy finds no rank.

    Experts, heaviest first, in `depth` groups. Group by group: the copies it gets as a whole are tried around what the
    plain greedy gives it, `width` to either side, the rest going to the groups after it; the best is kept.
    """
    experts = mean.size
    weight = mean + factor * spread
    by_weight = np.argsort(-weight, kind="mergesort")
    hosts, room = 0, -experts
    for r in range(usable.size):
        hosts += usable[r] > 0
        room += usable[r]
    room = min(room, experts * (hosts - 1))
    size = -(-experts // depth)
    count = np.zeros(experts, dtype=np.int64)
    for group in range(max(depth - 1, 1)):
        here = by_weight[group * size : (group + 1) * size]
        rest = by_weight[(group + 1) * size :]
        both = copies_in_turn(weight[by_weight[group * size :]], room, hosts)
        first = both[room, : here.size].sum() - here.size
        mine = copies_in_turn(weight[here], room, hosts)
        theirs = copies_in_turn(weight[rest], room, hosts)
        best, least = first, np.inf
        for step in range(2 * width + 1):
            given = first - (step + 1) // 2 if step % 2 else first + step // 2
            if given < 0 or given > room:
                continue
            count[here] = mine[given]
            count[rest] = theirs[room - given]
            order = np.argsort(-(mean / count), kind="mergesort")
            if place(mean, spare, count, usable, factor, order, table):
                value = score(x, count, table, usable)
                if value < least:
                    best, least = given, value
        count[here] = mine[best]
        count[rest] = theirs[room - best]
        room -= best
        if room == 0 or rest.size == 0:
            break
    order = np.argsort(-(mean / count), kind="mergesort")
    if not place(mean, spare, count, usable, factor, order, table):
        return np.inf
    return score(x, count, table, usable)


@compiled
def assign(gain, row_of):  # type: ignore[no-untyped-def]
    """Write to `row_of [n]` the row that each column takes in the assignment of largest total gain `[n, n]`.

    Rows enter one at a time along the shortest augmenting path in reduced costs.
    """
    n = gain.shape[0]
    row_price = np.zeros(n + 1)
    price = np.zeros(n + 1)
    taken = np.zeros(n + 1, dtype=np.int64)
    before = np.zeros(n + 1, dtype=np.int64)
    for row in range(1, n + 1):
        taken[0] = row
        column = 0
        short = np.full(n + 1, np.inf)
        done = np.zeros(n + 1, dtype=np.bool_)
        while taken[column] != 0:
            done[column] = True
            at, step, follow = taken[column], np.inf, 0
            for j in range(1, n + 1):
                if done[j]:
                    continue
                cost = -gain[at - 1, j - 1] - row_price[at] - price[j]
                if cost < short[j]:
                    short[j] = cost
                    before[j] = column
                if short[j] < step:
                    step, follow = short[j], j
            for j in range(n + 1):
                if done[j]:
                    row_price[taken[j]] += step
                    price[j] -= step
                else:
                    short[j] -= step
            column = follow
        while column != 0:
            taken[column] = taken[before[column]]
            column = before[column]
    for j in range(1, n + 1):
        row_of[j - 1] = taken[j] - 1
