"""The placement problem as data: what is known, what must hold, what it is worth.

Shapes: W history entries (oldest first), L layers, E logical experts a layer, R ranks, K slots a rank (the largest over
all ranks and layers), P = R * K. Slot `s` is place `s % K` of rank `s // K`; -1 in a placement is an empty slot or one
that the rank does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplane.errors import Infeasible, ProblemError
from eplane.wording import counted

EMPTY = -1
Ints = NDArray[np.signedinteger[Any]]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class ShareMode(StrEnum):
    """How tokens of a replicated expert are split over its replicas."""

    EQUAL = "equal"
    WEIGHTED = "weighted"


class Strategy(StrEnum):
    """`hierarchical`: every expert group stays on one node. `global`: groups do not bind. `auto`: the policy chooses."""

    AUTO = "auto"
    GLOBAL = "global"
    HIERARCHICAL = "hierarchical"


class RankCost(StrEnum):
    """What makes a rank slow: its tokens, its activated experts (memory-bound decode), or the cost model's seconds."""

    TOKENS = "tokens"
    ACTIVATED = "activated"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class Problem:
    """One placement problem. Build it with `Problem.of(...)` (arrays) or `Problem.from_dict(...)` (JSON).

    load            [W, L, E] tokens routed to each logical expert, oldest first
    window          how many of the newest entries make the load window (and the horizon of a forecast)
    slots_per_rank  [L, R] usable slots; 0 for a rank that may hold nothing
    node_of_rank    [R] node of each rank, 0..nodes-1
    groups          experts are split evenly into groups, in order
    prior           [L, P] present placement, or None for a cold start
    capacity        [R] relative speed, 1.0 normal
    pinned          [n, 3] rows (layer, expert, rank): that rank must hold that expert
    drained         [R] True: the rank holds nothing
    min_replicas, max_replicas  [L, E] bounds on copies
    spread          the copies of an expert lie on at least min(spread, copies) nodes
    slot_budget     most redundant slots over all layers together, or None
    fixed_slots     an expert that stays on a rank must keep its place in the table
    move_weight     price of one move, in units of max/mean rank load of one layer; None: derived or the default
    max_moves       most moves a layer, or None
    budget_ms       time for the solve, or None
    step_tokens     tokens (routed copies) a step and layer: scales the load for the cost model; None: unknown
    horizon_steps   steps until the next decision, over which a move must pay for itself
    bundle_bytes    bytes of one expert's bundle
    forecast        False: take the load window as it is, look neither ahead nor back
    tight_bound     True: prove as much as can be where ranks are pairs (about 40 ms a layer)
    min_tokens      a layer with fewer in the window stays as it is
    min_improvement a layer moves only when its predicted slowest rank gains this part
    routing_sample  for each layer [n, K] experts that single tokens of the load window went to, -1 pads; None: no sample
    cross_node_weight  price of one more node touched by each token, in units of max/mean rank load of one layer; None:
                    derived or the default, 0: nodes touched do not count
    node_slack      part by which the predicted slowest rank may be slower for fewer nodes touched
    """

    load: Floats
    ranks: int
    slots_per_rank: Ints
    node_of_rank: Ints
    window: int
    groups: int
    prior: Ints | None
    capacity: Floats
    pinned: Ints
    drained: Bools
    min_replicas: Ints
    max_replicas: Ints
    spread: int
    shares: ShareMode
    slot_budget: int | None
    fixed_slots: bool
    policy: str
    strategy: Strategy
    move_weight: float | None
    max_moves: int | None
    budget_ms: float | None
    hardware: str | None
    rank_cost: RankCost
    step_tokens: float | None
    horizon_steps: int
    bundle_bytes: int
    forecast: bool
    tight_bound: bool
    min_tokens: float
    min_improvement: float
    routing_sample: tuple[Ints, ...] | None
    cross_node_weight: float | None
    node_slack: float

    @classmethod
    def of(cls, load: Any, ranks: int, slots_per_rank: Any, **fields: Any) -> Problem:
        """From arrays or nested lists; the other fields by name, as in the JSON form. Raises ProblemError."""
        return cls.from_dict({"load": load, "ranks": ranks, "slots_per_rank": slots_per_rank, **fields})

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Problem:
        """The JSON form: the fields above as plain lists and numbers. Raises ProblemError that names the field, or Infeasible the goal."""
        from controller.solver.parse import parse

        problem = parse(raw)
        check_feasible(problem)
        return problem

    def with_policy(self, policy: str) -> Problem:
        return replace(self, policy=policy)

    def with_prior(self, prior: Ints | None) -> Problem:
        """The same problem from another present placement `[L, P]`."""
        if prior is not None:
            prior = frozen(np.asarray(prior, dtype=np.int32))
            if prior.shape != (self.layers, self.slots):
                raise ProblemError("prior", f"has shape {prior.shape}, {(self.layers, self.slots)} is needed")
        return replace(self, prior=prior)

    @property
    def layers(self) -> int:
        return int(self.load.shape[1])

    @property
    def experts(self) -> int:
        return int(self.load.shape[2])

    @property
    def per_rank(self) -> int:
        """K: places of one rank in the table."""
        return int(self.slots_per_rank.max())

    @property
    def slots(self) -> int:
        """P = ranks * K."""
        return self.ranks * self.per_rank

    @property
    def nodes(self) -> int:
        return int(self.node_of_rank.max()) + 1

    @property
    def usable(self) -> Ints:
        """[L, R] slots that may hold something: none on a drained rank."""
        return np.where(self.drained[None, :], 0, self.slots_per_rank).astype(np.int32)

    def usable_of(self, layer: int) -> Ints:
        """[R] usable slots of one layer."""
        return np.where(self.drained, 0, self.slots_per_rank[layer])

    def observed(self) -> Floats:
        """[L, E] tokens of the load window: the newest `window` entries summed."""
        return np.asarray(self.load[-self.window :].sum(axis=0))

    def rank_of_slot(self) -> Ints:
        """[P] rank of each slot."""
        return np.repeat(np.arange(self.ranks, dtype=np.int32), self.per_rank)

    def usable_slots(self) -> Bools:
        """[L, P] True where a slot may hold an expert."""
        place = np.arange(self.per_rank)
        return (place[None, None, :] < self.usable[:, :, None]).reshape(self.layers, self.slots)


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """The same array, contiguous and read-only."""
    out = np.ascontiguousarray(array)
    if out is array and out.flags.writeable:
        out = out.copy()
    out.setflags(write=False)
    return out


def least_redundant(experts: int, ranks: int) -> int:
    """Fewest redundant slots that give every rank the same number of slots, at least one."""
    return ranks - experts if experts < ranks else -experts % ranks


def check_feasible(p: Problem) -> None:
    """Raise Infeasible for what no placement can meet. Necessary conditions; the search proves the rest."""
    alive = np.flatnonzero(p.usable.sum(axis=0))
    room = p.usable.sum(axis=1)
    short = np.flatnonzero(room < p.experts)
    if short.size:
        layer = int(short[0])
        why = f"layer {layer} has {counted(int(room[layer]), 'slot')} for {counted(p.experts, 'expert')}"
        raise Infeasible("drained" if p.drained.any() else "capacity", why)
    hosts = (p.usable > 0).sum(axis=1)
    over = p.min_replicas.max(axis=1) > hosts
    if over.any():
        layer = int(np.flatnonzero(over)[0])
        need, have = int(p.min_replicas[layer].max()), int(hosts[layer])
        raise Infeasible(
            "min_replicas", f"layer {layer} wants {need} copies of an expert, {counted(have, 'rank')} can hold one"
        )
    over = p.min_replicas.sum(axis=1) > room
    if over.any():
        layer = int(np.flatnonzero(over)[0])
        raise Infeasible(
            "min_replicas",
            f"layer {layer} wants {int(p.min_replicas[layer].sum())} copies, has {counted(int(room[layer]), 'slot')}",
        )
    if p.slot_budget is not None:
        redundant = int((p.min_replicas - 1).sum())
        if redundant > p.slot_budget:
            raise Infeasible(
                "slot_budget", f"min_replicas takes {counted(redundant, 'redundant slot')}, {p.slot_budget} are allowed"
            )
    nodes = np.unique(p.node_of_rank[alive]).size
    if min(p.spread, int(p.min_replicas.max())) > nodes:
        raise Infeasible("spread", f"copies on {p.spread} nodes are wanted, {counted(nodes, 'node')} can hold any")
    _check_pins(p)


def _check_pins(p: Problem) -> None:
    if not p.pinned.size:
        return
    held = np.zeros((p.layers, p.ranks), dtype=np.int64)
    copies = np.zeros((p.layers, p.experts), dtype=np.int64)
    for layer, expert, rank in p.pinned.tolist():
        held[layer, rank] += 1
        copies[layer, expert] += 1
        if p.usable[layer, rank] == 0:
            raise Infeasible(
                "pinned", f"layer {layer}: expert {expert} is pinned to rank {rank}, which may hold nothing"
            )
    over = np.argwhere(held > p.usable)
    if over.size:
        layer, rank = over[0].tolist()
        raise Infeasible(
            "pinned",
            f"layer {layer}: {held[layer, rank]} experts are pinned to rank {rank}, which has "
            f"{counted(int(p.usable[layer, rank]), 'slot')}",
        )
    over = np.argwhere(copies > p.max_replicas)
    if over.size:
        layer, expert = over[0].tolist()
        raise Infeasible("max_replicas", f"layer {layer}: expert {expert} is pinned to more ranks than max_replicas")
