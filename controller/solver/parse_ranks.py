"""What the JSON form says of ranks, their slots and what they hold. Every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.solver.parse_values import array, integer, is_integer, listed, shown, whole
from controller.solver.problem import EMPTY, Bools, Floats, Ints
from controller.solver.size import MAX_RANKS, check_slots
from eplane.errors import ProblemError
from eplane.wording import counted

LEAST_SPEED, MOST_SPEED = 1e-3, 1e3
MOST_COPIES = (1 << 31) - 1


def read_slots(value: Any, layers: int, ranks: int) -> Ints:
    if value is None:
        raise ProblemError("slots_per_rank", "is missing")
    raw, integral = whole(value, "slots_per_rank")
    if raw.ndim == 1 and raw.shape != (ranks,):
        raise ProblemError("slots_per_rank", _entries(raw.size, ranks, "rank"))
    if raw.ndim == 2 and raw.shape != (layers, ranks):
        raise ProblemError("slots_per_rank", f"has shape {list(raw.shape)}, [{layers}, {ranks}] is needed")
    if raw.ndim > 2 or not integral:
        raise ProblemError("slots_per_rank", "must be a whole number, a list per rank or a list per layer and rank")
    if (raw < 0).any():
        raise ProblemError("slots_per_rank", "is negative")
    if raw.max() < 1:
        raise ProblemError("slots_per_rank", "is 0: ranks without slots can hold no expert")
    check_slots(layers, ranks, float(raw.max()))
    return np.broadcast_to(raw, (layers, ranks)).astype(np.int32)


def read_nodes(raw: Mapping[str, Any], ranks: int) -> Ints:
    given = raw.get("node_of_rank")
    if given is not None:
        nodes, integral = whole(given, "node_of_rank")
        if nodes.shape != (ranks,):
            raise ProblemError("node_of_rank", _entries(nodes.size, ranks, "rank"))
        if not integral or (nodes < 0).any():
            raise ProblemError("node_of_rank", "must hold whole numbers from 0")
        # Node names need not be dense; only which ranks share a node matters.
        dense = np.unique(nodes, return_inverse=True)[1]
        count = int(dense.max()) + 1
        if raw.get("nodes") is not None and integer(raw, "nodes", None, 1, MAX_RANKS) != count:
            raise ProblemError("nodes", f"is {raw['nodes']}, but node_of_rank names {count}")
        return dense.astype(np.int32)
    count = integer(raw, "nodes", 1, 1, MAX_RANKS)
    if count > ranks:
        raise ProblemError("nodes", f"is {count}, more than the {counted(ranks, 'rank')}")
    if ranks % count:
        raise ProblemError(
            "nodes", f"{counted(ranks, 'rank')} do not split evenly over {count} nodes; give node_of_rank"
        )
    return (np.arange(ranks) // (ranks // count)).astype(np.int32)


def read_drained(value: Any, ranks: int) -> Bools:
    out = np.zeros(ranks, dtype=np.bool_)
    for rank in listed(value, "drained"):
        if not is_integer(rank) or not 0 <= rank < ranks:
            raise ProblemError("drained", f"{shown(rank)} is not one of the {ranks} ranks")
        out[rank] = True
    if out.all():
        raise ProblemError("drained", "names every rank: no rank is left")
    return out


def read_capacity(value: Any, ranks: int) -> tuple[Floats, Bools]:
    """[R] speeds and the ranks of speed 0, which are as good as drained.

    Others are within a range in which no time of a rank is lost beside another's or leaves single precision.
    """
    raw = array(1.0 if value is None else value, "capacity")
    if raw.ndim > 1:
        raise ProblemError("capacity", "must be a number or a list per rank")
    if raw.ndim == 1 and raw.shape != (ranks,):
        raise ProblemError("capacity", _entries(raw.size, ranks, "rank"))
    if not ((raw == 0) | ((raw >= LEAST_SPEED) & (raw <= MOST_SPEED))).all():
        raise ProblemError(
            "capacity", f"must be {LEAST_SPEED:g} to {MOST_SPEED:g}, 1 is normal, or 0 for a rank to leave"
        )
    if raw.max() <= 0:
        raise ProblemError("capacity", "is 0 on every rank")
    speeds = np.broadcast_to(raw, (ranks,)).astype(np.float64)
    return np.where(speeds > 0, speeds, 1.0), speeds == 0


def read_replicas(value: Any, field: str, default: int, layers: int, experts: int) -> Ints:
    raw, integral = whole(default if value is None else value, field)
    if raw.ndim == 1 and raw.shape != (experts,):
        raise ProblemError(field, _entries(raw.size, experts, "expert"))
    if raw.ndim == 2 and raw.shape != (layers, experts):
        raise ProblemError(field, f"has shape {list(raw.shape)}, [{layers}, {experts}] is needed")
    if raw.ndim > 2 or not integral or (raw < 1).any():
        raise ProblemError(field, "must be a whole number from 1, a list per expert or a list per layer and expert")
    return np.broadcast_to(np.minimum(raw, MOST_COPIES), (layers, experts)).astype(np.int32)


def read_prior(value: Any, layers: int, experts: int, ranks: int, slots: Ints, per_rank: int) -> Ints | None:
    """[L, P]. A layer may be flat (padded to P, or with exactly its slots) or a list per rank; one flat list serves all."""
    if value is None:
        return None
    if isinstance(value, np.ndarray) and value.shape == (layers, ranks * per_rank):
        table = array(value, "prior")
    else:
        rows = listed(value, "prior")
        if rows and not isinstance(rows[0], Sequence | np.ndarray):
            rows = [rows] * layers
        if len(rows) != layers:
            raise ProblemError("prior", f"{counted(len(rows), 'layer')} given, {layers} needed")
        table = np.stack([_prior_row(row, i, slots[i], per_rank) for i, row in enumerate(rows)])
    bad = table[~((table >= EMPTY) & (table < experts) & (np.floor(table) == table))]
    if bad.size:
        raise ProblemError("prior", f"id {bad[0]:g} out of range (0..{experts - 1}, -1 = empty)")
    out: Ints = table.astype(np.int32)
    return out


def _prior_row(row: Any, layer: int, slots: Ints, per_rank: int) -> NDArray[Any]:
    items = list(listed(row, f"prior[{layer}]"))
    ranks = len(slots)
    out = np.full((ranks, per_rank), EMPTY, dtype=np.float64)
    if any(isinstance(item, Sequence | np.ndarray) and not isinstance(item, str) for item in items):
        if len(items) != ranks:
            raise ProblemError(f"prior[{layer}]", f"has {counted(len(items), 'rank')}, {ranks} needed")
        for rank, held in enumerate(items):
            ids = array(held, f"prior[{layer}]")
            if ids.ndim != 1:
                raise ProblemError(f"prior[{layer}]", f"rank {rank} must be a list of expert ids, as other ranks are")
            if ids.size > per_rank:
                raise ProblemError(f"prior[{layer}]", f"rank {rank}: {ids.size} slots, at most {per_rank}")
            out[rank, : ids.size] = ids
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
    raise ProblemError(f"prior[{layer}]", f"has {counted(flat.size, 'slot')}, {ranks * per_rank} needed")


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
    if not is_integer(value):
        raise ProblemError("spread", "must be true, false or a whole number of nodes")
    return integer({"spread": value}, "spread", None, 1, MAX_RANKS)


def _entries(entries: int, needed: int, of: str) -> str:
    """Sentence for a list that is too short or too long."""
    return f"has {counted(entries, 'entry', 'entries')} for {counted(needed, of)}"
