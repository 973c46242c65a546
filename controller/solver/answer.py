"""The answer as data, measured the same way for every policy, and checked before it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.solver.measure import (
    balance,
    bound,
    copies_of,
    count_moves,
    cross_node_share,
    even_shares,
    held,
    rank_loads,
    twice,
)
from controller.solver.problem import EMPTY, Floats, Ints, Problem, Strategy, frozen
from controller.solver.touched import nodes_per_token
from eplane.errors import AnswerError


@dataclass(frozen=True, slots=True)
class Answer:
    """A placement and what it is worth on the load window it was asked for.

    placement [L, P] slot -> expert, -1 empty; shares [L, P] part of an expert's tokens that a slot takes;
    rank_load [L, R] tokens; balancedness, bound [L]; moves: experts that a rank must receive; cross_node_share: part of
    the tokens that must change node; nodes_per_token: (before, after) nodes that a sampled token touches, before None
    without a prior, the whole None without a sample or on one node; predicted_step_us: (before, after) of all layers together, None without a cost
    model or prior; decisions: one sentence for each change and each refusal; seconds: how long the solve took.
    """

    placement: Ints
    shares: Floats
    rank_load: Floats
    balancedness: Floats
    bound: Floats
    moves: int
    moves_of_layer: Ints
    bytes_moved: int
    cross_node_share: float
    nodes_per_token: tuple[float | None, float] | None
    predicted_step_us: tuple[float, float] | None
    policy: str
    strategy: str
    decisions: tuple[str, ...]
    seconds: float

    @classmethod
    def of(
        cls,
        problem: Problem,
        placement: Ints,
        *,
        policy: str,
        strategy: str,
        decisions: Sequence[str] = (),
        shares: Floats | None = None,
        seconds: float = 0.0,
    ) -> Answer:
        """Measure `placement` on the problem's load window."""
        if shares is None:
            shares = even_shares(placement, problem.experts)
        load = problem.observed()
        loads = rank_loads(load, placement, shares, problem.ranks)
        moves = count_moves(problem.prior, placement, problem.ranks, problem.experts)
        return cls(
            placement=frozen(placement.astype(np.int32)),
            shares=frozen(shares),
            rank_load=frozen(loads),
            balancedness=frozen(balance(loads, problem.capacity, problem.drained)),
            bound=frozen(bound(problem, load, (loads / problem.capacity).max(axis=1))),
            moves=int(moves.sum()),
            moves_of_layer=frozen(moves),
            bytes_moved=int(moves.sum()) * problem.bundle_bytes,
            cross_node_share=cross_node_share(problem, load, placement, shares),
            nodes_per_token=_nodes(problem, placement, shares),
            predicted_step_us=_predicted(problem, load, placement, shares),
            policy=policy,
            strategy=strategy,
            decisions=tuple(decisions),
            seconds=seconds,
        )

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        before, after = self.predicted_step_us or (None, None)
        nodes = None
        if self.nodes_per_token is not None:
            was, becomes = self.nodes_per_token
            nodes = {"before": None if was is None else round(was, 6), "after": round(becomes, 6)}
        return {
            "policy": self.policy,
            "strategy": self.strategy,
            "placement": self.placement.tolist(),
            "shares": np.round(self.shares, 6).tolist(),
            "rank_load": np.round(self.rank_load, 6).tolist(),
            "balancedness": np.round(self.balancedness, 6).tolist(),
            "bound": np.round(self.bound, 6).tolist(),
            "moves": self.moves,
            "moves_of_layer": self.moves_of_layer.tolist(),
            "bytes_moved": self.bytes_moved,
            "cross_node_share": round(self.cross_node_share, 6),
            "nodes_per_token": nodes,
            "predicted_step_us": {"before": before, "after": after},
            "decisions": list(self.decisions),
            "seconds": round(self.seconds, 6),
        }


def _nodes(problem: Problem, placement: Ints, shares: Floats) -> tuple[float | None, float] | None:
    after = nodes_per_token(problem, placement, shares)
    if after is None:
        return None
    if problem.prior is None:
        return None, after
    return nodes_per_token(problem, problem.prior, even_shares(problem.prior, problem.experts)), after


def _predicted(problem: Problem, load: Floats, placement: Ints, shares: Floats) -> tuple[float, float] | None:
    if problem.hardware is None or problem.prior is None:
        return None
    from controller.costs import step_us

    before = even_shares(problem.prior, problem.experts)
    return step_us(problem, load, problem.prior, before), step_us(problem, load, placement, shares)


def validate(problem: Problem, answer: Answer) -> None:
    """Raise AnswerError unless the answer meets every hard goal of the problem. No answer leaves without it."""
    check_placement(problem, answer.placement)
    check_shares(answer.placement, answer.shares, problem.experts)


def check_placement(p: Problem, placement: Ints) -> None:
    """Raise AnswerError that names the first broken rule, its layer, rank or expert."""
    if placement.shape != (p.layers, p.slots):
        raise AnswerError(f"placement has shape {placement.shape}, {(p.layers, p.slots)} is needed")
    if placement.min() < EMPTY or placement.max() >= p.experts:
        raise AnswerError(f"placement names an expert outside 0..{p.experts - 1}")
    _first((placement != EMPTY) & ~p.usable_slots(), "layer {0}: slot {1} is not usable and holds an expert")
    _first(twice(placement, p.ranks), "layer {0}: rank {1} holds an expert twice")
    counts = copies_of(placement, p.experts)
    _first(counts == 0, "layer {0}: expert {1} has no replica")
    _first(counts < p.min_replicas, "layer {0}: expert {1} has fewer copies than min_replicas")
    _first(counts > p.max_replicas, "layer {0}: expert {1} has more copies than max_replicas")
    for layer, expert, rank in p.pinned.tolist():
        if expert not in placement[layer, rank * p.per_rank : (rank + 1) * p.per_rank]:
            raise AnswerError(f"layer {layer}: expert {expert} is not on rank {rank}, where it is pinned")
    if p.slot_budget is not None and int((counts - 1).sum()) > p.slot_budget:
        raise AnswerError(f"{int((counts - 1).sum())} redundant slots, slot_budget is {p.slot_budget}")
    if p.spread > 1 or p.strategy is Strategy.HIERARCHICAL:
        _check_nodes(p, held(placement, p.ranks, p.experts), counts)
    if p.fixed_slots and p.prior is not None:
        _check_fixed(p, placement)


def _check_nodes(p: Problem, on_rank: Ints, counts: Ints) -> None:
    on_node = np.stack([on_rank[:, p.node_of_rank == node].sum(axis=1) for node in range(p.nodes)], axis=1)
    nodes_of_expert = (on_node > 0).sum(axis=1)
    _first(nodes_of_expert < np.minimum(p.spread, counts), "layer {0}: the copies of expert {1} lie on too few nodes")
    if p.strategy is Strategy.HIERARCHICAL:
        by_group = (on_node > 0).reshape(p.layers, p.nodes, p.groups, -1).any(axis=3)
        _first(by_group.sum(axis=1) > 1, "layer {0}: group {1} lies on more than one node")


def _check_fixed(p: Problem, placement: Ints) -> None:
    if p.prior is None:
        return
    # What the prior had in a slot that may not be used any more can not keep its place.
    before = held(np.where(p.usable_slots(), p.prior, EMPTY), p.ranks, p.experts) > 0
    layers, ranks = np.indices((p.layers, p.slots))[0], p.rank_of_slot()[None, :]
    stays = (placement != EMPTY) & before[layers, ranks, np.maximum(placement, 0)]
    _first(stays & (placement != p.prior), "layer {0}: the expert in slot {1} changed its place on its rank")


def check_shares(placement: Ints, shares: Floats, experts: int) -> None:
    """Raise AnswerError unless shares are parts that sum to 1 for each expert and are 0 on empty slots."""
    if shares.shape != placement.shape:
        raise AnswerError(f"shares have shape {shares.shape}, the placement {placement.shape}")
    if not np.isfinite(shares).all() or shares.min() < 0 or shares.max() > 1 + 1e-9:
        raise AnswerError("a share is not a part between 0 and 1")
    _first((placement == EMPTY) & (shares != 0), "layer {0}: empty slot {1} has a share")
    layers, slots = placement.shape
    rows = np.repeat(np.arange(layers), slots)
    used = placement.ravel() != EMPTY
    key = rows[used] * experts + placement.ravel()[used]
    sums = np.bincount(key, weights=shares.ravel()[used], minlength=layers * experts).reshape(layers, experts)
    _first(np.abs(sums - 1) > 1e-6, "layer {0}: the shares of expert {1} do not sum to 1")


def _first(broken: Any, sentence: str) -> None:
    if np.any(broken):
        raise AnswerError(sentence.format(*np.argwhere(broken)[0].tolist()))
