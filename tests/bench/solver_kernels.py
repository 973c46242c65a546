"""The hot kernels as compiled and as vectorised numpy: same results, whose time is less. The numpy forms live here only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from controller.forecast import forecast
from controller.solver import Problem, solve
from controller.solver.compiled import moves, state
from controller.solver.problem import EMPTY, Floats, Ints
from controller.solver.search import Search, Tuning
from controller.solver.shares import SWEEPS, level
from tests.bench.solver_loads import FAMILIES, PARTS, SHAPES


def best_exchange(s: state.Layer, q: state.Rules, hot: int, partners: int) -> float:
    """Score of the best exchange of a place of `hot` with one of a cool rank: every pair at once, [places, ranks, places, H].

    Without bounds, pins, nodes that bind or empty places, which the compiled form handles as well.
    """
    ranks = s.cool[:partners][s.cool[:partners] != hot]
    a, b = s.table[hot], s.table[ranks]
    speed = s.speed * np.float32(q.unit)
    shift = s.square[1, a][:, None, None] - s.square[1, b]
    root = np.sqrt(s.square[1])
    fine = ~s.on[ranks][:, a].T[:, :, None] & ~s.on[hot][b]
    fine &= (shift > 0) | (speed[ranks][None, :, None] != speed[hot])
    fine &= (s.mean[ranks][:, None] + (root[a][:, None, None] - root[b]) * s.speed[ranks][:, None]) <= s.mean[hot]
    mine = np.float32(q.risk) * np.sqrt(np.maximum(s.v[hot] - shift, 0))
    theirs = np.float32(q.risk) * np.sqrt(np.maximum(s.v[ranks][:, None] + shift, 0))
    d = s.value[1, a][:, None, None, :] - s.value[1, b]
    floor = np.float32(q.floor)
    first = np.maximum((s.x[hot] - d + mine[..., None]) * speed[hot] - floor, 0)
    second = np.maximum((s.x[ranks][:, None] + d + theirs[..., None]) * speed[ranks][:, None, None] - floor, 0)
    total = (first**state.POWER).sum(axis=-1) + (second**state.POWER).sum(axis=-1)
    counted = s.prior[hot, a][:, None, None].astype(np.int64) - s.prior[ranks][:, a].T[:, :, None]
    counted = counted + np.take_along_axis(s.prior[ranks], b, axis=1).astype(np.int64) - s.prior[hot][b]
    near = np.where(s.node[ranks] == s.node[hot], np.float32(1.05), np.float32(1))[:, None]
    score = np.where(fine, (s.phi[hot] + s.phi[ranks][:, None] - total) * near / np.maximum(counted, 0.5), 0)
    return float(score.max(initial=0.0))


def exact_shares(placement: Ints, load: Floats, ranks: int) -> Floats:
    """[L, P] what `shares.level` gives, one expert of all layers at a time: its copies side by side, sorted by level, filled."""
    layers, slots = placement.shape
    row = np.arange(layers)[:, None]
    counts = np.stack([np.bincount(p[p != EMPTY], minlength=load.shape[1]) for p in placement])
    order = np.argsort(placement, axis=1, kind="stable")
    first = (placement == EMPTY).sum(axis=1)[:, None] + np.cumsum(counts, axis=1) - counts
    held = np.where(placement == EMPTY, 0, placement)
    shares = np.where(placement == EMPTY, 0.0, 1.0 / np.maximum(counts, 1)[row, held])
    x = (load[row, held] * shares).reshape(layers, ranks, -1).sum(axis=2)
    worst = x.max(axis=1)
    live = np.ones(layers, dtype=np.bool_)
    for _ in range(SWEEPS):
        moved = np.zeros(layers)
        for e in np.flatnonzero(((counts > 1) & (load > 0)).any(axis=0)):
            some = np.flatnonzero(live & (counts[:, e] > 1) & (load[:, e] > 0))
            if some.size:
                most = _pour(int(e), some, counts, order, first, load, shares, x, slots // ranks)
                moved[some] = np.maximum(moved[some], most)
        live &= moved >= 1e-7 * worst
        if not live.any():
            break
    return shares


def _pour(
    e: int, some: Ints, counts: Ints, order: Ints, first: Ints, load: Floats, shares: Floats, x: Floats, places: int
) -> Floats:
    """Fill expert e over its ranks in layers `some`; returns the largest change of a rank's load in each."""
    row, most = some[:, None], int(counts[some, e].max())
    there = np.arange(most) < counts[some, e][:, None]
    slot = order[row, np.minimum(first[some, e][:, None] + np.arange(most), order.shape[1] - 1)]
    rank, w = slot // places, load[some, e][:, None]
    old = np.where(there, shares[row, slot], 0.0)
    rest = x[row, rank] - w * old
    level_ = np.where(there, rest, np.inf)
    ranked = np.sort(level_, axis=1)
    height = (w + np.cumsum(np.where(np.isfinite(ranked), ranked, 0), axis=1)) / np.arange(1, most + 1)
    above = np.concatenate([ranked[:, 1:], np.full((len(some), 1), np.inf)], axis=1)
    stop = (height <= above).argmax(axis=1)
    part = np.where(there, np.maximum(0, np.take_along_axis(height, stop[:, None], axis=1) - rest) / w, 0.0)
    np.add.at(x, (np.broadcast_to(row, rank.shape)[there], rank[there]), (w * (part - old))[there])
    shares[np.broadcast_to(row, slot.shape)[there], slot[there]] = part[there]
    return np.asarray((np.abs(part - old) * w).max(axis=1))


def best_of(call: Callable[[], object], repeat: int = 5) -> float:
    """Least CPU seconds of a call."""
    out = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        out.append(time.process_time() - start)
    return min(out)


def compare_kernels(layers: int = 16) -> list[tuple[str, float, float, float]]:
    """(what, ms as compiled, ms as numpy, largest relative difference of the results) of each hot kernel."""
    shape = replace(SHAPES[0], layers=layers)
    loads = FAMILIES["zipf"](shape, 0, 3)
    placed = solve(Problem.of(loads[:PARTS], shape.ranks, shape.per_rank, nodes=shape.nodes, window=PARTS))
    after = np.asarray(loads[2 * PARTS :].sum(axis=0))
    speed = np.ones(shape.ranks)
    mine = level(placed.placement, after, speed)
    theirs = exact_shares(placed.placement, after, shape.ranks)
    out = [
        (
            f"exact shares, {layers} layers",
            1e3 * best_of(lambda: level(placed.placement, after, speed)),
            1e3 * best_of(lambda: exact_shares(placed.placement, after, shape.ranks), 2),
            float(np.abs(mine - theirs).max()),
        )
    ]
    return [*out, _exchanges(shape.ranks, shape.per_rank, shape.nodes, loads, placed.placement)]


def _exchanges(ranks: int, places: int, nodes: int, loads: Floats, placement: Ints) -> tuple[str, float, float, float]:
    problem = Problem.of(loads[: 2 * PARTS], ranks, places, nodes=nodes, window=PARTS).with_prior(placement)
    layers = problem.layers
    tuning = Tuning(1e-3, np.full(layers, 0.5), state.TOKENS, 0.0, np.zeros(layers), False)
    search = Search(problem, forecast(problem.load, problem.window), tuning)
    miss, ready, plain = 0.0, 0.0, 0.0
    for layer in range(layers):
        rules = search.begin(layer, placement[layer].reshape(ranks, places))
        hot = int(search.state.phi.argmax())
        partners = int(moves._coolest(search.state))
        pick: NDArray[np.int64] = search.state.pick

        def compiled(rules: state.Rules = rules, hot: int = hot, partners: int = partners) -> float:
            return float(moves._swaps(search.state, rules, np.int64(hot), np.int64(partners), 1 << 40, pick))  # noqa: B023

        def vectorised(rules: state.Rules = rules, hot: int = hot, partners: int = partners) -> float:
            return best_exchange(search.state, rules, hot, partners)

        first, second = compiled(), vectorised()
        miss = max(miss, abs(first - second) / max(first, 1e-9))
        ready += best_of(lambda: [compiled() for _ in range(20)], 3) / 20
        plain += best_of(vectorised, 3)
    return f"best exchange of the hottest rank, {layers} layers", 1e3 * ready, 1e3 * plain, miss
