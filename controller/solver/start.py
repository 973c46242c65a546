"""Placements that need no load: the linear start with redundant copies spread."""

from __future__ import annotations

import numpy as np

from controller.solver.problem import EMPTY, Ints, Problem


def linear_start(problem: Problem) -> Ints:
    """[L, P] experts in order over the usable slots, then copies of every expert in turn until the slots are full.

    Ranks take consecutive experts in proportion to their slots; copies go round the ranks, so no rank holds an expert
    twice and copy counts differ by at most one. Bounds on copies, pins and the rest are left to `repair`.
    """
    layers, ranks, places = problem.layers, problem.ranks, problem.per_rank
    table = np.full((layers, ranks, places), EMPTY, dtype=np.int32)
    done: dict[bytes, int] = {}
    for layer in range(layers):
        key = problem.usable[layer].tobytes()
        if key in done:
            table[layer] = table[done[key]]
            continue
        done[key] = layer
        _fill_layer(table[layer], problem.usable[layer], problem.experts)
    return table.reshape(layers, -1)


def _fill_layer(table: Ints, usable: Ints, experts: int) -> None:
    first = _even_sizes(usable, experts)
    rank_of = np.repeat(np.arange(len(usable)), first)
    begin = np.cumsum(first) - first
    for expert, rank in enumerate(rank_of.tolist()):
        table[rank, expert - begin[rank]] = expert
    used = first.copy()
    spare = int((usable - used).sum())
    copies = np.ones(experts, dtype=np.int64)
    # The widest choice first: a copy of each expert in turn on the rank with most room that lacks it.
    for number in range(spare):
        expert = number % experts
        holds = (table == expert).any(axis=1)
        room = np.where(holds, -1, usable - used)
        rank = int(room.argmax())
        if room[rank] <= 0:
            rank, expert = _other_pair(table, usable - used, copies)
            if rank < 0:
                return
        table[rank, used[rank]] = expert
        used[rank] += 1
        copies[expert] += 1


def _other_pair(table: Ints, room: Ints, copies: Ints) -> tuple[int, int]:
    """A rank with room and the least copied expert that it lacks, or (-1, -1)."""
    for rank in np.flatnonzero(room > 0).tolist():
        lacking = np.setdiff1d(np.arange(len(copies)), table[rank])
        if lacking.size:
            return rank, int(lacking[copies[lacking].argmin()])
    return -1, -1


def _even_sizes(usable: Ints, experts: int) -> Ints:
    """[R] how many of the first copies each rank takes: as even as the slots allow, in order."""
    sizes = np.zeros(len(usable), dtype=np.int64)
    left = experts
    while left > 0:
        open_ranks = np.flatnonzero(sizes < usable)
        share, rest = divmod(left, open_ranks.size)
        grow = np.full(open_ranks.size, share)
        grow[:rest] += 1
        grow = np.minimum(grow, usable[open_ranks] - sizes[open_ranks])
        sizes[open_ranks] += grow
        left -= int(grow.sum())
    return sizes
