"""Compiled inner loops of the placement search (numba). Imported only while solving, never by the CLI or the API.

One layer at a time. A load of 1.0 is the mean rank load (a perfect split); H scenarios lie side by side in lanes. The
objective of a layer is a power mean over ranks and scenarios,

    F = floor + mean over r, h of max(0, (cost[r, h] + risk * sqrt(sum over slots of squared mean cost)) / speed[r] - floor)
        ** POWER, all ** 1/POWER,

a smooth stand-in for the expected slowest rank. Its second term is the spread that independent drift of the experts gives
a rank: many small copies drift less than one big one. A floor
near the slowest rank sharpens the mean towards the maximum. A change is taken when it lowers F by more than price * moves, so a
state where none is left is a fixed point: solving again from it moves nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import njit

H = 16
POWER = 8
REMOVABLE = 24
PARTNERS = 48
TRIES = 3
CHAIN_PLACES = 48
CHAIN_ENDS = 6
LEAST_GAIN = 1e-5
TOKENS, ACTIVATED, FLOOR = 0, 1, 2
SWAP, COPY, CHAIN = 0, 1, 2

_jit: Any = njit(cache=True, fastmath=True, nogil=True)


class Layer(NamedTuple):
    """Arrays of one layer. Index E (the last) of an expert axis is "no expert": it costs nothing.

    table [R, K] i32, -1 empty; usable [R]; locked [R, K] pinned places; home [E + 1] node or -1; node [R];
    low, high [E + 1] bounds on copies; speed [R] one over the relative speed; load [E + 1, H]; value [3, E + 1, H] cost
    of one copy at one copy less, now, one more; square [3, E + 1] its mean squared; count [E + 1]; where [E + 1, C]
    ranks of the copies; on, prior [R, E + 1]; x [R, H] cost, v [R] sum of squares, phi [R] part of the objective,
    mean [R] mean cost over speed;
    involved, change, touched: scratch of `evaluate`.
    """

    table: Any
    usable: Any
    locked: Any
    home: Any
    node: Any
    low: Any
    high: Any
    speed: Any
    load: Any
    value: Any
    square: Any
    count: Any
    where: Any
    on: Any
    prior: Any
    x: Any
    v: Any
    phi: Any
    mean: Any
    involved: Any
    change: Any
    touched: Any
    row: Any
    cool: Any
    ends: Any
    cost: Any
    peak: Any
    plan: Any
    pick: Any
    tabu: Any


class Rules(NamedTuple):
    """Scalars of one layer: cost kind and its knee, risk factor, unit that scales the slowest rank to
    about 1, floor in that unit, price of a move in
    units of max / mean, nodes that copies must span, most slots in use."""

    kind: int
    knee: float
    risk: float
    unit: float
    floor: float
    price: float
    spread: int
    most_used: int


@_jit
def _pow(x, floor):  # type: ignore[no-untyped-def]
    x = max(x - floor, np.float32(0.0))
    x = x * x
    x = x * x
    return x * x


@_jit
def _set_count(s, q, e):  # type: ignore[no-untyped-def]
    """Refresh the cost rows of expert e for one copy less, its present count and one more."""
    load, value, square = s.load, s.value, s.square
    for step in range(3):
        copies = max(s.count[e] - 1 + step, 1)
        part = np.float32(1.0 / copies)
        total = np.float32(0.0)
        for h in range(H):
            x = load[e, h] * part
            if q.kind == FLOOR:
                x = max(x, np.float32(q.knee)) if x > 0 else x
            elif q.kind == ACTIVATED:
                x = np.float32((1.0 - math.exp(-x / q.knee)) * q.knee)
            value[step, e, h] = x
            total += x
        total /= np.float32(H)
        square[step, e] = total * total


@_jit
def _set_rank(s, q, r):  # type: ignore[no-untyped-def]
    """Recompute the cost row, sum of squares, mean and objective part of rank r."""
    table, value, square, x = s.table, s.value, s.square, s.x
    for h in range(H):
        x[r, h] = 0.0
    var = np.float32(0.0)
    for k in range(table.shape[1]):
        e = table[r, k]
        if e >= 0:
            for h in range(H):
                x[r, h] += value[1, e, h]
            var += square[1, e]
    extra = np.float32(q.risk) * np.sqrt(var)
    speed = s.speed[r]
    scale = speed * np.float32(q.unit)
    floor = np.float32(q.floor)
    total = np.float32(0.0)
    mean = np.float32(0.0)
    for h in range(H):
        mean += x[r, h]
        total += _pow((x[r, h] + extra) * scale, floor)
    s.v[r] = var
    s.phi[r] = total
    s.mean[r] = mean * speed / np.float32(H)


@_jit
def setup(s, q):  # type: ignore[no-untyped-def]
    """Derive all state from table and load. Returns F."""
    table, count, where, on = s.table, s.count, s.where, s.on
    ranks, places = table.shape
    for e in range(count.shape[0]):
        count[e] = 0
    for r in range(ranks):
        for e in range(count.shape[0]):
            on[r, e] = False
        for k in range(places):
            e = table[r, k]
            if e >= 0:
                where[e, count[e]] = r
                count[e] += 1
                on[r, e] = True
    for e in range(count.shape[0]):
        _set_count(s, q, e)
    for r in range(ranks):
        _set_rank(s, q, r)
    return objective(s, q)


@_jit
def objective(s, q):  # type: ignore[no-untyped-def]
    phi = s.phi
    total = 0.0
    for r in range(phi.shape[0]):
        total += phi[r]
    return q.floor + (total / (phi.shape[0] * H)) ** (1.0 / POWER)


@_jit
def _spread_holds(s, q, e, leave, enter):  # type: ignore[no-untyped-def]
    """Do the copies of e still lie on min(spread, copies) nodes when rank `leave` drops one and `enter` takes one?"""
    if q.spread <= 1:
        return True
    where, node = s.where, s.node
    count = s.count[e]
    copies = 0
    distinct = 0
    for i in range(count + 1):
        r = where[e, i] if i < count else enter
        if r < 0 or (i < count and r == leave):
            continue
        copies += 1
        fresh = 1
        for j in range(min(i, count)):
            other = where[e, j]
            if other != leave and node[other] == node[r]:
                fresh = 0
        distinct += fresh
    return distinct >= min(q.spread, copies)


@_jit
def _touch(touched, n, r):  # type: ignore[no-untyped-def]
    for i in range(n):
        if touched[i] == r:
            return n
    touched[n] = r
    return n + 1


@_jit
def _involve(s, n, e, by):  # type: ignore[no-untyped-def]
    involved, change = s.involved, s.change
    for i in range(n):
        if involved[i] == e:
            change[i] += by
            return n
    involved[n] = e
    change[n] = by
    return n + 1


@_jit
def evaluate(s, q, n, plan, enough):  # type: ignore[no-untyped-def]
    """Change of the summed phi when, for each i < n, rank plan[i, 0] gives up plan[i, 2] for plan[i, 3] (E: nothing).

    Ranks that are relieved come first: once the rest can only add, a sum above `enough` is returned as it stands.
    """
    value, square, on, where, count = s.value, s.square, s.on, s.where, s.count
    involved, change, touched, row = s.involved, s.change, s.touched, s.row
    x, v, phi, speed = s.x, s.v, s.phi, s.speed
    none = count.shape[0] - 1
    less, more, m, t = np.int64(-1), np.int64(1), np.int64(0), np.int64(0)
    for i in range(n):
        m = _involve(s, m, plan[i, 2], less)
        m = _involve(s, m, plan[i, 3], more)
    for i in range(m):
        e = involved[i]
        if e != none and change[i] > 0:
            for j in range(count[e]):
                t = _touch(touched, t, where[e, j])
    relieved = t
    for i in range(n):
        t = _touch(touched, t, plan[i, 0])
    for i in range(m):
        e = involved[i]
        if e != none and change[i] < 0:
            for j in range(count[e]):
                t = _touch(touched, t, where[e, j])
    risk, floor = np.float32(q.risk), np.float32(q.floor)
    delta = np.float32(0.0)
    for j in range(t):
        if j >= relieved and delta > enough:
            return delta
        r = touched[j]
        for h in range(H):
            row[h] = x[r, h]
        var = v[r]
        for i in range(m):
            e = involved[i]
            if e == none:
                continue
            step = 1 + change[i]
            before = on[r, e]
            after = before
            for c in range(n):
                if plan[c, 0] == r and plan[c, 2] == e:
                    after = False
            for c in range(n):
                if plan[c, 0] == r and plan[c, 3] == e:
                    after = True
            if before:
                for h in range(H):
                    row[h] -= value[1, e, h]
                var -= square[1, e]
            if after:
                for h in range(H):
                    row[h] += value[step, e, h]
                var += square[step, e]
        extra = risk * np.sqrt(max(var, np.float32(0.0)))
        scale = speed[r] * np.float32(q.unit)
        total = np.float32(0.0)
        for h in range(H):
            total += _pow((row[h] + extra) * scale, floor)
        delta += total - phi[r]
    return delta


@_jit
def _apply(s, q, n, plan):  # type: ignore[no-untyped-def]
    """Write the changes (rank, place, old, new) and refresh what they touch."""
    on, where, count, table, involved, change, touched = (
        s.on,
        s.where,
        s.count,
        s.table,
        s.involved,
        s.change,
        s.touched,
    )
    none = count.shape[0] - 1
    less, more, m, t = np.int64(-1), np.int64(1), np.int64(0), np.int64(0)
    for i in range(n):
        r, e = plan[i, 0], plan[i, 2]
        t = _touch(touched, t, r)
        m = _involve(s, m, e, less)
        m = _involve(s, m, plan[i, 3], more)
        if e != none:
            on[r, e] = False
            for j in range(count[e]):
                if where[e, j] == r:
                    count[e] -= 1
                    where[e, j] = where[e, count[e]]
                    break
    for i in range(n):
        r, k, e = plan[i, 0], plan[i, 1], plan[i, 3]
        table[r, k] = -1 if e == none else e
        if e != none:
            on[r, e] = True
            where[e, count[e]] = r
            count[e] += 1
    for i in range(m):
        e = involved[i]
        if e != none and change[i] != 0:
            _set_count(s, q, e)
            for j in range(count[e]):
                t = _touch(touched, t, where[e, j])
    for j in range(t):
        _set_rank(s, q, touched[j])


@_jit
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


@_jit
def _plan(plan, i, r, k, old, new):  # type: ignore[no-untyped-def]
    plan[i, 0], plan[i, 1], plan[i, 2], plan[i, 3] = r, k, old, new


@_jit
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
                    total += _pow((x[hot, h] - d + mine) * scale, floor) + _pow((x[r, h] + d + theirs) * other, floor)
                score = (phi[hot] + phi[r] - total) * near / np.float32(max(moves, 0.5))
                if score > best and (
                    q.spread <= 1 or (_spread_holds(s, q, a, hot, r) and (b == none or _spread_holds(s, q, b, r, hot)))
                ):
                    best = score
                    _plan(pick, 0, hot, k, a, b)
                    _plan(pick, 1, r, j, b, a)
                    _plan(pick, 2, SWAP, moves, a, r)
    return best


@_jit
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
                if b >= 0 and not _spread_holds(s, q, b, r, nobody):
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


@_jit
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
                if score > best and _spread_holds(s, q, a, nobody, r):
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
                    if to == r or to == hot or d == b or d == a or on[to, b] or (home[b] >= 0 and home[b] != node[to]):
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
                        q.spread <= 1 or (_spread_holds(s, q, a, nobody, r) and _spread_holds(s, q, b, r, to))
                    ):
                        best = score
                        _plan(pick, 0, r, j, b, a)
                        _plan(pick, 1, to, place, d, b)
                        _plan(pick, 2, CHAIN, moves, a, r)
    return best


@_jit
def improve(s, q, steps, budget, log):  # type: ignore[no-untyped-def]
    """Take up to `steps` changes of at most `budget` moves in all. log f64 [n, 7]: kind, expert, from rank, to rank, moves, F before, F after.

    Returns (changes taken, 1 if no change is left to take).
    """
    phi, pick, tabu, table = s.phi, s.pick, s.tabu, s.table
    ranks = phi.shape[0]
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
                hot = r
        if hot < 0 or tries >= TRIES or phi[hot] <= 0:
            return done, 1
        if tries == 0:
            partners = _coolest(s)
            n = _removables(s, q)
        taken = False
        # A chain seldom beats a copy where a rank has several places, and costs the most to look for.
        for kind in range(2 if tries == 0 and table.shape[1] <= 2 else 1):
            score = np.float32(0.0)
            near = np.int64(0)
            if kind == 0:
                score = _swaps(s, q, hot, partners, budget - moved, pick)
            else:
                near = np.int64(min(partners, max(4, CHAIN_PLACES // table.shape[1])))
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
        _apply(s, q, np.int64(1) if pick[2, 0] == COPY else np.int64(2), pick)
        before = f
        f = objective(s, q)
        moved += pick[2, 1]
        if done < log.shape[0]:
            log[done, 0], log[done, 1], log[done, 2], log[done, 3] = pick[2, 0], pick[2, 2], hot, pick[2, 3]
            log[done, 4], log[done, 5], log[done, 6] = pick[2, 1], before, f
        done += 1
        tries = 0
        for r in range(ranks):
            tabu[r] = False
    return done, 0


@_jit
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


@_jit
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


@_jit
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
