"""What the JSON form says of ranks, their slots and what they hold. Every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.solver.parse_values import array, integer, is_integer, listed
from controller.solver.problem import EMPTY, Bools, Floats, Ints
from eplane.errors import ProblemError

MAX_RANKS = 65536
MAX_CELLS = 1 << 31


def read_slots(value: Any, layers: int, ranks: int) -> Ints:
    if value is None:
        raise ProblemError("slots_per_rank", "is missing")
    raw = array(value, "slots_per_rank")
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


def read_nodes(raw: Mapping[str, Any], ranks: int) -> Ints:
    given = raw.get("node_of_rank")
    if given is not None:
        nodes = array(given, "node_of_rank")
        if nodes.shape != (ranks,):
            raise ProblemError("node_of_rank", f"has {nodes.size} entries for {ranks} ranks")
        if not np.equal(np.mod(nodes, 1), 0).all() or (nodes < 0).any():
            raise ProblemError("node_of_rank", "must hold whole numbers from 0")
        # Node names need not be dense; only which ranks share a node matters.
        dense = np.unique(nodes, return_inverse=True)[1]
        count = int(dense.max()) + 1
        if raw.get("nodes") is not None and integer(raw, "nodes", None, 1, MAX_RANKS) != count:
            raise ProblemError("nodes", f"is {raw['nodes']}, but node_of_rank names {count}")
        return dense.astype(np.int32)
    count = integer(raw, "nodes", 1, 1, MAX_RANKS)
    if count > ranks:
        raise ProblemError("nodes", f"is {count}, more than the {ranks} ranks")
    if ranks % count:
        raise ProblemError("nodes", f"{ranks} ranks do not split evenly over {count} nodes; give node_of_rank")
    return (np.arange(ranks) // (ranks // count)).astype(np.int32)


def read_drained(value: Any, ranks: int) -> Bools:
    out = np.zeros(ranks, dtype=np.bool_)
    for rank in listed(value, "drained"):
        if not is_integer(rank) or not 0 <= rank < ranks:
            raise ProblemError("drained", f"{rank!r} is not one of the {ranks} ranks")
        out[rank] = True
    if out.all():
        raise ProblemError("drained", "names every rank: no rank is left")
    return out


def read_capacity(value: Any, ranks: int) -> tuple[Floats, Bools]:
    """[R] speeds and the ranks of speed 0, which are as good as drained."""
    raw = array(1.0 if value is None else value, "capacity")
    if raw.ndim > 1 or (raw.ndim == 1 and raw.shape != (ranks,)):
        raise ProblemError("capacity", f"has {raw.size} entries for {ranks} ranks")
    if not np.isfinite(raw).all() or (raw < 0).any():
        raise ProblemError("capacity", "must be finite and not negative")
    if raw.max() <= 0:
        raise ProblemError("capacity", "is 0 on every rank")
    speeds = np.broadcast_to(raw, (ranks,)).astype(np.float64)
    return np.where(speeds > 0, speeds, 1.0), speeds == 0


def read_replicas(value: Any, field: str, default: int, layers: int, experts: int) -> Ints:
    raw = array(default if value is None else value, field)
    if raw.ndim == 1 and raw.shape != (experts,):
        raise ProblemError(field, f"has {raw.size} entries for {experts} experts")
    if raw.ndim == 2 and raw.shape != (layers, experts):
        raise ProblemError(field, f"has shape {list(raw.shape)}, [{layers}, {experts}] is needed")
    if raw.ndim > 2 or not np.equal(np.mod(raw, 1), 0).all() or (raw < 1).any():
        raise ProblemError(field, "must be a whole number from 1, a list per expert or a list per layer and expert")
    return np.broadcast_to(np.minimum(raw, MAX_RANKS), (layers, experts)).astype(np.int32)


def read_prior(value: Any, layers: int, experts: int, ranks: int, slots: Ints, per_rank: int) -> Ints | None:
    """[L, P]. A layer may be flat (padded to P, or with exactly its slots) or a list per rank; one flat list serves all."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.shape == (layers, ranks * per_rank):
        table = value
    else:
        rows = listed(value, "prior")
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
    items = list(listed(row, f"prior[{layer}]"))
    ranks = len(slots)
    out = np.full((ranks, per_rank), EMPTY, dtype=np.float64)
    if items and isinstance(items[0], Sequence | np.ndarray):
        if len(items) != ranks:
            raise ProblemError(f"prior[{layer}]", f"has {len(items)} ranks, {ranks} needed")
        for rank, held in enumerate(items):
            if len(held) > per_rank:
                raise ProblemError(f"prior[{layer}]", f"rank {rank}: {len(held)} slots, at most {per_rank}")
            out[rank, : len(held)] = array(list(held), f"prior[{layer}]")
        return out.reshape(-1)
    flat = array(items, f"prior[{layer}]")
    if flat.size == ranks * per_rank:
        return flat
    if flat.size == int(slots.sum()):
        start = 0
        for rank, count in enumerate(slots.tolist()):
            out[rank, :count] = flat[start : start + count]
            start += count
        return out.reshape(-1)
    raise ProblemError(f"prior[{layer}]", f"has {flat.size} slots, {ranks * per_rank} needed")


def read_in_flight(value: Any, prior: Ints | None, per_rank: int, ranks: int, experts: int) -> Ints | None:
    """Moves that still run count as done: the prior is what it will be when they end."""
    moves = listed(value, "in_flight")
    if not moves:
        return prior
    if prior is None:
        raise ProblemError("in_flight", "needs a prior")
    table = prior.reshape(len(prior), ranks, per_rank).copy()
    for number, move in enumerate(moves):
        field = f"in_flight[{number}]"
        if not isinstance(move, Mapping):
            raise ProblemError(field, "must be an object with layer, expert, from_rank, to_rank")
        layer = integer(move, "layer", None, 0, len(table) - 1, field)
        expert = integer(move, "expert", None, 0, experts - 1, field)
        target = integer(move, "to_rank", None, 0, ranks - 1, field)
        source = move.get("from_rank")
        if expert not in table[layer, target]:
            free = np.flatnonzero(table[layer, target] == EMPTY)
            if not free.size:
                raise ProblemError(field, f"rank {target} has no empty slot in layer {layer}")
            table[layer, target, free[0]] = expert
        if source is not None:
            rank = integer(move, "from_rank", None, 0, ranks - 1, field)
            row = table[layer, rank]
            row[row == expert] = EMPTY
    return table.reshape(prior.shape)


def read_pinned(value: Any, layers: int, experts: int, ranks: int) -> Ints:
    """[n, 3]. An entry is {layer?, expert, rank} or [layer, expert, rank]; without a layer it holds in every layer."""
    rows: set[tuple[int, int, int]] = set()
    for number, entry in enumerate(listed(value, "pinned")):
        field = f"pinned[{number}]"
        if isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 3:
            entry = dict(zip(("layer", "expert", "rank"), entry, strict=True))
        if not isinstance(entry, Mapping):
            raise ProblemError(field, "must be an object with expert, rank and perhaps layer")
        expert = integer(entry, "expert", None, 0, experts - 1, field)
        rank = integer(entry, "rank", None, 0, ranks - 1, field)
        if entry.get("layer") is None:
            rows.update((layer, expert, rank) for layer in range(layers))
        else:
            rows.add((integer(entry, "layer", None, 0, layers - 1, field), expert, rank))
    return np.asarray(sorted(rows), dtype=np.int32).reshape(-1, 3)


def read_spread(value: Any, nodes: int) -> int:
    if value is None or value is False:
        return 1
    if value is True:
        return nodes
    if not is_integer(value) or value < 1:
        raise ProblemError("spread", "must be true, false or a whole number of nodes")
    return int(value)
