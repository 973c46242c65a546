"""Drives the compiled search over all layers: builds their state, shares out the time, collects what was done."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controller.forecast import Forecast
from controller.solver import pairing
from controller.solver.compiled import fill, moves
from controller.solver.compiled import state as kernel
from controller.solver.measure import count_moves, even_shares, least_time, rank_loads
from controller.solver.problem import EMPTY, Bools, Floats, Ints, Problem

STEPS_A_TURN = 8
FREE = 1 << 40


@dataclass(frozen=True, slots=True)
class Tuning:
    """price of a move in units of max / mean; risk [L] factor on a rank's root of summed squares; cost kind and knee;
    floor [L] of the objective, as a part of the best any placement could do; sharp: the load is taken as known."""

    price: float
    risk: Floats
    kind: int
    knee: float
    floor: Floats
    sharp: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """A layer's table [R, K], its objective and moves, and the price of both together."""

    table: Ints
    objective: float
    moved: int
    price: float


class Search:
    """State of one solve. `tables [L, R, K]` is valid after every call, so time may end between any two."""

    def __init__(
        self, problem: Problem, seen: Forecast, tuning: Tuning, homes: Ints | None = None, most_used: Ints | None = None
    ) -> None:
        p = problem
        self.problem, self.tuning, self.homes = p, tuning, homes
        self.most_used = np.full(p.layers, p.slots) if most_used is None else most_used
        self.tables = np.full((p.layers, p.ranks, p.per_rank), EMPTY, dtype=np.int32)
        perfect = float(p.capacity[~p.drained].sum())
        self.lanes = np.zeros((p.layers, p.experts + 1, kernel.H), dtype=np.float32)
        self.lanes[:, :-1] = seen.scenarios * np.float32(perfect)
        self.mean = np.zeros((p.layers, p.experts + 1))
        self.mean[:, :-1] = seen.mean * perfect
        self.objective = np.zeros(p.layers)
        self.goal = least_time(p, self.mean[:, :-1], steps=8)
        self.moved = np.zeros(p.layers, dtype=np.int64)
        self.done = np.zeros(p.layers, dtype=np.bool_)
        self.state = _empty_state(p)
        self.pins: dict[int, list[tuple[int, int]]] = {}
        for layer, expert, rank in p.pinned.tolist():
            self.pins.setdefault(layer, []).append((expert, rank))
        self.prior_on = _prior_on(p)
        self.deadline: float | None = None

    def _load(self, layer: int, table: Ints) -> None:
        p, s = self.problem, self.state
        s.table[:] = table
        s.usable[:] = p.usable_of(layer)
        s.low[:-1] = p.min_replicas[layer]
        s.high[:-1] = p.max_replicas[layer]
        s.load[:] = self.lanes[layer]
        s.locked[:] = False
        for expert, rank in self.pins.get(layer, ()):
            s.locked[rank] |= s.table[rank] == expert
        if self.homes is not None:
            s.home[:-1] = self.homes[layer]
        s.prior[:] = True if self.prior_on is None else self.prior_on[layer]

    def _setup(self, layer: int, table: Ints) -> kernel.Rules:
        self._load(layer, table)
        rules = self._rules(layer)
        self.objective[layer] = float(kernel.setup(self.state, rules)) / rules.unit
        return rules

    def _rules(self, layer: int) -> kernel.Rules:
        t = self.tuning
        return kernel.Rules(
            kind=t.kind,
            knee=t.knee,
            risk=float(t.risk[layer]),
            # The scale is that of the best any placement could do: it stays while the placement changes, so that F falls
            # with every change and the search must end.
            unit=1.0 / max(float(self.goal[layer]), 1e-6),
            floor=float(t.floor[layer]),
            price=0.0 if self.problem.prior is None else t.price,
            spread=self.problem.spread,
            most_used=int(self.most_used[layer]),
        )

    def leave_from(self, problem: Problem, homes: Ints | None) -> None:
        """Count moves from another prior: the same problem but for that."""
        self.problem, self.homes, self.prior_on = problem, homes, _prior_on(problem)

    def start(self, tables: Ints) -> None:
        """Take `tables [L, R, K]` as they are, with a rough objective (no scenarios, no risk) until a layer's turn comes."""
        p = self.problem
        flat = tables.reshape(p.layers, p.slots)
        loads = rank_loads(self.mean[:, :-1], flat, even_shares(flat, p.experts), p.ranks)
        self.tables[:] = tables
        self.objective = np.asarray((loads / p.capacity).max(axis=1))
        self.moved[:] = count_moves(p.prior, flat, p.ranks, p.experts)

    def begin(self, layer: int, table: Ints) -> kernel.Rules:
        """Take `table [R, K]` as the layer's placement and measure it. Returns the rules that `state` was made for."""
        self.tables[layer] = table
        rules = self._setup(layer, table)
        self.moved[layer] = self.count_moves(layer, table)
        self.done[layer] = False
        return rules

    def count_moves(self, layer: int, table: Ints) -> int:
        """Experts on ranks that did not hold them in the prior."""
        if self.prior_on is None:
            return 0
        ranks = np.arange(self.problem.ranks)[:, None]
        return int(((table != EMPTY) & ~self.prior_on[layer][ranks, table]).sum())

    def late(self) -> bool:
        """Whether time is up."""
        return over(self.deadline)

    def keep(self, layer: int) -> Kept:
        """The layer as it is, to come back to."""
        state = self.tables[layer].copy(), float(self.objective[layer]), int(self.moved[layer])
        return Kept(*state, self.price_of(layer))

    def put_back(self, layer: int, kept: Kept) -> None:
        """The layer as it was kept."""
        self.tables[layer], self.objective[layer], self.moved[layer] = kept.table, kept.objective, kept.moved
        self.done[layer] = True

    def room(self, layer: int) -> int:
        """Most moves that a layer may take."""
        limit = self.problem.max_moves
        return FREE if limit is None or self.problem.prior is None else limit

    def turn(self, layer: int) -> None:
        """Up to STEPS_A_TURN more changes of one layer."""
        budget = self.room(layer) - int(self.moved[layer])
        rules = self._setup(layer, self.tables[layer])
        moved, objective, settled = moves.improve(self.state, rules, STEPS_A_TURN, budget)
        self.tables[layer] = self.state.table
        self.moved[layer] += moved
        self.objective[layer] = objective / rules.unit
        self.done[layer] = bool(settled)

    def settle(self, layer: int) -> None:
        """Turns of one layer until it has no change left."""
        while not self.done[layer] and not self.late():
            self.turn(layer)

    def run(self) -> None:
        """Turns for all layers, worst first, until none has a change left or time is up."""
        while not self.done.all():
            order = np.argsort(-self.objective, kind="stable")
            for layer in order[~self.done[order]].tolist():
                if self.late():
                    return
                self.turn(layer)

    def kick(self, layer: int, goal: float, rounds: int) -> None:
        """Leave local optima of a cold start: shift a few redundant copies at random, improve, keep what is better.

        Stops at `goal` (slowest rank in units of a perfect split). The seed is fixed, so the answer is repeatable.
        """
        rng = np.random.default_rng(layer)
        best, value = self.tables[layer].copy(), self.peak(layer)
        for _ in range(rounds):
            if value <= goal or self.late():
                break
            self.begin(layer, self._shaken(layer, best, rng))
            self.settle(layer)
            found = self.peak(layer)
            if found < value * (1 - 1e-9):
                best, value = self.tables[layer].copy(), found
        self.begin(layer, best)
        self.done[layer] = True

    def peak(self, layer: int) -> float:
        """Slowest rank under the forecast mean."""
        table, mean = self.tables[layer], self.mean[layer]
        counts = np.bincount(table[table != EMPTY], minlength=self.problem.experts + 1)
        tokens = np.where(table == EMPTY, 0.0, (mean / np.maximum(counts, 1))[table])
        return float((tokens.sum(axis=1) / self.problem.capacity).max())

    def _shaken(self, layer: int, table: Ints, rng: np.random.Generator) -> Ints:
        p, out = self.problem, table.copy()
        locked = {(rank, expert) for expert, rank in self.pins.get(layer, ())}
        for _ in range(int(rng.integers(1, 4))):
            counts = np.bincount(out[out != EMPTY], minlength=p.experts)
            spare = np.argwhere((out != EMPTY) & (counts > p.min_replicas[layer])[out])
            if not len(spare):
                break
            rank, place = spare[rng.integers(len(spare))].tolist()
            lacking = np.setdiff1d(np.flatnonzero(counts < p.max_replicas[layer]), out[rank])
            if self.homes is not None:
                lacking = lacking[self.homes[layer][lacking] == p.node_of_rank[rank]]
            if not lacking.size or (rank, int(out[rank, place])) in locked:
                continue
            hot = lacking[np.argsort(-self.mean[layer][lacking] / counts[lacking], kind="stable")]
            out[rank, place] = hot[min(int(rng.exponential(2.0)), len(hot) - 1)]
        return out

    def scratch(self, layer: int) -> Ints:
        """[R, K] a placement of the layer from nothing, for the forecast mean; pinned experts come first."""
        p, s = self.problem, self.state
        if self.tuning.sharp and pairing.paired(self, layer):
            pairs = pairing.scratch(self, layer)
            if pairs is not None:
                return pairs
        table = np.full((p.ranks, p.per_rank), EMPTY, dtype=np.int32)
        for expert, rank in self.pins.get(layer, ()):
            table[rank, int((table[rank] != EMPTY).sum())] = expert
        self._load(layer, table)
        room = np.zeros(p.nodes + 1, dtype=np.int64)
        np.add.at(room, p.node_of_rank, s.usable)
        room[-1] = s.usable.sum()
        fill.scratch(s, self._rules(layer), self.mean[layer], room)
        return np.array(s.table)

    def price_of(self, layer: int) -> float:
        """Objective plus price of the moves so far."""
        return float(self.objective[layer]) + self.tuning.price * float(self.moved[layer])


def over(deadline: float | None) -> bool:
    """Whether time is up; there is no end without a deadline."""
    return deadline is not None and time.perf_counter() >= deadline


def relabel(table: Ints, prior: Ints, node: Ints, usable: Ints, speed: Floats, locked: Bools, same_node: bool) -> Ints:
    """[R, K] the same groups of experts on ranks chosen so that few must move: greedy assignment by overlap.

    Only ranks of one size and speed (and node, if asked) change places, and none that holds a pinned expert.
    """
    ranks = len(table)
    alike: Bools = np.asarray(np.equal.outer(usable, usable) & np.equal.outer(speed, speed))
    fixed: Bools = np.asarray(locked.any(axis=1))
    if same_node:
        alike = alike & np.equal.outer(node, node)
    alike = alike & (~(fixed[:, None] | fixed[None, :]) | np.eye(ranks, dtype=np.bool_))
    sources, places, shared = _overlaps(table, prior)
    # Equal overlaps stay on their node if they can.
    worth = shared + 0.5 * (node[sources] == node[places])
    target = np.full(ranks, EMPTY, dtype=np.int64)
    taken = np.zeros(ranks, dtype=np.bool_)
    order = np.argsort(-worth, kind="stable")
    for source, place in zip(sources[order].tolist(), places[order].tolist(), strict=True):
        if alike[source, place] and target[source] == EMPTY and not taken[place]:
            target[source], taken[place] = place, True
    for source in np.flatnonzero(target == EMPTY).tolist():
        free = np.where(alike[source] & ~taken, 1.0 + (node == node[source]), 0.0)
        if not free.any():
            return np.asarray(table)
        target[source] = int(free.argmax())
        taken[target[source]] = True
    out: Ints = np.full(table.shape, EMPTY, dtype=np.int32)
    out[target] = table
    return out


def _overlaps(new: Ints, old: Ints) -> tuple[Ints, Ints, Floats]:
    """Pairs (rank of `new`, rank of `old`) that share an expert, and how many they share. Both [R, K]."""
    ranks, per_rank = new.shape
    rank = np.repeat(np.arange(ranks), per_rank)
    left, right = new.ravel(), old.ravel()
    by_expert = np.argsort(right, kind="stable")
    first = np.searchsorted(right[by_expert], left, side="left")
    count = np.where(left == EMPTY, 0, np.searchsorted(right[by_expert], left, side="right") - first)
    source = np.repeat(rank, count)
    offset = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    place = rank[by_expert[np.repeat(first, count) + offset]]
    pairs, shared = np.unique(source * ranks + place, return_counts=True)
    return pairs // ranks, pairs % ranks, shared.astype(np.float64)


def _prior_on(p: Problem) -> NDArray[np.bool_] | None:
    """[L, R, E + 1] what each rank holds in the prior; "no expert" is everywhere."""
    if p.prior is None:
        return None
    on: Bools = np.zeros((p.layers, p.ranks, p.experts + 1), dtype=np.bool_)
    layers = np.repeat(np.arange(p.layers), p.slots)
    ranks = np.tile(p.rank_of_slot(), p.layers)
    on[layers, ranks, p.prior.ravel()] = True
    on[:, :, -1] = True
    return on


def _empty_state(p: Problem) -> kernel.Layer:
    experts, ranks, places, h = p.experts, p.ranks, p.per_rank, kernel.H
    high = int(p.max_replicas.max()) + 1
    f32, i64 = np.float32, np.int64
    return kernel.Layer(
        table=np.full((ranks, places), EMPTY, dtype=np.int32),
        usable=np.zeros(ranks, dtype=i64),
        locked=np.zeros((ranks, places), dtype=np.bool_),
        home=np.full(experts + 1, -1, dtype=i64),
        node=p.node_of_rank.astype(i64),
        low=np.ones(experts + 1, dtype=i64),
        high=np.ones(experts + 1, dtype=i64),
        speed=(1.0 / p.capacity).astype(f32),
        load=np.zeros((experts + 1, h), dtype=f32),
        value=np.zeros((3, experts + 1, h), dtype=f32),
        square=np.zeros((3, experts + 1), dtype=f32),
        count=np.zeros(experts + 1, dtype=i64),
        where=np.zeros((experts + 1, high), dtype=i64),
        on=np.zeros((ranks, experts + 1), dtype=np.bool_),
        prior=np.zeros((ranks, experts + 1), dtype=np.bool_),
        x=np.zeros((ranks, h), dtype=f32),
        v=np.zeros(ranks, dtype=f32),
        phi=np.zeros(ranks, dtype=f32),
        mean=np.zeros(ranks, dtype=f32),
        involved=np.zeros(16, dtype=i64),
        change=np.zeros(16, dtype=i64),
        touched=np.zeros(4 * high + 8, dtype=i64),
        row=np.zeros(h, dtype=f32),
        cool=np.zeros(min(kernel.PARTNERS, ranks), dtype=i64),
        ends=np.zeros((kernel.REMOVABLE, 2), dtype=i64),
        cost=np.zeros(kernel.REMOVABLE, dtype=f32),
        peak=np.zeros(kernel.REMOVABLE, dtype=f32),
        plan=np.zeros((3, 4), dtype=i64),
        pick=np.zeros((3, 4), dtype=i64),
        tabu=np.zeros(ranks, dtype=np.bool_),
    )
