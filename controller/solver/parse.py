"""The JSON form of a placement problem, read once. Every refusal names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from controller.solver.problem import (
    EMPTY,
    Bools,
    Floats,
    Ints,
    Problem,
    RankCost,
    ShareMode,
    Strategy,
    frozen,
)
from eplane.errors import ProblemError

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
        "min_tokens",
        "min_improvement",
    )
)
Choice = TypeVar("Choice", ShareMode, Strategy, RankCost)
MAX_RANKS = 65536
MAX_CELLS = 1 << 31


def parse(raw: Mapping[str, Any]) -> Problem:
    """Read the JSON form. Raises ProblemError."""
    if not isinstance(raw, Mapping):
        raise ProblemError("problem", "must be an object")
    unknown = sorted(str(key) for key in raw if key not in FIELDS)
    if unknown:
        raise ProblemError(unknown[0], "is not a field of a placement problem")
    load = _load(raw)
    layers, experts = load.shape[1:]
    ranks = _integer(raw, "ranks", None, 1, MAX_RANKS)
    slots = _slots(raw.get("slots_per_rank"), layers, ranks)
    groups = _integer(raw, "groups", 1, 1, experts)
    if experts % groups:
        raise ProblemError("groups", f"{experts} experts do not split into {groups} groups")
    node_of_rank = _nodes(raw, ranks)
    drained = _drained(raw.get("drained"), ranks)
    capacity, stopped = _capacity(raw.get("capacity"), ranks)
    minimum = _replicas(raw.get("min_replicas"), "min_replicas", 1, layers, experts)
    maximum = _replicas(raw.get("max_replicas"), "max_replicas", ranks, layers, experts)
    if raw.get("max_replicas") is not None and (minimum > maximum).any():
        raise ProblemError("min_replicas", "is above max_replicas")
    per_rank = int(slots.max())
    prior = _prior(raw.get("prior"), layers, experts, ranks, slots, per_rank)
    prior = _in_flight(raw.get("in_flight"), prior, per_rank, ranks, experts)
    history = load.shape[0]
    return Problem(
        load=frozen(load),
        ranks=ranks,
        slots_per_rank=frozen(slots),
        node_of_rank=frozen(node_of_rank),
        window=_integer(raw, "window", history, 1, history),
        groups=groups,
        prior=None if prior is None else frozen(prior),
        capacity=frozen(capacity),
        pinned=frozen(_pinned(raw.get("pinned"), layers, experts, ranks)),
        drained=frozen(drained | stopped),
        min_replicas=frozen(minimum),
        max_replicas=frozen(np.minimum(maximum, ranks)),
        spread=_spread(raw.get("spread"), int(node_of_rank.max()) + 1),
        shares=_member(raw, "shares", ShareMode, ShareMode.EQUAL),
        slot_budget=_optional_integer(raw, "slot_budget", 0),
        fixed_slots=_boolean(raw, "fixed_slots", False),
        policy=_text(raw, "policy", "eplane"),
        strategy=_member(raw, "strategy", Strategy, Strategy.AUTO),
        move_weight=_optional_number(raw, "move_weight", 0.0),
        max_moves=_optional_integer(raw, "max_moves", 0),
        budget_ms=_optional_number(raw, "budget_ms", 0.0),
        hardware=None if raw.get("hardware") is None else _text(raw, "hardware", ""),
        rank_cost=_member(raw, "rank_cost", RankCost, RankCost.TOKENS),
        step_tokens=_optional_number(raw, "step_tokens", 0.0),
        horizon_steps=_integer(raw, "horizon_steps", 3000, 1, 10**12),
        bundle_bytes=_integer(raw, "bundle_bytes", 44_040_192, 1, 10**15),
        forecast=_boolean(raw, "forecast", True),
        min_tokens=_optional_number(raw, "min_tokens", 0.0) or 0.0,
        min_improvement=_optional_number(raw, "min_improvement", 0.0) or 0.0,
    )


def _array(value: Any, field: str) -> Floats:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return value.astype(np.float64)
    try:
        out = np.asarray(value)
    except ValueError as error:
        raise ProblemError(field, "is not rectangular") from error
    if out.size and out.dtype.kind not in "iuf":
        kind = "is not rectangular" if out.dtype.kind == "O" else "holds something that is not a number"
        raise ProblemError(field, kind)
    return out.astype(np.float64)


def _load(raw: Mapping[str, Any]) -> Floats:
    """[W, L, E]. Without any load: zeros for `experts` (and `layers`), a cold start that knows nothing."""
    if raw.get("load") is not None and raw.get("loads") is not None:
        raise ProblemError("loads", "and load are both given; one is enough")
    field = "loads" if raw.get("loads") is not None else "load"
    value = raw.get(field)
    if value is None:
        if raw.get("experts") is None:
            raise ProblemError("load", "is missing (or null without `experts`)")
        return np.zeros((1, _integer(raw, "layers", 1, 1, 100_000), _integer(raw, "experts", None, 1, 1_000_000)))
    load = _array(value, field)
    if load.ndim == 2:
        load = load[None]
    if load.ndim != 3:
        raise ProblemError(
            field, f"has {load.ndim} dimensions; [layers][experts] or [windows][layers][experts] is needed"
        )
    if min(load.shape) < 1:
        raise ProblemError(field, f"is empty: shape {list(load.shape)}, there are no MoE layers to place")
    if not np.isfinite(load).all():
        raise ProblemError(field, "holds NaN or infinity")
    if (load < 0).any():
        where = np.argwhere(load < 0)[0].tolist()
        raise ProblemError(field, f"is negative at {where}")
    if load.max() > 1e18:
        raise ProblemError(field, "is above 1e18 tokens")
    for name, size in (("layers", load.shape[1]), ("experts", load.shape[2])):
        if raw.get(name) is not None and _integer(raw, name, None, 1, 1_000_000) != size:
            raise ProblemError(name, f"is {raw[name]}, but {field} has {size}")
    return load


def _slots(value: Any, layers: int, ranks: int) -> Ints:
    if value is None:
        raise ProblemError("slots_per_rank", "is missing")
    raw = _array(value, "slots_per_rank")
    if raw.ndim == 1 and raw.shape != (ranks,):
        raise ProblemError("slots_per_rank", f"has {raw.size} entries for {ranks} ranks")
    if raw.ndim == 2 and raw.shape != (layers, ranks):
        raise ProblemError("slots_per_rank", f"has shape {list(raw.shape)}, [{layers}, {ranks}] is needed")
    if raw.ndim > 2 or (raw.size and not np.equal(np.mod(raw, 1), 0).all()):
        raise ProblemError("slots_per_rank", "must be a whole number, a list per rank or a list per layer and rank")
    if (raw < 0).any():
        raise ProblemError("slots_per_rank", "is negative")
    if raw.max() < 1:
        raise ProblemError("slots_per_rank", "is 0: ranks without slots can hold no expert")
    if raw.max() * ranks * layers > MAX_CELLS:
        raise ProblemError("slots_per_rank", f"gives more than {MAX_CELLS} slots")
    return np.broadcast_to(raw, (layers, ranks)).astype(np.int32)


def _nodes(raw: Mapping[str, Any], ranks: int) -> Ints:
    given = raw.get("node_of_rank")
    if given is not None:
        nodes = _array(given, "node_of_rank")
        if nodes.shape != (ranks,):
            raise ProblemError("node_of_rank", f"has {nodes.size} entries for {ranks} ranks")
        if not np.equal(np.mod(nodes, 1), 0).all() or (nodes < 0).any():
            raise ProblemError("node_of_rank", "must hold whole numbers from 0")
        # Node names need not be dense; only which ranks share a node matters.
        dense = np.unique(nodes, return_inverse=True)[1]
        count = int(dense.max()) + 1
        if raw.get("nodes") is not None and _integer(raw, "nodes", None, 1, MAX_RANKS) != count:
            raise ProblemError("nodes", f"is {raw['nodes']}, but node_of_rank names {count}")
        return dense.astype(np.int32)
    count = _integer(raw, "nodes", 1, 1, MAX_RANKS)
    if count > ranks:
        raise ProblemError("nodes", f"is {count}, more than the {ranks} ranks")
    if ranks % count:
        raise ProblemError("nodes", f"{ranks} ranks do not split evenly over {count} nodes; give node_of_rank")
    return (np.arange(ranks) // (ranks // count)).astype(np.int32)


def _drained(value: Any, ranks: int) -> Bools:
    out = np.zeros(ranks, dtype=np.bool_)
    for rank in _listed(value, "drained"):
        if not _is_integer(rank) or not 0 <= rank < ranks:
            raise ProblemError("drained", f"{rank!r} is not one of the {ranks} ranks")
        out[rank] = True
    if out.all():
        raise ProblemError("drained", "names every rank: no rank is left")
    return out


def _capacity(value: Any, ranks: int) -> tuple[Floats, Bools]:
    """[R] speeds and the ranks of speed 0, which are as good as drained."""
    raw = _array(1.0 if value is None else value, "capacity")
    if raw.ndim > 1 or (raw.ndim == 1 and raw.shape != (ranks,)):
        raise ProblemError("capacity", f"has {raw.size} entries for {ranks} ranks")
    if not np.isfinite(raw).all() or (raw < 0).any():
        raise ProblemError("capacity", "must be finite and not negative")
    if raw.max() <= 0:
        raise ProblemError("capacity", "is 0 on every rank")
    speeds = np.broadcast_to(raw, (ranks,)).astype(np.float64)
    return np.where(speeds > 0, speeds, 1.0), speeds == 0


def _replicas(value: Any, field: str, default: int, layers: int, experts: int) -> Ints:
    raw = _array(default if value is None else value, field)
    if raw.ndim == 1 and raw.shape != (experts,):
        raise ProblemError(field, f"has {raw.size} entries for {experts} experts")
    if raw.ndim == 2 and raw.shape != (layers, experts):
        raise ProblemError(field, f"has shape {list(raw.shape)}, [{layers}, {experts}] is needed")
    if raw.ndim > 2 or not np.equal(np.mod(raw, 1), 0).all() or (raw < 1).any():
        raise ProblemError(field, "must be a whole number from 1, a list per expert or a list per layer and expert")
    return np.broadcast_to(np.minimum(raw, MAX_RANKS), (layers, experts)).astype(np.int32)


def _prior(value: Any, layers: int, experts: int, ranks: int, slots: Ints, per_rank: int) -> Ints | None:
    """[L, P]. A layer may be flat (padded to P, or with exactly its slots) or a list per rank; one flat list serves all."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.shape == (layers, ranks * per_rank):
        table = value
    else:
        rows = _listed(value, "prior")
        if rows and not isinstance(rows[0], Sequence | np.ndarray):
            rows = [rows] * layers
        if len(rows) != layers:
            raise ProblemError("prior", f"{len(rows)} layer{'s' * (len(rows) != 1)} given, {layers} needed")
        table = np.stack([_prior_row(row, i, slots[i], per_rank) for i, row in enumerate(rows)])
    out = table.astype(np.int32)
    if not np.equal(out, table).all() or out.min() < EMPTY or out.max() >= experts:
        bad = next(x for x in table.ravel().tolist() if x != int(x) or not EMPTY <= x < experts)
        raise ProblemError("prior", f"id {bad:g} out of range (0..{experts - 1}, -1 = empty)")
    return out


def _prior_row(row: Any, layer: int, slots: Ints, per_rank: int) -> NDArray[Any]:
    items = list(_listed(row, f"prior[{layer}]"))
    ranks = len(slots)
    out = np.full((ranks, per_rank), EMPTY, dtype=np.float64)
    if items and isinstance(items[0], Sequence | np.ndarray):
        if len(items) != ranks:
            raise ProblemError(f"prior[{layer}]", f"has {len(items)} ranks, {ranks} needed")
        for rank, held in enumerate(items):
            if len(held) > per_rank:
                raise ProblemError(f"prior[{layer}]", f"rank {rank}: {len(held)} slots, at most {per_rank}")
            out[rank, : len(held)] = _array(list(held), f"prior[{layer}]")
        return out.reshape(-1)
    flat = _array(items, f"prior[{layer}]")
    if flat.size == ranks * per_rank:
        return flat
    if flat.size == int(slots.sum()):
        start = 0
        for rank, count in enumerate(slots.tolist()):
            out[rank, :count] = flat[start : start + count]
            start += count
        return out.reshape(-1)
    raise ProblemError(f"prior[{layer}]", f"has {flat.size} slots, {ranks * per_rank} needed")


def _in_flight(value: Any, prior: Ints | None, per_rank: int, ranks: int, experts: int) -> Ints | None:
    """Moves that still run count as done: the prior is what it will be when they end."""
    moves = _listed(value, "in_flight")
    if not moves:
        return prior
    if prior is None:
        raise ProblemError("in_flight", "needs a prior")
    table = prior.reshape(len(prior), ranks, per_rank).copy()
    for number, move in enumerate(moves):
        field = f"in_flight[{number}]"
        if not isinstance(move, Mapping):
            raise ProblemError(field, "must be an object with layer, expert, from_rank, to_rank")
        layer = _integer(move, "layer", None, 0, len(table) - 1, field)
        expert = _integer(move, "expert", None, 0, experts - 1, field)
        target = _integer(move, "to_rank", None, 0, ranks - 1, field)
        source = move.get("from_rank")
        if expert not in table[layer, target]:
            free = np.flatnonzero(table[layer, target] == EMPTY)
            if not free.size:
                raise ProblemError(field, f"rank {target} has no empty slot in layer {layer}")
            table[layer, target, free[0]] = expert
        if source is not None:
            rank = _integer(move, "from_rank", None, 0, ranks - 1, field)
            row = table[layer, rank]
            row[row == expert] = EMPTY
    return table.reshape(prior.shape)


def _pinned(value: Any, layers: int, experts: int, ranks: int) -> Ints:
    """[n, 3]. An entry is {layer?, expert, rank} or [layer, expert, rank]; without a layer it holds in every layer."""
    rows: set[tuple[int, int, int]] = set()
    for number, entry in enumerate(_listed(value, "pinned")):
        field = f"pinned[{number}]"
        if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 3:
            entry = dict(zip(("layer", "expert", "rank"), entry, strict=True))
        if not isinstance(entry, Mapping):
            raise ProblemError(field, "must be an object with expert, rank and perhaps layer")
        expert = _integer(entry, "expert", None, 0, experts - 1, field)
        rank = _integer(entry, "rank", None, 0, ranks - 1, field)
        if entry.get("layer") is None:
            rows.update((layer, expert, rank) for layer in range(layers))
        else:
            rows.add((_integer(entry, "layer", None, 0, layers - 1, field), expert, rank))
    return np.asarray(sorted(rows), dtype=np.int32).reshape(-1, 3)


def _spread(value: Any, nodes: int) -> int:
    if value is None or value is False:
        return 1
    if value is True:
        return nodes
    if not _is_integer(value) or value < 1:
        raise ProblemError("spread", "must be true, false or a whole number of nodes")
    return int(value)


def _listed(value: Any, field: str) -> Sequence[Any]:
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        return list(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ProblemError(field, "must be a list")
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _integer(raw: Mapping[str, Any], name: str, default: int | None, low: int, high: int, inside: str = "") -> int:
    field = f"{inside}.{name}" if inside else name
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ProblemError(field, "is missing")
        return default
    if isinstance(value, float) and value == int(value if math.isfinite(value) else 0):
        value = int(value)
    if not _is_integer(value):
        raise ProblemError(field, f"must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ProblemError(field, f"is {value}, must be {low} to {high}")
    return int(value)


def _optional_integer(raw: Mapping[str, Any], name: str, low: int) -> int | None:
    return None if raw.get(name) is None else _integer(raw, name, None, low, 1 << 62)


def _optional_number(raw: Mapping[str, Any], name: str, low: float) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(float(value)):
        raise ProblemError(name, f"must be a number, not {value!r}")
    if value < low:
        raise ProblemError(name, f"is {value}, must be at least {low:g}")
    return float(value)


def _boolean(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ProblemError(name, f"must be true or false, not {value!r}")
    return value


def _text(raw: Mapping[str, Any], name: str, default: str) -> str:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise ProblemError(name, f"must be a name, not {value!r}")
    return value


def _member(raw: Mapping[str, Any], name: str, kind: type[Choice], default: Choice) -> Choice:
    value = raw.get(name)
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError:
        raise ProblemError(name, f"is {value!r}, must be one of {', '.join(kind)}") from None
