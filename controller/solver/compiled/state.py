"""State and objective of one layer of the placement search.

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
TOKENS, ACTIVATED, FLOOR = 0, 1, 2

compiled: Any = njit(cache=True, fastmath=True, nogil=True)


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


@compiled
def power(x, floor):  # type: ignore[no-untyped-def]
    x = max(x - floor, np.float32(0.0))
    x = x * x
    x = x * x
    return x * x


@compiled
def set_count(s, q, e):  # type: ignore[no-untyped-def]
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


@compiled
def set_rank(s, q, r):  # type: ignore[no-untyped-def]
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
        total += power((x[r, h] + extra) * scale, floor)
    s.v[r] = var
    s.phi[r] = total
    s.mean[r] = mean * speed / np.float32(H)


@compiled
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
        set_count(s, q, e)
    for r in range(ranks):
        set_rank(s, q, r)
    return objective(s, q)


@compiled
def objective(s, q):  # type: ignore[no-untyped-def]
    phi = s.phi
    total = 0.0
    for r in range(phi.shape[0]):
        total += phi[r]
    return q.floor + (total / (phi.shape[0] * H)) ** (1.0 / POWER)


@compiled
def spread_holds(s, q, e, leave, enter):  # type: ignore[no-untyped-def]
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


@compiled
def touch(touched, n, r):  # type: ignore[no-untyped-def]
    for i in range(n):
        if touched[i] == r:
            return n
    touched[n] = r
    return n + 1


@compiled
def involve(s, n, e, by):  # type: ignore[no-untyped-def]
    involved, change = s.involved, s.change
    for i in range(n):
        if involved[i] == e:
            change[i] += by
            return n
    involved[n] = e
    change[n] = by
    return n + 1


@compiled
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
        m = involve(s, m, plan[i, 2], less)
        m = involve(s, m, plan[i, 3], more)
    for i in range(m):
        e = involved[i]
        if e != none and change[i] > 0:
            for j in range(count[e]):
                t = touch(touched, t, where[e, j])
    relieved = t
    for i in range(n):
        t = touch(touched, t, plan[i, 0])
    for i in range(m):
        e = involved[i]
        if e != none and change[i] < 0:
            for j in range(count[e]):
                t = touch(touched, t, where[e, j])
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
            total += power((row[h] + extra) * scale, floor)
        delta += total - phi[r]
    return delta


@compiled
def apply(s, q, n, plan):  # type: ignore[no-untyped-def]
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
        t = touch(touched, t, r)
        m = involve(s, m, e, less)
        m = involve(s, m, plan[i, 3], more)
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
            set_count(s, q, e)
            for j in range(count[e]):
                t = touch(touched, t, where[e, j])
    for j in range(t):
        set_rank(s, q, touched[j])
