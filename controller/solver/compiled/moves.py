"""The neighbourhood of a placement and the descent in it, one layer at a time: swap, copy, chain (copy and relocate)."""

from __future__ import annotations

import numpy as np

from controller.solver.compiled.state import (
    POWER,
    REMOVABLE,
    H,
    apply,
    compiled,
    evaluate,
    objective,
    power,
    spread_holds,
)

TRIES = 3
"""Hottest ranks that must each be stuck before a layer counts as settled."""
CHAIN_PLACES = 48
CHAIN_ENDS = 6
LEAST_GAIN = 1e-5
SWAP, COPY, CHAIN = 0, 1, 2


@compiled
def _coolest(s):  # type: ignore[no-untyped-def]
    """Write the PARTNERS ranks with the least phi to s.cool, coolest first; returns how many."""
    phi, cool, usable = s.phi, s.cool, s.usable
    limit = cool.shape[0]
    n = 0
    for r in range(phi.shape[0]):
        if usable[r] == 0 or (n == limit and phi[r] >= phi[cool[limit - 1]]):
            continue
        i = min(n, limit - 1)
        while i > 0 and phi[cool[i - 1]] > phi[r]:
            cool[i] = cool[i - 1]
            i -= 1
        cool[i] = r
        n = min(n + 1, limit)
    return n


@compiled
def _plan(plan, i, r, k, old, new):  # type: ignore[no-untyped-def]
    plan[i, 0], plan[i, 1], plan[i, 2], plan[i, 3] = r, k, old, new


@compiled
def _swaps(s, q, hot, partners, budget, pick):  # type: ignore[no-untyped-def]
    """Best exchange of a place of `hot` with one of a cool rank. Writes it to pick; returns its score, or 0."""
    best = np.float32(0.0)
    table, usable, locked, phi, on, home, node = s.table, s.usable, s.locked, s.phi, s.on, s.home, s.node
    value, square, prior, x, v, mean, cool, speed = s.value, s.square, s.prior, s.x, s.v, s.mean, s.cool, s.speed
    none = s.count.shape[0] - 1
    scale = speed[hot] * np.float32(q.unit)
    risk, floor = np.float32(q.risk), np.float32(q.floor)
    for k in range(usable[hot]):
        a = np.int64(table[hot, k])
        if a < 0 or locked[hot, k]:
            continue
        for i in range(partners):
            r = cool[i]
            if r == hot or on[r, a] or (home[a] >= 0 and home[a] != node[r]):
                continue
            other = speed[r] * np.float32(q.unit)
            near = np.float32(1.05) if node[r] == node[hot] else np.float32(1.0)
            for j in range(usable[r]):
                if locked[r, j]:
                    continue
                b = np.int64(table[r, j])
                if b < 0:
                    b = none
                elif on[hot, b] or (home[b] >= 0 and home[b] != node[hot]):
                    continue
                shift = square[1, a] - square[1, b]
                if shift <= 0 and scale == other:
                    continue
                moves = int(prior[hot, a]) - int(prior[r, a])
                if b != none:
                    moves += int(prior[r, b]) - int(prior[hot, b])
                if moves > budget:
                    continue
                grown = mean[r] + (np.sqrt(square[1, a]) - np.sqrt(square[1, b])) * speed[r]
                if grown > mean[hot]:
                    continue
                mine = risk * np.sqrt(max(v[hot] - shift, np.float32(0.0)))
                theirs = risk * np.sqrt(max(v[r] + shift, np.float32(0.0)))
                total = np.float32(0.0)
                for h in range(H):
                    d = value[1, a, h] - value[1, b, h]
                    total += power((x[hot, h] - d + mine) * scale, floor) + power((x[r, h] + d + theirs) * other, floor)
                score = (phi[hot] + phi[r] - total) * near / np.float32(max(moves, 0.5))
                if score > best and (
                    q.spread <= 1 or (spread_holds(s, q, a, hot, r) and (b == none or spread_holds(s, q, b, r, hot)))
                ):
                    best = score
                    _plan(pick, 0, hot, k, a, b)
                    _plan(pick, 1, r, j, b, a)
                    _plan(pick, 2, SWAP, moves, a, r)
    return best


@compiled
def _removables(s, q):  # type: ignore[no-untyped-def]
    """Write to s.ends the places whose expert may go, cheapest first by how hot its other copies' ranks get (s.peak)."""
    table, usable, locked, count, low, where = s.table, s.usable, s.locked, s.count, s.low, s.where
    square, mean, speed, ends, cost, peak = s.square, s.mean, s.speed, s.ends, s.cost, s.peak
    nobody = np.int64(-1)
    n = 0
    used = 0
    for e in range(count.shape[0] - 1):
        used += count[e]
    for r in range(table.shape[0]):
        for k in range(usable[r]):
            b = np.int64(table[r, k])
            if b < 0:
                if used >= q.most_used:
                    continue
                high = np.float32(0.0)
                w = np.float32(0.25) * mean[r]
            else:
                if locked[r, k] or count[b] <= low[b]:
                    continue
                now = np.sqrt(square[1, b])
                more = np.sqrt(square[0, b]) - now
                high = np.float32(0.0)
                for i in range(count[b]):
                    o = where[b, i]
                    if o != r:
                        high = max(high, mean[o] + more * speed[o])
                w = high + np.float32(0.25) * (mean[r] - now * speed[r])
            if n < REMOVABLE or w < cost[REMOVABLE - 1]:
                if b >= 0 and not spread_holds(s, q, b, r, nobody):
                    continue
                i = min(n, REMOVABLE - 1)
                while i > 0 and cost[i - 1] > w:
                    cost[i], peak[i] = cost[i - 1], peak[i - 1]
                    ends[i, 0], ends[i, 1] = ends[i - 1, 0], ends[i - 1, 1]
                    i -= 1
                cost[i], peak[i] = w, high
                ends[i, 0], ends[i, 1] = r, k
                n = min(n + 1, REMOVABLE)
    return n


@compiled
def _copies(s, q, hot, n, partners, budget, best, pick):  # type: ignore[no-untyped-def]
    """Best new copy of an expert of `hot`: over a removable place, or (partners > 0) over a place of a cool rank whose
    expert moves on to a removable place. Writes it to pick; returns its score, or `best`."""
    table, usable, locked, count, high, on, home, node = (
        s.table, s.usable, s.locked, s.count, s.high, s.on, s.home, s.node,
    )  # fmt: skip
    square, prior, mean, speed, ends, cool, plan, peak = (
        s.square, s.prior, s.mean, s.speed, s.ends, s.cool, s.plan, s.peak,
    )  # fmt: skip
    none = count.shape[0] - 1
    one, two, nobody = np.int64(1), np.int64(2), np.int64(-1)
    most = np.float32(0.0)
    for k in range(usable[hot]):
        a = np.int64(table[hot, k])
        if a >= 0 and count[a] < high[a]:
            most = max(most, np.sqrt(square[1, a]) - np.sqrt(square[2, a]))
    for k in range(usable[hot]):
        a = np.int64(table[hot, k])
        if a < 0 or count[a] >= high[a]:
            continue
        mine = np.sqrt(square[2, a])
        if np.sqrt(square[1, a]) - mine < np.float32(0.25) * most:
            continue
        if partners == 0:
            for i in range(n):
                r, j = ends[i, 0], ends[i, 1]
                b = np.int64(table[r, j])
                if b < 0:
                    b = none
                if r == hot or on[r, a] or (home[a] >= 0 and home[a] != node[r]) or peak[i] > mean[hot]:
                    continue
                if mean[r] + (mine - np.sqrt(square[1, b])) * speed[r] > mean[hot]:
                    continue
                moves = 1 - int(prior[r, a]) - int(not prior[r, b])
                if moves > budget:
                    continue
                _plan(plan, 0, r, j, b, a)
                weight = np.float32(max(moves, 0.5))
                score = -evaluate(s, q, one, plan, -best * weight) / weight
                if score > best and spread_holds(s, q, a, nobody, r):
                    best = score
                    _plan(pick, 0, r, j, b, a)
                    _plan(pick, 2, COPY, moves, a, r)
            continue
        for c in range(partners):
            r = cool[c]
            if r == hot or on[r, a] or (home[a] >= 0 and home[a] != node[r]):
                continue
            for j in range(usable[r]):
                b = np.int64(table[r, j])
                if b < 0 or locked[r, j]:
                    continue
                if mean[r] + (mine - np.sqrt(square[1, b])) * speed[r] > mean[hot]:
                    continue
                for i in range(min(n, CHAIN_ENDS)):
                    to, place = ends[i, 0], ends[i, 1]
                    d = np.int64(table[to, place])
                    if d < 0:
                        d = none
                    if to in (r, hot) or d in (a, b) or on[to, b] or (home[b] >= 0 and home[b] != node[to]):
                        continue
                    if mean[to] + (np.sqrt(square[1, b]) - np.sqrt(square[1, d])) * speed[to] > mean[hot]:
                        continue
                    moves = 2 - int(prior[r, a]) - int(prior[to, b]) - int(not prior[r, b]) - int(not prior[to, d])
                    if moves > budget:
                        continue
                    _plan(plan, 0, r, j, b, a)
                    _plan(plan, 1, to, place, d, b)
                    weight = np.float32(max(moves, 0.5))
                    score = -evaluate(s, q, two, plan, -best * weight) / weight
                    if score > best and (
                        q.spread <= 1 or (spread_holds(s, q, a, nobody, r) and spread_holds(s, q, b, r, to))
                    ):
                        best = score
                        _plan(pick, 0, r, j, b, a)
                        _plan(pick, 1, to, place, d, b)
                        _plan(pick, 2, CHAIN, moves, a, r)
    return best


@compiled
def improve(s, q, steps, budget):  # type: ignore[no-untyped-def]
    """Take up to `steps` changes of at most `budget` moves in all. Returns (moves made, F, 1 if no change is left to take)."""
    phi, pick, tabu, table = s.phi, s.pick, s.tabu, s.table
    ranks, places = table.shape
    size = ranks * H
    done = 0
    tries = 0
    moved = 0
    partners = np.int64(0)
    n = np.int64(0)
    for r in range(ranks):
        tabu[r] = False
    f = objective(s, q)
    while done < steps:
        hot = np.int64(-1)
        for r in range(ranks):
            if not tabu[r] and (hot < 0 or phi[r] > phi[hot]):
                hot = np.int64(r)
        if hot < 0 or tries >= TRIES or phi[hot] <= 0:
            return moved, f, 1
        if tries == 0:
            partners = _coolest(s)
            n = _removables(s, q)
        taken = False
        # A chain seldom beats a copy where a rank has several places, and costs the most to look for.
        for kind in range(2 if tries == 0 and places <= 2 else 1):
            score = np.float32(0.0)
            near = np.int64(0)
            if kind == 0:
                score = _swaps(s, q, hot, partners, budget - moved, pick)
            else:
                near = np.int64(min(partners, max(4, CHAIN_PLACES // places)))
            score = _copies(s, q, hot, n, near, budget - moved, score, pick)
            if score > 0:
                moves = pick[2, 1]
                rest = max((f - q.floor) ** POWER - score * max(moves, 0.5) / size, 0.0)
                after = q.floor + rest ** (1.0 / POWER)
                # The margin excludes changes that rounding alone makes look good.
                if f - after > q.price * q.unit * moves + LEAST_GAIN * f:
                    taken = True
                    break
        if not taken:
            tabu[hot] = True
            tries += 1
            continue
        apply(s, q, np.int64(1) if pick[2, 0] == COPY else np.int64(2), pick)
        f = objective(s, q)
        moved += pick[2, 1]
        done += 1
        tries = 0
        for r in range(ranks):
            tabu[r] = False
    return moved, f, 0
