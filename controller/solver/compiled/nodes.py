"""Exchanges that lower the nodes a token touches, one layer at a time, in the state of the placement search.

A token that goes to experts e of a tuple touches node n with the chance 1 - product over e of (1 - part[e, n]), `part`
being the share of the expert's copies that lie on the node. The sum over nodes is linear in each expert's own part, so
what a copy gains by changing node is a difference of two entries of `pull`; only experts that exchange places AND fire
together add a term. The descent is on

    F + weight * nodes touched a token + price * moves,

F as in `state`, never above `cap` for the expected slowest rank, and only by exchanges whose gain in nodes is told apart
from the luck of the sample: its lower confidence bound counts. Experts that are bound to a node (`home`) are not looked for here: there is
nothing to exchange then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controller.solver.compiled.state import POWER, H, apply, compiled, objective, power, spread_holds

LEAST_GAIN = 1e-5
PASSES = 50


class Tokens(NamedTuple):
    """Sampled tuples of a layer. ids [n, K] experts, -1 pads; first [E + 2], at [n * K]: tuples of each expert; part
    [E + 1, N] share of an expert's copies on a node; pull [E + 1, N] mean over the sample of the chance that nothing but
    expert e of its tuple touches the node; tops [H, 3] slowest ranks of each scenario and their ranks; order, worth:
    scratch for places by what they could gain; back [N, N] most that a copy gains by going from one node to another."""

    ids: Any
    first: Any
    at: Any
    part: Any
    pull: Any
    top: Any
    top_of: Any
    order: Any
    worth: Any
    back: Any


class Goal(NamedTuple):
    """weight of one node more a token, in units of F before scaling; cap on the expected slowest rank; sure: standard errors
    taken off a gain in nodes."""

    weight: float
    cap: float
    sure: float


def tokens_of(sample: NDArray[Any], experts: int, nodes: int, slots: int) -> Tokens:
    """The tuples of one layer `[n, K]` (-1 pads) ready for the search."""
    ids = np.ascontiguousarray(sample, dtype=np.int64)
    rows = np.repeat(np.arange(len(ids)), ids.shape[1])[ids.ravel() >= 0]
    flat = ids.ravel()[ids.ravel() >= 0]
    counts = np.bincount(flat, minlength=experts + 1)
    return Tokens(
        ids=ids,
        first=np.concatenate([[0], np.cumsum(counts)]),
        at=rows[np.argsort(flat, kind="stable")],
        part=np.zeros((experts + 1, nodes)),
        pull=np.zeros((experts + 1, nodes)),
        top=np.zeros((H, 3), dtype=np.float32),
        top_of=np.zeros((H, 3), dtype=np.int64),
        order=np.zeros(slots, dtype=np.int64),
        worth=np.zeros(slots),
        back=np.zeros((nodes, nodes)),
    )


@compiled
def _add_pull(t, row, node, by):  # type: ignore[no-untyped-def]
    """Add `by` times the tuple's chance products to `pull` of its experts on one node."""
    ids, part, pull = t.ids, t.part, t.pull
    zeros = 0
    rest = 1.0
    for i in range(ids.shape[1]):
        e = ids[row, i]
        if e >= 0:
            miss = 1.0 - part[e, node]
            if miss < 1e-9:
                zeros += 1
            else:
                rest *= miss
    if zeros > 1:
        return
    for i in range(ids.shape[1]):
        e = ids[row, i]
        if e >= 0:
            miss = 1.0 - part[e, node]
            if miss < 1e-9:
                pull[e, node] += by * rest
            elif zeros == 0:
                pull[e, node] += by * rest / miss


@compiled
def set_part(s, t, e):  # type: ignore[no-untyped-def]
    part = t.part
    for n in range(part.shape[1]):
        part[e, n] = 0.0
    for i in range(s.count[e]):
        part[e, s.node[s.where[e, i]]] += 1.0
    for n in range(part.shape[1]):
        part[e, n] /= max(s.count[e], 1)


@compiled
def setup_tokens(s, t):  # type: ignore[no-untyped-def]
    """Derive `part` and `pull` from the state. Returns the expected nodes a sampled token touches."""
    ids, part, pull = t.ids, t.part, t.pull
    pull[:] = 0.0
    part[:] = 0.0
    for e in range(part.shape[0] - 1):
        set_part(s, t, e)
    rows = ids.shape[0]
    total = 0.0
    for row in range(rows):
        for n in range(part.shape[1]):
            _add_pull(t, row, n, 1.0 / rows)
            rest = 1.0
            for i in range(ids.shape[1]):
                if ids[row, i] >= 0:
                    rest *= 1.0 - part[ids[row, i], n]
            total += 1.0 - rest
    return total / max(rows, 1)


@compiled
def _holds(t, row, e):  # type: ignore[no-untyped-def]
    found = False
    for i in range(t.ids.shape[1]):
        found = found or t.ids[row, i] == e
    return found


@compiled
def fewer(s, t, a, home, b, away):  # type: ignore[no-untyped-def]
    """Nodes a token saves when a copy of a goes from node `home` to `away` and one of b (or none) the other way.

    Returns (mean over the sample, its standard error).
    """
    ids, part, first, at = t.ids, t.part, t.first, t.at
    none = part.shape[0] - 1
    step_a = 1.0 / s.count[a]
    step_b = 1.0 / s.count[b] if b != none else 0.0
    total = 0.0
    square = 0.0
    for side in range(2 if b != none else 1):
        e = a if side == 0 else b
        for p in range(first[e], first[e + 1]):
            row = at[p]
            if side == 1 and _holds(t, row, a):
                continue
            old_h, new_h, old_a, new_a = 1.0, 1.0, 1.0, 1.0
            for i in range(ids.shape[1]):
                x = ids[row, i]
                if x < 0:
                    continue
                ph, pa = part[x, home], part[x, away]
                old_h *= 1.0 - ph
                old_a *= 1.0 - pa
                if x == a:
                    ph -= step_a
                    pa += step_a
                elif x == b:
                    ph += step_b
                    pa -= step_b
                new_h *= 1.0 - ph
                new_a *= 1.0 - pa
            d = new_h + new_a - old_h - old_a
            total += d
            square += d * d
    rows = ids.shape[0]
    mean = total / rows
    return mean, np.sqrt(max(square / rows - mean * mean, 0.0) / rows)


@compiled
def slowest(s, q, t):  # type: ignore[no-untyped-def]
    """Expected time of the slowest rank over the scenarios, with the risk term; 1 is a perfect split. Keeps the three
    slowest of each scenario in t.top."""
    x, v, speed, top, top_of = s.x, s.v, s.speed, t.top, t.top_of
    top[:] = np.float32(-1.0)
    top_of[:] = -1
    for r in range(x.shape[0]):
        extra = np.float32(q.risk) * np.sqrt(v[r])
        for h in range(H):
            time = (x[r, h] + extra) * speed[r]
            if time <= top[h, 2]:
                continue
            i = 2
            while i > 0 and top[h, i - 1] < time:
                top[h, i], top_of[h, i] = top[h, i - 1], top_of[h, i - 1]
                i -= 1
            top[h, i], top_of[h, i] = time, r
    total = 0.0
    for h in range(H):
        total += top[h, 0]
    return total / H


@compiled
def _exchange(s, q, t, r, a, o, b):  # type: ignore[no-untyped-def]
    """(summed phi of ranks r and o, expected slowest rank) after r gives a to o for b."""
    value, square, x, v, speed, top, top_of = s.value, s.square, s.x, s.v, s.speed, t.top, t.top_of
    risk, floor = np.float32(q.risk), np.float32(q.floor)
    shift = square[1, a] - square[1, b]
    mine = risk * np.sqrt(max(v[r] - shift, np.float32(0.0)))
    theirs = risk * np.sqrt(max(v[o] + shift, np.float32(0.0)))
    unit = np.float32(q.unit)
    total = np.float32(0.0)
    slow = np.float32(0.0)
    for h in range(H):
        d = value[1, a, h] - value[1, b, h]
        left = (x[r, h] - d + mine) * speed[r]
        right = (x[o, h] + d + theirs) * speed[o]
        total += power(left * unit, floor) + power(right * unit, floor)
        most = max(left, right)
        for i in range(3):
            if top_of[h, i] != r and top_of[h, i] != o:
                most = max(most, top[h, i])
                break
        slow += most
    return total, slow / np.float32(H)


@compiled
def _exchange_of_means(s, q, r, a, o, b):  # type: ignore[no-untyped-def]
    """Lower bounds of what `_exchange` returns, from the mean of the scenarios: both are convex in them."""
    square, v, speed = s.square, s.v, s.speed
    risk, floor, unit = np.float32(q.risk), np.float32(q.floor), np.float32(q.unit)
    shift = square[1, a] - square[1, b]
    d = np.sqrt(square[1, a]) - np.sqrt(square[1, b])
    left = s.mean[r] + (risk * np.sqrt(max(v[r] - shift, np.float32(0.0))) - d) * speed[r]
    right = s.mean[o] + (risk * np.sqrt(max(v[o] + shift, np.float32(0.0))) + d) * speed[o]
    return np.float32(H) * (power(left * unit, floor) + power(right * unit, floor)), max(left, right)


@compiled
def _root(x):  # type: ignore[no-untyped-def]
    """x to the power 1 / POWER."""
    return np.sqrt(np.sqrt(np.sqrt(x)))


@compiled
def _partner(s, q, t, g, r, k, f, slow, near, budget, pick):  # type: ignore[no-untyped-def]
    """Best exchange of place (r, k). Writes it to pick as `apply` takes it; returns its gain, in scaled units of F."""
    table, usable, locked, on, node, count = s.table, s.usable, s.locked, s.on, s.node, s.count
    prior, pull, phi, first, rows = s.prior, t.pull, s.phi, t.first, t.ids.shape[0]
    none = count.shape[0] - 1
    size = phi.shape[0] * H
    a = np.int64(table[r, k])
    here = node[r]
    weight, price = g.weight * q.unit, q.price * q.unit
    whole = (f - q.floor) ** POWER * size
    best = LEAST_GAIN * f
    for o in range(table.shape[0]):
        there = node[o]
        mine = (pull[a, here] - pull[a, there]) / count[a]
        # Not even the partner that wants to come here most, with all its moves undone, would make it pay.
        if not near and weight * (mine + t.back[there, here]) + 2 * price <= best:
            continue
        if o == r or on[o, a]:
            continue
        for j in range(usable[o]):
            if locked[o, j]:
                continue
            b = np.int64(table[o, j])
            saved = mine
            if b < 0:
                b = none
            else:
                saved += (pull[b, there] - pull[b, here]) / count[b]
            moves = int(prior[r, a]) - int(prior[o, a])
            if b != none:
                moves += int(prior[o, b]) - int(prior[r, b])
            # Without a saving in nodes only relief of the slowest can pay: a lower F has room for that on `near` alone.
            if moves > budget or (not near and weight * saved - price * moves <= best):
                continue
            if b != none and on[r, b]:
                continue
            if saved > 0:
                # Its standard error is least when all tuples of the two gain alike.
                few = first[a + 1] - first[a] + first[b + 1] - first[b]
                saved -= g.sure * saved * np.sqrt(max(1.0 / max(few, 1) - 1.0 / rows, 0.0))
                if not near and weight * saved - price * moves <= best:
                    continue
            rest = whole - phi[r] - phi[o]
            most = f - q.floor - price * moves + weight * saved - best
            # Cheaply first: the scenarios can only add to what their mean does.
            total, then = _exchange_of_means(s, q, r, a, o, b)
            if (then > g.cap and then >= slow) or _root(max(rest + total, 0.0) / size) >= most:
                continue
            total, then = _exchange(s, q, t, r, a, o, b)
            gain = f - q.floor - price * moves - _root(max(rest + total, 0.0) / size)
            if (then > g.cap and then >= slow) or gain + weight * saved <= best:
                continue
            if there != here:
                mean, error = fewer(s, t, a, here, b, there)
                # A loss is as uncertain as a gain: it counts for more than its mean.
                gain += weight * (mean - g.sure * error)
            if gain <= best:
                continue
            if q.spread > 1 and not (spread_holds(s, q, a, r, o) and (b == none or spread_holds(s, q, b, o, r))):
                continue
            best = gain
            pick[0, 0], pick[0, 1], pick[0, 2], pick[0, 3] = r, k, a, b
            pick[1, 0], pick[1, 1], pick[1, 2], pick[1, 3] = o, j, b, a
            pick[2, 0] = moves
    return best if best > LEAST_GAIN * f else 0.0


@compiled
def _take(s, q, t, pick):  # type: ignore[no-untyped-def]
    """Make the exchange in `pick` and keep `part` and `pull` true."""
    ids, first, at = t.ids, t.first, t.at
    none = s.count.shape[0] - 1
    a, b = pick[0, 2], pick[0, 3]
    here, there = s.node[pick[0, 0]], s.node[pick[1, 0]]
    one = 1.0 / ids.shape[0]
    for stage in range(2):
        by = -one if stage == 0 else one
        if here != there:
            for side in range(2 if b != none else 1):
                e = a if side == 0 else b
                for p in range(first[e], first[e + 1]):
                    if side == 0 or not _holds(t, at[p], a):
                        _add_pull(t, at[p], here, by)
                        _add_pull(t, at[p], there, by)
        if stage == 0:
            apply(s, q, np.int64(2), pick)
            set_part(s, t, a)
            if b != none:
                set_part(s, t, b)


@compiled
def _by_worth(s, t):  # type: ignore[no-untyped-def]
    """Write to t.order the places whose copy could gain by another node, most first; returns how many."""
    table, usable, locked, node, count, pull, back = s.table, s.usable, s.locked, s.node, s.count, t.pull, t.back
    nodes = pull.shape[1]
    # An empty place comes for nothing; nothing at all is gained on one's own node.
    back[:] = 0.0
    for m in range(nodes):
        back[m, m] = -1.0
    places = table.shape[1]
    n = 0
    for r in range(table.shape[0]):
        for k in range(usable[r]):
            a = table[r, k]
            if a < 0 or locked[r, k]:
                continue
            here = node[r]
            least = 1.0
            for m in range(nodes):
                if m != here:
                    least = min(least, (pull[a, m] - pull[a, here]) / count[a])
                    back[here, m] = max(back[here, m], (pull[a, here] - pull[a, m]) / count[a])
            t.worth[n] = least
            t.order[n] = r * places + k
            n += 1
    # Sorted by hand (Shell's method): numpy's takes seconds to compile.
    gap = n // 2
    while gap > 0:
        for i in range(gap, n):
            w, o, j = t.worth[i], t.order[i], i
            while j >= gap and t.worth[j - gap] > w:
                t.worth[j], t.order[j] = t.worth[j - gap], t.order[j - gap]
                j -= gap
            t.worth[j], t.order[j] = w, o
        gap //= 2
    return n


@compiled
def lower(s, q, t, g, budget, steps, pick):  # type: ignore[no-untyped-def]
    """Take exchanges of at most `budget` moves in all while one lowers the objective, at most `steps`.

    Returns (exchanges taken, moves, 1 if no exchange is left to take).
    """
    table, usable, phi = s.table, s.usable, s.phi
    places = table.shape[1]
    taken = 0
    moved = 0
    f = objective(s, q)
    slow = slowest(s, q, t)
    for _ in range(PASSES):
        found = 0
        n = _by_worth(s, t)
        for i in range(n):
            r, k = t.order[i] // places, t.order[i] % places
            if k >= usable[r] or table[r, k] < 0:
                continue
            top = phi[r]
            for o in range(phi.shape[0]):
                top = max(top, phi[o])
            gain = _partner(s, q, t, g, r, k, f, slow, phi[r] == top, budget - moved, pick)
            if gain <= 0:
                continue
            _take(s, q, t, pick)
            f = objective(s, q)
            slow = slowest(s, q, t)
            moved += pick[2, 0]
            taken += 1
            found += 1
            if taken >= steps:
                return taken, moved, 0
        if found == 0:
            return taken, moved, 1
    return taken, moved, 0
