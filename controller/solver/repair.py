"""Make any placement meet the hard goals with few changes.

Policies that were published without pins, drained ranks, bounds on copies or failure domains stay comparable this way,
and a search can start from a placement that today's goals no longer allow. A layer that already meets them is untouched.
Missing copies are placed along augmenting paths (an expert takes a place, its occupant moves on), so a place is found
whenever moving other experts can make one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from controller.solver.grouping import home_nodes
from controller.solver.measure import copies_of, held, twice
from controller.solver.problem import EMPTY, Bools, Floats, Ints, Problem, Strategy
from eplane.errors import Infeasible


def repair(problem: Problem, placement: Ints, load: Floats | None = None) -> Ints:
    """[L, P] the nearest legal placement found. `load [L, E]` breaks ties. Raises Infeasible."""
    if load is None:
        load = problem.observed()
    out = placement.reshape(problem.layers, problem.ranks, problem.per_rank).copy()
    homes = home_nodes(problem, placement, load) if problem.strategy is Strategy.HIERARCHICAL else None
    for layer in np.flatnonzero(_broken(problem, out, homes)).tolist():
        _Layer(problem, layer, out[layer], load[layer], None if homes is None else homes[layer]).mend()
    table = out.reshape(problem.layers, problem.slots)
    if problem.slot_budget is not None:
        _keep_budget(problem, table, load)
    return keep_places(problem, table) if problem.fixed_slots else table


def _broken(problem: Problem, tables: Ints, homes: Ints | None) -> Bools:
    """[L] layers that break a goal, the slot budget aside. tables [L, R, K]."""
    flat = tables.reshape(problem.layers, problem.slots)
    counts = copies_of(flat, problem.experts)
    bad = ((flat != EMPTY) & ~problem.usable_slots()).any(axis=1)
    bad |= twice(flat, problem.ranks).any(axis=1)
    bad |= ((counts < problem.min_replicas) | (counts > problem.max_replicas)).any(axis=1)
    if problem.pinned.size:
        layers, experts, ranks = problem.pinned.T
        bad[layers[(tables[layers, ranks] != experts[:, None]).all(axis=1)]] = True
    if problem.spread > 1:
        on_rank = held(flat, problem.ranks, problem.experts)
        nodes = sum((on_rank[:, problem.node_of_rank == n].any(axis=1)).astype(np.int32) for n in range(problem.nodes))
        bad |= (nodes < np.minimum(problem.spread, counts)).any(axis=1)
    if homes is not None:
        node = problem.node_of_rank[problem.rank_of_slot()]
        rows = np.arange(problem.layers)[:, None]
        bad |= ((flat != EMPTY) & (homes[rows, np.maximum(flat, 0)] != node)).any(axis=1)
    return np.asarray(bad)


def keep_places(problem: Problem, placement: Ints) -> Ints:
    """The same experts on the same ranks; those that stay keep the place they have in the prior."""
    if problem.prior is None:
        return placement
    shape = (problem.layers, problem.ranks, problem.per_rank)
    after, before = placement.reshape(shape), problem.prior.reshape(shape)
    usable = problem.usable
    out = np.full(shape, EMPTY, dtype=np.int32)
    for layer, rank in np.argwhere((after != before).any(axis=2)).tolist():
        count = int(usable[layer, rank])
        new = [e for e in after[layer, rank].tolist() if e != EMPTY]
        row = [e if e in new and place < count else EMPTY for place, e in enumerate(before[layer, rank].tolist())]
        for place, expert in enumerate(row):
            if expert != EMPTY and expert in row[:place]:
                row[place] = EMPTY
        fresh = iter([e for e in new if e not in row])
        out[layer, rank] = [e if e != EMPTY or place >= count else next(fresh, EMPTY) for place, e in enumerate(row)]
    same = (after == before).all(axis=2)
    out[same] = after[same]
    return out.reshape(placement.shape)


def _keep_budget(problem: Problem, table: Ints, load: Floats) -> None:
    """Drop the redundant copies that matter least until the budget over all layers holds."""
    pins = {(layer, expert, rank) for layer, expert, rank in problem.pinned.tolist()}
    counts = np.stack([np.bincount(row[row != EMPTY], minlength=problem.experts) for row in table])
    over = int((counts - 1).sum()) - int(problem.slot_budget or 0)
    while over > 0:
        # The peak that is left when one copy goes, least first.
        rest = np.where(counts > problem.min_replicas, load / np.maximum(counts - 1, 1), np.inf)
        for flat in np.argsort(rest, axis=None, kind="stable").tolist():
            layer, expert = divmod(flat, problem.experts)
            if not np.isfinite(rest[layer, expert]):
                raise Infeasible("slot_budget", "pins and min_replicas need more redundant slots")
            places = [
                s
                for s in np.flatnonzero(table[layer] == expert).tolist()
                if (layer, expert, s // problem.per_rank) not in pins
                and _spread_holds(problem, table[layer], expert, s)
            ]
            if places:
                table[layer, places[-1]] = EMPTY
                counts[layer, expert] -= 1
                over -= 1
                break
        else:
            raise Infeasible("slot_budget", "pins and min_replicas need more redundant slots")


def _spread_holds(problem: Problem, row: Ints, expert: int, without: int) -> bool:
    slots = [s for s in np.flatnonzero(row == expert).tolist() if s != without]
    nodes = {int(problem.node_of_rank[s // problem.per_rank]) for s in slots}
    return len(nodes) >= min(problem.spread, len(slots))


@dataclass(slots=True)
class _Layer:
    """One layer's table `[R, K]`, changed in place."""

    problem: Problem
    layer: int
    table: Ints
    load: Floats
    home: Ints | None

    def mend(self) -> None:
        p = self.problem
        self._strike()
        for layer, expert, rank in p.pinned.tolist():
            if layer == self.layer and expert not in self.table[rank]:
                self._pin(expert, rank)
        self._trim()
        if p.spread > 1:
            # Copies that may not stay where they are must not hold places that the last copy of another needs.
            for expert in range(p.experts):
                self._thin(expert)
        for expert in np.argsort(-self.load, kind="stable").tolist():
            while self._copies(expert) < p.min_replicas[self.layer, expert]:
                if not self._place(expert):
                    raise Infeasible(
                        "min_replicas", f"layer {self.layer}: no rank is left for a copy of expert {expert}"
                    )
        if p.spread > 1:
            for expert in range(p.experts):
                self._spread(expert)

    def _keeps_spread(self, expert: int, leave: int | None, enter: int | None) -> bool:
        """Would its copies still lie on enough nodes, if rank `leave` dropped one and `enter` took one?"""
        if self.problem.spread <= 1:
            return True
        ranks = [r for r in np.flatnonzero((self.table == expert).any(axis=1)).tolist() if r != leave]
        if enter is not None:
            ranks.append(enter)
        nodes = {int(self.problem.node_of_rank[r]) for r in ranks}
        return len(nodes) >= min(self.problem.spread, len(ranks))

    def _strike(self) -> None:
        """Remove what no rank may hold: unusable slots, second copies on a rank, experts away from home."""
        p = self.problem
        usable = p.usable[self.layer]
        self.table[np.arange(p.per_rank)[None, :] >= usable[:, None]] = EMPTY
        for rank in range(p.ranks):
            seen: set[int] = set()
            for place, expert in enumerate(self.table[rank].tolist()):
                if expert == EMPTY:
                    continue
                away = self.home is not None and self.home[expert] != p.node_of_rank[rank]
                if expert in seen or away:
                    self.table[rank, place] = EMPTY
                seen.add(expert)

    def _copies(self, expert: int) -> int:
        return int((self.table == expert).sum())

    def _pins(self) -> set[tuple[int, int]]:
        return {(e, r) for layer, e, r in self.problem.pinned.tolist() if layer == self.layer}

    def _pin(self, expert: int, rank: int) -> None:
        usable = int(self.problem.usable[self.layer, rank])
        row = self.table[rank, :usable]
        if self.home is not None and self.home[expert] != self.problem.node_of_rank[rank]:
            raise Infeasible("pinned", f"layer {self.layer}: expert {expert} belongs to another node than rank {rank}")
        free = np.flatnonzero(row == EMPTY)
        if free.size:
            row[free[0]] = expert
            return
        pins = self._pins()
        movable = [place for place in range(usable) if (int(row[place]), rank) not in pins]
        # The occupant with most copies gives way; if it was the last copy, it is placed again below.
        place = max(movable, key=lambda k: (self._copies(int(row[k])), -self.load[row[k]]))
        row[place] = expert

    def _trim(self) -> None:
        """Drop copies beyond max_replicas, from the fullest ranks first."""
        pins = self._pins()
        for expert in range(self.problem.experts):
            extra = self._copies(expert) - int(self.problem.max_replicas[self.layer, expert])
            if extra <= 0:
                continue
            places = [(r, k) for r, k in np.argwhere(self.table == expert).tolist() if (expert, r) not in pins]
            for rank, place in sorted(places, key=lambda rk: -int((self.table[rk[0]] != EMPTY).sum()))[:extra]:
                self.table[rank, place] = EMPTY

    def _allowed(self, expert: int, rank: int) -> bool:
        if self.problem.usable[self.layer, rank] == 0 or expert in self.table[rank]:
            return False
        return self.home is None or bool(self.home[expert] == self.problem.node_of_rank[rank])

    def _place(self, expert: int, nodes: set[int] | None = None) -> bool:
        """Put one more copy of `expert` somewhere (on `nodes`, if given), moving others along a shortest path."""
        p = self.problem
        pins = self._pins()
        wanted = self._new_nodes(expert) if nodes is None else nodes
        came: dict[tuple[int, int], tuple[int, int] | None] = {}
        queue: deque[tuple[int, tuple[int, int] | None]] = deque([(expert, None)])
        passed = {expert}
        while queue:
            guest, origin = queue.popleft()
            ranks = sorted(
                (r for r in range(p.ranks) if self._allowed(guest, r)),
                key=lambda r: (p.node_of_rank[r] not in wanted, self._weight(r), r),
            )
            if origin is None and nodes is not None:
                ranks = [r for r in ranks if int(p.node_of_rank[r]) in nodes]
            if origin is not None:
                ranks = [r for r in ranks if self._keeps_spread(guest, origin[0], r)]
            for rank in ranks:
                end = self._vacant(rank, pins, expert)
                if end is not None:
                    came[(rank, end)] = origin
                    self._shift((rank, end), came, expert)
                    return True
            for rank in ranks:
                for place in range(int(p.usable[self.layer, rank])):
                    sitting = int(self.table[rank, place])
                    if sitting not in passed and (sitting, rank) not in pins:
                        passed.add(sitting)
                        came[(rank, place)] = origin
                        queue.append((sitting, (rank, place)))
        return False

    def _new_nodes(self, expert: int) -> set[int]:
        ranks = np.flatnonzero((self.table == expert).any(axis=1))
        return set(range(self.problem.nodes)) - {int(n) for n in self.problem.node_of_rank[ranks]}

    def _weight(self, rank: int) -> float:
        row = self.table[rank]
        counts = [max(self._copies(int(e)), 1) for e in row[row != EMPTY]]
        return float((self.load[row[row != EMPTY]] / np.asarray(counts or [1])[: (row != EMPTY).sum()]).sum())

    def _vacant(self, rank: int, pins: set[tuple[int, int]], guest: int) -> int | None:
        """An empty place, else the place of a copy that may be dropped."""
        usable = int(self.problem.usable[self.layer, rank])
        row: list[int] = self.table[rank, :usable].tolist()
        if EMPTY in row:
            return row.index(EMPTY)
        spare = [
            place
            for place, e in enumerate(row)
            if (e, rank) not in pins
            and e != guest
            and self._copies(e) > self.problem.min_replicas[self.layer, e]
            and self._keeps_spread(e, rank, None)
        ]
        if not spare:
            return None
        return min(spare, key=lambda k: float(self.load[row[k]]) / max(self._copies(row[k]) - 1, 1))

    def _shift(self, end: tuple[int, int], came: dict[tuple[int, int], tuple[int, int] | None], expert: int) -> None:
        """Walk the path back: each place takes the occupant of the one before it, the first takes `expert`."""
        place: tuple[int, int] = end
        while True:
            before = came[place]
            if before is None:
                self.table[place] = expert
                return
            self.table[place] = self.table[before]
            place = before

    def _thin(self, expert: int) -> None:
        """Drop copies that share a node while there are more than needed and they lie on too few nodes."""
        while self._copies(expert) > self.problem.min_replicas[self.layer, expert] and self._drop_shared(expert):
            pass

    def _drop_shared(self, expert: int) -> bool:
        """Drop one copy that shares its node, if the copies lie on too few nodes. False if they do not, or none may go."""
        p, pins = self.problem, self._pins()
        ranks = np.flatnonzero((self.table == expert).any(axis=1))
        nodes = p.node_of_rank[ranks]
        if np.unique(nodes).size >= min(p.spread, ranks.size):
            return False
        shared = [r for r in ranks.tolist() if (nodes == p.node_of_rank[r]).sum() > 1 and (expert, r) not in pins]
        if not shared:
            return False
        row = self.table[shared[-1]]
        row[int(np.flatnonzero(row == expert)[0])] = EMPTY
        return True

    def _spread(self, expert: int) -> None:
        p = self.problem
        while not self._keeps_spread(expert, None, None):
            if not self._drop_shared(expert):
                raise Infeasible(
                    "spread", f"layer {self.layer}: the copies of expert {expert} are pinned to too few nodes"
                )
            if self._copies(expert) >= p.min_replicas[self.layer, expert]:
                continue
            if not self._place(expert, self._new_nodes(expert)):
                raise Infeasible("spread", f"layer {self.layer}: no other node has room for a copy of expert {expert}")
