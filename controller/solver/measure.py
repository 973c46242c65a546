"""What a placement is worth: rank loads, balancedness, moves, the proved bound. Vectorised over layers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.solver.problem import EMPTY, Floats, Ints, Problem, ShareMode


def copies_of(placement: Ints, experts: int) -> Ints:
    """[L, E] replicas of each expert in `placement [L, P]`."""
    layers, slots = placement.shape
    rows = np.repeat(np.arange(layers), slots)
    flat = placement.ravel()
    used = flat != EMPTY
    counts = np.bincount(rows[used] * experts + flat[used], minlength=layers * experts)
    return counts.reshape(layers, experts).astype(np.int32)


def held(placement: Ints, ranks: int, experts: int) -> Ints:
    """[L, R, E] how many copies of an expert a rank holds (0 or 1 in a legal placement)."""
    layers, slots = placement.shape
    # One extra column takes the empty slots.
    where = np.repeat(np.arange(layers * ranks), slots // ranks) * (experts + 1) + placement.ravel()
    where[placement.ravel() == EMPTY] += experts + 1
    counts = np.bincount(where, minlength=layers * ranks * (experts + 1))
    return counts.reshape(layers, ranks, experts + 1)[:, :, :-1]


def even_shares(placement: Ints, experts: int) -> Floats:
    """[L, P] one over the number of copies; 0 on empty slots."""
    counts = copies_of(placement, experts)
    return np.where(placement == EMPTY, 0.0, 1.0 / np.maximum(_of_slot(counts, placement), 1))


def slot_loads(load: Floats, placement: Ints, shares: Floats) -> Floats:
    """[L, P] tokens that reach each slot when `load [L, E]` is split by `shares`."""
    return np.where(placement == EMPTY, 0.0, _of_slot(load, placement) * shares)


def _of_slot(values: NDArray[Any], placement: Ints) -> NDArray[Any]:
    """[L, P] `values [L, E]` of the expert in each slot; some expert's for an empty one."""
    rows = np.arange(len(values), dtype=np.int64)[:, None] * values.shape[1]
    return np.asarray(np.take(values, np.maximum(placement, 0) + rows))


def rank_loads(load: Floats, placement: Ints, shares: Floats, ranks: int) -> Floats:
    """[L, R] tokens a rank gets in each layer."""
    layers = placement.shape[0]
    return np.asarray(slot_loads(load, placement, shares).reshape(layers, ranks, -1).sum(axis=2))


def balance(loads: Floats, capacity: Floats, drained: np.ndarray) -> Floats:
    """[L] time of a perfect split over the time of the slowest rank; 1.0 is perfect, also for a layer without tokens.

    loads: [L, R] tokens; capacity: [R] relative speeds. With equal speeds this is mean / max over the ranks in use.
    """
    slowest = (loads / capacity).max(axis=1)
    perfect = loads.sum(axis=1) / capacity[~drained].sum()
    return np.where(slowest > 0, perfect / np.where(slowest > 0, slowest, 1.0), 1.0)


def count_moves(before: Ints | None, after: Ints, ranks: int, experts: int) -> Ints:
    """[L] experts that a rank holds after and did not hold before. Order inside a rank is free; a cold start moves none."""
    layers = after.shape[0]
    if before is None:
        return np.zeros(layers, dtype=np.int32)
    return np.asarray(came_to(before, after, ranks, experts).sum(axis=(1, 2), dtype=np.int32))


def came_to(before: Ints, after: Ints, ranks: int, experts: int) -> NDArray[np.bool_]:
    """[L, R, E] what a rank holds after and did not hold before."""
    return _holds(after, ranks, experts) & ~_holds(before, ranks, experts)


def _holds(placement: Ints, ranks: int, experts: int) -> NDArray[np.bool_]:
    layers, slots = placement.shape
    where = np.repeat(np.arange(layers * ranks, dtype=np.int64), slots // ranks) * experts
    flat = placement.ravel()
    out = np.zeros(layers * ranks * experts, dtype=np.bool_)
    out[where[flat != EMPTY] + flat[flat != EMPTY]] = True
    return out.reshape(layers, ranks, experts)


def twice(placement: Ints, ranks: int) -> NDArray[np.bool_]:
    """[L, R] ranks that hold some expert more than once."""
    rows = np.sort(placement.reshape(placement.shape[0], ranks, -1), axis=2)
    return np.asarray(((rows[:, :, 1:] == rows[:, :, :-1]) & (rows[:, :, 1:] != EMPTY)).any(axis=2))


def least_time(problem: Problem, load: Floats, steps: int = 24) -> Floats:
    """[L] proved lower bound of the slowest rank's time (tokens over speed), for even and for weighted shares.

    Two arguments. No placement beats a perfect split over all ranks in use. And the copies of one expert lie on
    different ranks, so with c copies the slowest of them takes at least load / (sum of the c highest speeds); copies
    are bounded by the slots in all and by max_replicas, and giving the next copy to the worst expert is optimal.
    steps: halvings of the bisection; fewer give a lower, still valid bound.
    """
    speeds = np.sort(problem.capacity[~problem.drained])[::-1]
    perfect = load.sum(axis=1) / speeds.sum()
    hosts = (problem.usable > 0).sum(axis=1)
    most = np.maximum(np.minimum(problem.max_replicas, hosts[:, None]), 1)
    spare = problem.usable.sum(axis=1) - problem.experts
    if problem.slot_budget is not None:
        spare = np.minimum(spare, problem.slot_budget)
    return np.asarray(np.maximum(perfect, _least_peak(load, spare, most, np.cumsum(speeds), steps)))


def _least_peak(load: Floats, spare: Ints, most: Ints, reach: Floats, steps: int) -> Floats:
    """[L] least max over experts of load / reach[copies - 1] with `spare [L]` copies beyond one each. By bisection."""
    low = (load / reach[most - 1]).max(axis=1)
    high = np.maximum(load.max(axis=1) / reach[0], low)
    even = bool(np.allclose(np.diff(reach), reach[0], rtol=1e-12))

    def fits(peak: Floats) -> NDArray[np.bool_]:
        # A hair of slack, so that rounding never makes the bound tighter than it is.
        wanted = load / np.where(peak > 0, peak, 1.0)[:, None] * (1 - 1e-12)
        need = np.ceil(wanted / reach[0]) if even else np.searchsorted(reach, wanted) + 1
        return np.asarray(np.maximum(np.minimum(need, most) - 1, 0).sum(axis=1) <= spare)

    high = np.where(fits(low), low, high)
    for _ in range(steps):
        middle = 0.5 * (low + high)
        ok = fits(middle)
        low, high = np.where(ok, low, middle), np.where(ok, middle, high)
    return np.asarray(np.minimum(low, high))


def bound(problem: Problem, load: Floats, slowest: Floats) -> Floats:
    """[L] the best balancedness that any placement could reach on `load`, proved; 1.0 where there are no tokens.

    slowest: [L] time of the slowest rank of a placement: nothing above it need be looked for.
    """
    least = least_time(problem, load)
    if problem.tight_bound and problem.shares is ShareMode.EQUAL:
        least = _tightened(problem, load, least, slowest)
    perfect = load.sum(axis=1) / problem.capacity[~problem.drained].sum()
    return np.where(least > 0, np.minimum(1.0, perfect / np.where(least > 0, least, 1.0)), 1.0)


def _tightened(problem: Problem, load: Floats, least: Floats, slowest: Floats) -> Floats:
    """[L] `least`, higher where ranks are pairs of one speed and more can be proved: copies split evenly have known sizes."""
    from controller.solver.proof import least_pairs

    out, speed = least.copy(), problem.capacity[~problem.drained]
    if speed.min() < speed.max():
        return out
    for layer in np.flatnonzero(np.isin(problem.usable, (0, 2)).all(axis=1)).tolist():
        ranks = int((problem.usable[layer] > 0).sum())
        most = np.minimum(problem.max_replicas[layer], ranks)
        limits = float(least[layer] * speed[0]), float(slowest[layer] * speed[0])
        out[layer] = least_pairs(load[layer], most, 2 * ranks, *limits) / speed[0]
    return out


def cross_node_share(problem: Problem, load: Floats, placement: Ints, shares: Floats) -> float:
    """Share of tokens that must leave their node when they start evenly on all ranks and stay local where shares allow."""
    total = float(load.sum())
    if total <= 0:
        return 0.0
    starts = np.bincount(problem.node_of_rank, minlength=problem.nodes) / problem.ranks
    node_of_slot = problem.node_of_rank[problem.rank_of_slot()]
    layers, slots = placement.shape
    rows = np.repeat(np.arange(layers), slots)
    used = placement.ravel() != EMPTY
    key = (rows * problem.experts + np.maximum(placement.ravel(), 0)) * problem.nodes + np.tile(node_of_slot, layers)
    size = layers * problem.experts * problem.nodes
    reach = np.bincount(key[used], weights=shares.ravel()[used], minlength=size).reshape(layers, problem.experts, -1)
    local = np.minimum(reach, starts).sum(axis=2)
    return float(1.0 - (local * load).sum() / total)
