"""The JSON form of a placement problem, read once. Every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from controller.solver.parse_ranks import (
    read_capacity,
    read_drained,
    read_in_flight,
    read_nodes,
    read_pinned,
    read_prior,
    read_replicas,
    read_slots,
    read_spread,
)
from controller.solver.parse_samples import read_routing_sample
from controller.solver.parse_values import array, boolean, integer, member, optional_integer, optional_number, text
from controller.solver.problem import Floats, Problem, RankCost, ShareMode, Strategy, frozen
from controller.solver.size import MAX_EXPERTS, MAX_LAYERS, MAX_RANKS, check_held, check_loads
from eplane.errors import ProblemError
from eplane.wording import counted

FIELDS = frozenset(
    (
        "load",
        "loads",
        "experts",
        "layers",
        "window",
        "ranks",
        "slots_per_rank",
        "nodes",
        "node_of_rank",
        "groups",
        "prior",
        "in_flight",
        "capacity",
        "pinned",
        "drained",
        "min_replicas",
        "max_replicas",
        "spread",
        "shares",
        "slot_budget",
        "fixed_slots",
        "policy",
        "strategy",
        "move_weight",
        "max_moves",
        "budget_ms",
        "hardware",
        "rank_cost",
        "step_tokens",
        "horizon_steps",
        "bundle_bytes",
        "forecast",
        "tight_bound",
        "min_tokens",
        "min_improvement",
        "routing_sample",
        "cross_node_weight",
        "node_slack",
    )
)
NODE_SLACK = 0.05


def parse(raw: Mapping[str, Any]) -> Problem:
    """Read the JSON form. Raises ProblemError."""
    if not isinstance(raw, Mapping):
        raise ProblemError("problem", "must be an object")
    unknown = sorted(str(key) for key in raw if key not in FIELDS)
    if unknown:
        raise ProblemError(unknown[0][:60], "is not a field of a placement problem")
    load = _load(raw)
    layers, experts = load.shape[1:]
    ranks = integer(raw, "ranks", None, 1, MAX_RANKS)
    check_held(layers, ranks, experts)
    slots = read_slots(raw.get("slots_per_rank"), layers, ranks)
    groups = integer(raw, "groups", 1, 1, experts)
    if experts % groups:
        raise ProblemError("groups", f"{experts} experts do not split into {groups} groups")
    node_of_rank = read_nodes(raw, ranks)
    drained = read_drained(raw.get("drained"), ranks)
    capacity, stopped = read_capacity(raw.get("capacity"), ranks)
    minimum = read_replicas(raw.get("min_replicas"), "min_replicas", 1, layers, experts)
    maximum = read_replicas(raw.get("max_replicas"), "max_replicas", ranks, layers, experts)
    if raw.get("max_replicas") is not None and (minimum > maximum).any():
        raise ProblemError("min_replicas", "is above max_replicas")
    per_rank = int(slots.max())
    prior = read_prior(raw.get("prior"), layers, experts, ranks, slots, per_rank)
    prior = read_in_flight(raw.get("in_flight"), prior, per_rank, ranks, experts)
    history = load.shape[0]
    return Problem(
        load=frozen(load),
        ranks=ranks,
        slots_per_rank=frozen(slots),
        node_of_rank=frozen(node_of_rank),
        window=integer(raw, "window", history, 1, history),
        groups=groups,
        prior=None if prior is None else frozen(prior),
        capacity=frozen(capacity),
        pinned=frozen(read_pinned(raw.get("pinned"), layers, experts, ranks)),
        drained=frozen(drained | stopped),
        min_replicas=frozen(minimum),
        max_replicas=frozen(np.minimum(maximum, ranks)),
        spread=read_spread(raw.get("spread"), int(node_of_rank.max()) + 1),
        shares=member(raw, "shares", ShareMode, ShareMode.EQUAL),
        slot_budget=optional_integer(raw, "slot_budget", 0),
        fixed_slots=boolean(raw, "fixed_slots", False),
        policy=text(raw, "policy", "eplane"),
        strategy=member(raw, "strategy", Strategy, Strategy.AUTO),
        move_weight=optional_number(raw, "move_weight", 0.0),
        max_moves=optional_integer(raw, "max_moves", 0),
        budget_ms=optional_number(raw, "budget_ms", 0.0),
        hardware=None if raw.get("hardware") is None else text(raw, "hardware", ""),
        rank_cost=member(raw, "rank_cost", RankCost, RankCost.TOKENS),
        step_tokens=optional_number(raw, "step_tokens", 0.0),
        horizon_steps=integer(raw, "horizon_steps", 3000, 1, 10**12),
        bundle_bytes=integer(raw, "bundle_bytes", 44_040_192, 1, 10**15),
        forecast=boolean(raw, "forecast", True),
        tight_bound=boolean(raw, "tight_bound", False),
        min_tokens=optional_number(raw, "min_tokens", 0.0) or 0.0,
        min_improvement=optional_number(raw, "min_improvement", 0.0) or 0.0,
        routing_sample=read_routing_sample(raw.get("routing_sample"), layers, experts),
        cross_node_weight=optional_number(raw, "cross_node_weight", 0.0),
        node_slack=NODE_SLACK if raw.get("node_slack") is None else optional_number(raw, "node_slack", 0.0) or 0.0,
    )


def _load(raw: Mapping[str, Any]) -> Floats:
    """[W, L, E]. Without any load: zeros for `experts` (and `layers`), a cold start that knows nothing."""
    if raw.get("load") is not None and raw.get("loads") is not None:
        raise ProblemError("loads", "and load are both given; one is enough")
    field = "loads" if raw.get("loads") is not None else "load"
    value = raw.get(field)
    if value is None:
        if raw.get("experts") is None:
            raise ProblemError("load", "is missing (or null without `experts`)")
        layers, experts = integer(raw, "layers", 1, 1, MAX_LAYERS), integer(raw, "experts", None, 1, MAX_EXPERTS)
        check_loads("experts", layers, experts)
        return np.zeros((1, layers, experts))
    load = array(value, field)
    if load.ndim == 2:
        load = load[None]
    if load.ndim != 3:
        raise ProblemError(
            field, f"has {counted(load.ndim, 'dimension')}; [layers][experts] or [windows][layers][experts] is needed"
        )
    if min(load.shape) < 1:
        raise ProblemError(field, f"is empty: shape {list(load.shape)}, there are no MoE layers to place")
    check_loads(field, *load.shape[1:])
    if not np.isfinite(load).all():
        raise ProblemError(field, "holds NaN or infinity")
    if (load < 0).any():
        where = np.argwhere(load < 0)[0].tolist()
        raise ProblemError(field, f"is negative at {where}")
    if load.max() > 1e18:
        raise ProblemError(field, "is above 1e18 tokens")
    for name, size in (("layers", load.shape[1]), ("experts", load.shape[2])):
        if raw.get(name) is not None and integer(raw, name, None, 1, MAX_EXPERTS) != size:
            raise ProblemError(name, f"is {raw[name]}, but {field} has {size}")
    return load
