"""Sampled routings: which experts single tokens went to together. Every refusal names the field, layer and row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from controller.solver.problem import EMPTY, Ints, frozen
from eplane.errors import ProblemError
from eplane.wording import counted

FIELD = "routing_sample"


def read_routing_sample(value: Any, layers: int, experts: int) -> tuple[Ints, ...] | None:
    """One `[n, K]` array of expert ids a layer, n and K its own; -1 pads a short tuple, a row of -1 alone is dropped.

    value: a list per layer (null: no tuples), or one array [L, n, K] in which layers with fewer tuples end in rows of -1.
    """
    if value is None:
        return None
    if len(_sized(value, "must be a list with the tuples of each layer")) != layers:
        raise ProblemError(FIELD, f"{counted(len(value), 'layer')} given, {layers} needed")
    return tuple(frozen(_layer(rows, layer, experts)) for layer, rows in enumerate(value))


def _layer(rows: Any, layer: int, experts: int) -> Ints:
    if rows is None or len(_sized(rows, f"layer {layer} must be a list of tuples")) == 0:
        return np.empty((0, 1), dtype=np.int32)
    if not isinstance(rows, np.ndarray):
        _check_rows(rows, layer)
    table = np.asarray(rows)
    if table.ndim != 2 or table.dtype.kind not in "iuf":
        raise ProblemError(FIELD, f"layer {layer} is no table [tuples][experts of a token]")
    wrong = ~((table >= EMPTY) & (table < experts))
    out = np.where(wrong, EMPTY, table).astype(np.int32)
    wrong |= out != table
    if wrong.any():
        row, place = np.argwhere(wrong)[0].tolist()
        raise ProblemError(
            FIELD, f"layer {layer}, row {row}: id {table[row, place]:g} out of range (0..{experts - 1}, -1 = none)"
        )
    ordered = np.sort(out, axis=1)
    again = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != EMPTY)
    if again.any():
        row, place = np.argwhere(again)[0].tolist()
        raise ProblemError(FIELD, f"layer {layer}, row {row}: names expert {ordered[row, place + 1]} twice")
    used: Ints = out[(out != EMPTY).any(axis=1)]
    return used


def _check_rows(rows: Sequence[Any], layer: int) -> None:
    """Raise for the first row that is no list of numbers as long as the first."""
    for number, row in enumerate(rows):
        here = f"layer {layer}, row {number}"
        size = len(_sized(row, f"{here} must be a list of expert ids"))
        if size != len(rows[0]):
            raise ProblemError(
                FIELD, f"{here} has {counted(size, 'id')}, the rows before it {len(rows[0])}; pad with -1"
            )
        for item in row:
            if isinstance(item, bool) or not isinstance(item, int | float | np.number):
                raise ProblemError(FIELD, f"{here}: {item!r} is no expert id")


def _sized(value: Any, otherwise: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence | np.ndarray):
        raise ProblemError(FIELD, otherwise)
    if isinstance(value, np.ndarray) and value.ndim == 0:
        raise ProblemError(FIELD, otherwise)
    return value  # type: ignore[return-value]
