"""Two places a rank: copies that can be paired under a limit, and pairs under it with few changes from those there were.

Copies fit on R ranks of two places with none above a limit exactly when, sorted and filled up with zeros to 2 R, the
i-th smallest and the i-th largest sum to no more than it for every i.
"""

from __future__ import annotations

import numpy as np

from controller.solver.compiled.state import compiled

CANDIDATES, GIVERS = 12, 24
"""Experts that may take a copy, and experts that may give one, looked at for one exchange."""


@compiled
def _sorted_copies(w, copies, size, owner):  # type: ignore[no-untyped-def]
    """Write all copies to size, owner [2R], smallest first; zeros (owner -1) fill up the front."""
    places = size.shape[0]
    order = np.argsort(w / np.maximum(copies, 1))
    total = 0
    for e in range(w.shape[0]):
        total += copies[e]
    n = places - total
    size[:n] = 0.0
    owner[:n] = -1
    for i in range(order.shape[0]):
        e = order[i]
        for _ in range(copies[e]):
            size[n] = w[e] / copies[e]
            owner[n] = e
            n += 1


@compiled
def _overload(size, limit):  # type: ignore[no-untyped-def]
    """By how much pairs exceed the limit, in all."""
    last = size.shape[0] - 1
    total = 0.0
    for i in range(size.shape[0] // 2):
        over = size[i] + size[last - i] - limit
        if over > 0:
            total += over
    return total


@compiled
def _exchanged(size, w, copies, more, less, out):  # type: ignore[no-untyped-def]
    """Write to out the sorted sizes once `more` has a copy more and `less` one less (-1: it takes an empty place)."""
    drop_a, drop_b = w[more] / copies[more], w[less] / copies[less] if less >= 0 else -1.0
    na, nb = copies[more], copies[less] if less >= 0 else 0
    new_a, new_b = w[more] / (copies[more] + 1), w[less] / max(copies[less] - 1, 1) if less >= 0 else 0.0
    left_a, left_b = na + 1, nb - 1 if less >= 0 else 0
    zero = 1 if less < 0 else 0
    n = 0
    for i in range(size.shape[0]):
        v = size[i]
        if zero > 0 and v == 0.0:
            zero -= 1
            continue
        if na > 0 and v == drop_a:
            na -= 1
            continue
        if nb > 0 and v == drop_b:
            nb -= 1
            continue
        while left_a > 0 and new_a <= v:
            out[n] = new_a
            n += 1
            left_a -= 1
        while left_b > 0 and new_b <= v:
            out[n] = new_b
            n += 1
            left_b -= 1
        out[n] = v
        n += 1
    while left_a > 0 or left_b > 0:
        if left_b == 0 or (left_a > 0 and new_a <= new_b):
            out[n] = new_a
            left_a -= 1
        else:
            out[n] = new_b
            left_b -= 1
        n += 1


@compiled
def replicate(w, high, places, copies):  # type: ignore[no-untyped-def]
    """Give each place that is left to the expert with the largest copies."""
    total = 0
    for e in range(w.shape[0]):
        total += copies[e]
    while total < places:
        best = -1
        for e in range(w.shape[0]):
            if copies[e] < high[e] and (best < 0 or w[e] / copies[e] > w[best] / copies[best]):
                best = e
        if best < 0:
            return
        copies[best] += 1
        total += 1


@compiled
def _givers(w, low, copies, givers):  # type: ignore[no-untyped-def]
    """Experts that miss a copy least, whose others grow to the least size. Returns how many were written."""
    n, room = 0, givers.shape[0]
    for e in range(w.shape[0]):
        if copies[e] <= max(low[e], 1):
            continue
        size = w[e] / (copies[e] - 1)
        if n == room and size >= w[givers[n - 1]] / (copies[givers[n - 1]] - 1):
            continue
        i = min(n, room - 1)
        while i > 0 and size < w[givers[i - 1]] / (copies[givers[i - 1]] - 1):
            givers[i] = givers[i - 1]
            i -= 1
        givers[i] = e
        n = min(n + 1, room)
    return n


@compiled
def settle(w, low, high, limit, copies, places):  # type: ignore[no-untyped-def]
    """Change `copies [E]` one exchange at a time until they fit under `limit`; returns the overload that is left."""
    experts = w.shape[0]
    size, out = np.empty(places), np.empty(places)
    owner = np.empty(places, dtype=np.int64)
    picked = np.zeros(experts, dtype=np.bool_)
    givers = np.empty(GIVERS, dtype=np.int64)
    total = 0
    for e in range(experts):
        total += copies[e]
    _sorted_copies(w, copies, size, owner)
    left = _overload(size, limit)
    while left > 1e-9 * limit:
        best, more, less = left * (1 - 1e-6), -2, -2
        picked[:] = False
        taken = 0
        n = _givers(w, low, copies, givers)
        last = places - 1
        for i in range(places // 2):
            if size[i] + size[last - i] <= limit:
                continue
            for j in range(2):
                e = owner[last - i] if j == 0 else owner[i]
                if e < 0 or picked[e] or copies[e] >= high[e] or taken >= CANDIDATES:
                    continue
                picked[e] = True
                taken += 1
                for j_f in range(-1, n):
                    f = givers[j_f] if j_f >= 0 else -1
                    if (f < 0 and total >= places) or f == e:
                        continue
                    _exchanged(size, w, copies, e, f, out)
                    value = _overload(out, limit)
                    if value < best:
                        best, more, less = value, e, f
        if more == -2:
            return left
        copies[more] += 1
        total += 1
        if less >= 0:
            copies[less] -= 1
            total -= 1
        _sorted_copies(w, copies, size, owner)
        left = _overload(size, limit)
    return 0.0


@compiled
def _release(size, left, limit, table, load):  # type: ignore[no-untyped-def]
    """Take out of `table` copies beyond those wanted, and the smaller one of each pair above the limit.

    left [E]: copies that still want a place; load [R] of what stays. False where one copy alone exceeds the limit.
    """
    ranks = table.shape[0]
    for r in range(ranks):
        for k in range(2):
            if table[r, k] >= 0:
                left[table[r, k]] -= 1
    for e in range(left.shape[0]):
        while left[e] < 0:
            worst, place, most = -1, 0, -1.0
            for r in range(ranks):
                for k in range(2):
                    if table[r, k] == e:
                        other = size[table[r, 1 - k]] if table[r, 1 - k] >= 0 else 0.0
                        if other > most:
                            worst, place, most = r, k, other
            table[worst, place] = -1
            left[e] += 1
    for r in range(ranks):
        a, b = table[r, 0], table[r, 1]
        load[r] = (size[a] if a >= 0 else 0.0) + (size[b] if b >= 0 else 0.0)
        if load[r] > limit and a >= 0 and b >= 0:
            k = 0 if size[a] < size[b] else 1
            left[table[r, k]] += 1
            load[r] -= size[table[r, k]]
            table[r, k] = -1
        if load[r] > limit:
            return False
    return True


@compiled
def pair_up(usable, w, copies, limit, table, tight):  # type: ignore[no-untyped-def]
    """Change `table [R, 2]` so that its pairs are at most `limit` and each expert is there `copies [E]` times.

    Pairs that hold are kept; of the others the larger copy stays. What is left over goes, largest first, to the coolest
    rank that can take it (tight: to the fullest); where none can, a small partner makes room. True if all found a place.
    """
    ranks = table.shape[0]
    experts = w.shape[0]
    size = w / np.maximum(copies, 1)
    left = copies.copy()
    load = np.zeros(ranks)
    if not _release(size, left, limit, table, load):
        return False
    order = np.argsort(-size)
    for i in range(experts):
        e = order[i]
        while left[e] > 0:
            best = -1
            for r in range(ranks):
                if (
                    usable[r] == 2
                    and (table[r, 0] < 0 or table[r, 1] < 0)
                    and table[r, 0] != e
                    and table[r, 1] != e
                    and load[r] + size[e] <= limit
                    and (best < 0 or (load[r] > load[best]) == tight)
                ):
                    best = r
            if best >= 0:
                k = 0 if table[best, 0] < 0 else 1
            else:
                k = -1
                least = size[e]
                for r in range(ranks):
                    for j in range(2):
                        b, other = table[r, j], table[r, 1 - j]
                        if b < 0 or other < 0 or other == e or b == e or size[b] >= least:
                            continue
                        if size[other] + size[e] <= limit:
                            best, k, least = r, j, size[b]
                if best < 0:
                    return False
                left[table[best, k]] += 1
                load[best] -= size[table[best, k]]
            table[best, k] = e
            load[best] += size[e]
            left[e] -= 1
    return True
