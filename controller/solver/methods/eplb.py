"""`eplb`: the greedy of DeepSeek's expert-parallel load balancer (github.com/deepseek-ai/EPLB), written anew.

From scratch on the load window, blind to the present placement. Hierarchical when groups divide over nodes: groups are
packed onto nodes, hot experts replicated inside a node, copies packed onto its ranks. Global otherwise. Two additions
beyond the original: ranks may have different numbers of slots, and a second copy that the packing puts on one rank is
exchanged (the original leaves it there, where it costs a slot and gains nothing).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from controller.solver.answer import Answer
from controller.solver.problem import EMPTY, Floats, Ints, Problem, Strategy
from controller.solver.repair import keep_places, repair
from eplane.wording import counted


def pack(weights: Sequence[float], rooms: Sequence[int]) -> tuple[list[int], list[int]]:
    """Longest first onto the lightest pack with room. Returns (pack, place in its pack) of each item.

    Packs of one item each are filled in order, as in the original: there is nothing to balance.
    """
    if max(rooms) == 1 and sum(rooms) >= len(weights):
        return [pack for pack, room in enumerate(rooms) if room][: len(weights)], [0] * len(weights)
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    heap = [(0.0, pack) for pack, room in enumerate(rooms) if room > 0]
    taken = [0] * len(rooms)
    where, place = [EMPTY] * len(weights), [EMPTY] * len(weights)
    for item in order:
        if not heap:
            break
        total, target = heapq.heappop(heap)
        where[item], place[item] = target, taken[target]
        taken[target] += 1
        if taken[target] < rooms[target]:
            heapq.heappush(heap, (total + weights[item], target))
    return where, place


def replicate(weights: Sequence[float], slots: int) -> tuple[list[int], list[int]]:
    """Every next copy to the expert with the most tokens a copy. Returns (expert of each item, copies of each expert)."""
    expert_of = list(range(len(weights)))
    copies = [1] * len(weights)
    heap = [(-w, e) for e, w in enumerate(weights)]
    heapq.heapify(heap)
    for _ in range(slots - len(weights)):
        _, expert = heapq.heappop(heap)
        expert_of.append(expert)
        copies[expert] += 1
        heapq.heappush(heap, (-weights[expert] / copies[expert], expert))
    return expert_of, copies


def pack_apart(load: Floats, expert_of: Sequence[int], usable: Ints, table: Ints) -> None:
    """Longest first onto the lightest rank that has room and lacks the expert; writes `table [R, K]`.

    An item that no open rank lacks is left out, unless it is the expert's only one: those come last and always fit.
    """
    counts = np.bincount(np.asarray(expert_of, dtype=np.int64), minlength=len(load))
    each = load / np.maximum(counts, 1)
    order = np.argsort(-each[np.asarray(expert_of)], kind="stable")
    weight = np.where(usable > 0, 0.0, np.inf)
    used = np.zeros(len(usable), dtype=np.int64)
    on = np.zeros((len(usable), len(load)), dtype=np.bool_)
    for item in order.tolist():
        expert = expert_of[item]
        rank = int(np.where(on[:, expert], np.inf, weight).argmin())
        if on[rank, expert] or not np.isfinite(weight[rank]):
            continue
        table[rank, used[rank]] = expert
        on[rank, expert] = True
        used[rank] += 1
        weight[rank] = weight[rank] + each[expert] if used[rank] < usable[rank] else np.inf


def place_layer(load: Floats, ranks: Sequence[int], usable: Ints, table: Ints, experts: Sequence[int]) -> None:
    """Replicate `experts` into the slots of `ranks` and write them to `table [R, K]`."""
    rooms = [int(usable[r]) for r in ranks]
    weights = [float(load[e]) for e in experts]
    expert_of, copies = replicate(weights, min(sum(rooms), len(experts) * len(ranks)))
    where, place = pack([weights[e] / copies[e] for e in expert_of], rooms)
    for item, expert in enumerate(expert_of):
        table[ranks[where[item]], place[item]] = experts[expert]


def node_experts(problem: Problem, load: Floats) -> list[list[int]]:
    """Experts of each node when the groups are packed evenly onto the nodes, in the order of the original."""
    size = problem.experts // problem.groups
    weights = load.reshape(problem.groups, size).sum(axis=1).tolist()
    where, place = pack(weights, [problem.groups // problem.nodes] * problem.nodes)
    seats: list[list[int]] = [[] for _ in range(problem.nodes)]
    for group in sorted(range(problem.groups), key=lambda g: place[g]):
        seats[where[group]].extend(range(group * size, (group + 1) * size))
    return seats


def hierarchical_fits(problem: Problem) -> bool:
    """Groups divide over the nodes, and each node has a slot for every expert of its share of the groups."""
    if problem.groups % problem.nodes or problem.nodes == 1:
        return False
    room = np.stack([problem.usable[:, problem.node_of_rank == n].sum(axis=1) for n in range(problem.nodes)], axis=1)
    return bool((room >= problem.experts // problem.nodes).all())


def eplb_placement(problem: Problem, load: Floats, hierarchical: bool) -> Ints:
    """[L, P] the greedy's placement for `load [L, E]`; second copies on one rank are left in."""
    table = np.full((problem.layers, problem.ranks, problem.per_rank), EMPTY, dtype=np.int32)
    ranks_of_node = [np.flatnonzero(problem.node_of_rank == n).tolist() for n in range(problem.nodes)]
    for layer in range(problem.layers):
        usable = problem.usable[layer]
        if not hierarchical:
            everything = range(problem.experts)
            place_layer(load[layer], range(problem.ranks), usable, table[layer], everything)
            continue
        for ranks, experts in zip(ranks_of_node, node_experts(problem, load[layer]), strict=True):
            place_layer(load[layer], ranks, usable, table[layer], experts)
    return table.reshape(problem.layers, problem.slots)


def separate(problem: Problem, placement: Ints, load: Floats, same_node: bool) -> Ints:
    """[L, P] the placement with second copies on a rank exchanged for items of nearly the same load elsewhere."""
    table = placement.reshape(problem.layers, problem.ranks, problem.per_rank).copy()
    for layer in range(problem.layers):
        rows = table[layer]
        ordered = np.sort(rows, axis=1)
        for rank in np.flatnonzero(
            ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != EMPTY)).any(axis=1)
        ).tolist():
            for place in range(problem.per_rank):
                if rows[rank, place] != EMPTY and rows[rank, place] in rows[rank, :place]:
                    _exchange(problem, rows, load[layer], rank, place, same_node)
    return table.reshape(placement.shape)


def _exchange(problem: Problem, rows: Ints, load: Floats, rank: int, place: int, same_node: bool) -> None:
    expert = int(rows[rank, place])
    counts = np.bincount(rows[rows != EMPTY], minlength=problem.experts)
    weight = np.where(rows == EMPTY, np.inf, load[rows] / np.maximum(counts[rows], 1))
    open_ranks = ~(rows == expert).any(axis=1)
    if same_node:
        open_ranks &= problem.node_of_rank == problem.node_of_rank[rank]
    fits = open_ranks[:, None] & ~np.isin(rows, rows[rank]) & (rows != EMPTY)
    if fits.any():
        miss = np.where(fits, np.abs(weight - load[expert] / counts[expert]), np.inf)
        other, there = np.unravel_index(int(miss.argmin()), miss.shape)
        rows[rank, place], rows[other, there] = rows[other, there], expert


class EplbPolicy:
    """DeepSeek's greedy on the last load window."""

    name = "eplb"

    def solve(self, problem: Problem) -> Answer:
        fits = hierarchical_fits(problem)
        hierarchical = fits and problem.strategy is not Strategy.GLOBAL
        load = problem.observed()
        greedy = eplb_placement(problem, load, hierarchical)
        apart = separate(problem, greedy, load, hierarchical)
        placement = fill_gaps(problem, repair(problem, apart, load), load)
        if problem.fixed_slots:
            placement = keep_places(problem, placement)
        changed = int((placement != greedy).any(axis=1).sum())
        strategy = "hierarchical" if hierarchical else "global"
        decisions = [f"{strategy} greedy from scratch on the load window"]
        if changed:
            decisions.append(
                f"{counted(changed, 'layer')} changed after it to meet the hard goals (one copy of an expert a rank)"
            )
        return Answer.of(problem, placement, policy=self.name, strategy=strategy, decisions=decisions)


def fill_gaps(problem: Problem, placement: Ints, load: Floats) -> Ints:
    """Give slots that lost a second copy to the expert with most tokens a copy that the rank lacks."""
    if problem.slot_budget is not None or problem.spread > 1 or problem.strategy is Strategy.HIERARCHICAL:
        return placement
    table = placement.reshape(problem.layers, problem.ranks, problem.per_rank).copy()
    gaps = (table == EMPTY) & problem.usable_slots().reshape(table.shape)
    for layer, rank, place in np.argwhere(gaps).tolist():
        row = table[layer]
        counts = np.bincount(row[row != EMPTY], minlength=problem.experts)
        gain = load[layer] / np.maximum(counts, 1)
        gain[row[rank][row[rank] != EMPTY]] = -1.0
        gain[counts >= problem.max_replicas[layer]] = -1.0
        best = int(gain.argmax())
        if gain[best] >= 0:
            row[rank, place] = best
    return table.reshape(placement.shape)
