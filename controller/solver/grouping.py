"""Which node each expert group lives on, when groups may not leave their node."""

from __future__ import annotations

import numpy as np

from controller.solver.problem import EMPTY, Floats, Ints, Problem
from eplane.errors import Infeasible


def home_nodes(problem: Problem, placement: Ints | None, load: Floats) -> Ints:
    """[L, E] node of each expert, the same for a group. Groups stay where `placement [L, P]` has most of them.

    A new group goes to the node with the least load for its slots that has room for every expert of the group; groups
    are taken by falling load (longest processing time first), with as many groups a node as its slots allow.
    """
    size = problem.experts // problem.groups
    nodes = problem.nodes
    node_of_slot = problem.node_of_rank[problem.rank_of_slot()]
    out = np.zeros((problem.layers, problem.experts), dtype=np.int32)
    for layer in range(problem.layers):
        room = np.bincount(problem.node_of_rank, weights=problem.usable[layer], minlength=nodes).astype(np.int64)
        home = np.full(problem.groups, -1, dtype=np.int64)
        need = problem.min_replicas[layer].reshape(problem.groups, size).sum(axis=1)
        weight = load[layer].reshape(problem.groups, size).sum(axis=1)
        votes = np.zeros((problem.groups, nodes), dtype=np.int64)
        if placement is not None:
            used = placement[layer] != EMPTY
            np.add.at(votes, (placement[layer][used] // size, node_of_slot[used]), 1)
        _pinned_homes(problem, layer, size, home, room, need)
        _seat(home, room, need, weight, votes)
        out[layer] = np.repeat(home, size)
    return out


def _pinned_homes(problem: Problem, layer: int, size: int, home: Ints, room: Ints, need: Ints) -> None:
    for at, expert, rank in problem.pinned.tolist():
        group, node = expert // size, int(problem.node_of_rank[rank])
        if at != layer:
            continue
        if home[group] not in (-1, node):
            raise Infeasible("pinned", f"layer {layer}: group {group} is pinned to two nodes")
        if home[group] == -1:
            home[group] = node
            room[node] -= need[group]


def _seat(home: Ints, room: Ints, need: Ints, weight: Floats, votes: Ints) -> None:
    """Seat the groups that have no home yet. Raises Infeasible when no seating is found."""
    spread = np.zeros(len(room))
    count = np.zeros(len(room), dtype=np.int64)
    even = -(-len(home) // len(room))
    for group in np.flatnonzero(home >= 0).tolist():
        spread[home[group]] += weight[group]
        count[home[group]] += 1
    open_groups = [g for g in np.argsort(-weight, kind="stable").tolist() if home[g] < 0]
    settled = [g for g in open_groups if votes[g].any()]
    for group in settled + [g for g in open_groups if not votes[g].any()]:
        fits = np.flatnonzero(room >= need[group])
        if not fits.size:
            raise Infeasible("groups", f"no node has room for the {int(need[group])} experts of group {group}")
        best = min(fits.tolist(), key=lambda n: (-votes[group, n], count[n] >= even, spread[n], n))
        home[group] = best
        room[best] -= need[group]
        spread[best] += weight[group]
        count[best] += 1
