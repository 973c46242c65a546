"""Readers of single values of the JSON form. Every refusal names the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from controller.solver.problem import Floats, RankCost, ShareMode, Strategy
from eplane.errors import ProblemError

Choice = TypeVar("Choice", ShareMode, Strategy, RankCost)


def array(value: Any, field: str) -> Floats:
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


def listed(value: Any, field: str) -> Sequence[Any]:
    if value is None:
        return []
    if isinstance(value, np.ndarray):
        return list(value)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ProblemError(field, "must be a list")
    return value


def is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def integer(raw: Mapping[str, Any], name: str, default: int | None, low: int, high: int, inside: str = "") -> int:
    field = f"{inside}.{name}" if inside else name
    value = raw.get(name)
    if value is None:
        if default is None:
            raise ProblemError(field, "is missing")
        return default
    if isinstance(value, float) and value == int(value if math.isfinite(value) else 0):
        value = int(value)
    if not is_integer(value):
        raise ProblemError(field, f"must be a whole number, not {value!r}")
    if not low <= value <= high:
        raise ProblemError(field, f"is {value}, must be {low} to {high}")
    return int(value)


def optional_integer(raw: Mapping[str, Any], name: str, low: int) -> int | None:
    return None if raw.get(name) is None else integer(raw, name, None, low, 1 << 62)


def optional_number(raw: Mapping[str, Any], name: str, low: float) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not math.isfinite(float(value)):
        raise ProblemError(name, f"must be a number, not {value!r}")
    if value < low:
        raise ProblemError(name, f"is {value}, must be at least {low:g}")
    return float(value)


def boolean(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ProblemError(name, f"must be true or false, not {value!r}")
    return value


def text(raw: Mapping[str, Any], name: str, default: str) -> str:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or not value:
        raise ProblemError(name, f"must be a name, not {value!r}")
    return value


def member(raw: Mapping[str, Any], name: str, kind: type[Choice], default: Choice) -> Choice:
    value = raw.get(name)
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError:
        raise ProblemError(name, f"is {value!r}, must be one of {', '.join(kind)}") from None
