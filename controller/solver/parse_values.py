"""Readers of single values of the JSON form. Every refusal names the field."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from controller.solver.problem import Floats, RankCost, ShareMode, Strategy
from eplane.errors import ProblemError

Choice = TypeVar("Choice", ShareMode, Strategy, RankCost)

# A sentence stays one line, whatever was given.
_SHORT = reprlib.Repr()
_SHORT.maxlong = _SHORT.maxstring = _SHORT.maxother = 40
_SHORT.maxlevel = 2
shown = _SHORT.repr
LONGEST_NAME = 100


def array(value: Any, field: str) -> Floats:
    if isinstance(value, np.ndarray) and value.dtype.kind in "iuf":
        return value.astype(np.float64)
    if not _numbers_alone(value):
        raise ProblemError(field, "holds something that is not a number")
    try:
        out = np.asarray(value)
    except ValueError as error:
        raise ProblemError(field, "is not rectangular") from error
    try:
        return out.astype(np.float64)
    except OverflowError:
        raise ProblemError(field, "holds a number that is too large") from None


def whole(value: Any, field: str) -> tuple[Floats, bool]:
    """The array, and whether it holds finite whole numbers alone."""
    out = array(value, field)
    return out, bool((np.isfinite(out) & (np.floor(out) == out)).all())


def _numbers_alone(value: Any) -> bool:
    """Whether all that nested lists hold are numbers. True and false are none, though an array would take them for 1 and 0."""
    left = [value]
    while left:
        item = left.pop()
        if isinstance(item, Sequence) and not isinstance(item, str | bytes):
            # By kind: a row of a load has thousands of numbers, and few kinds.
            if not all(_is_number(kind) for kind in set(map(type, item))):
                left.extend(inner for inner in item if not _is_number(type(inner)))
        elif isinstance(item, np.ndarray):
            if item.dtype.kind not in "iuf":
                return False
        elif not _is_number(type(item)):
            return False
    return True


def _is_number(kind: type) -> bool:
    return issubclass(kind, int | float | np.integer | np.floating) and kind is not bool


def listed(value: Any, field: str) -> Sequence[Any]:
    if value is None:
        return []
    if isinstance(value, np.ndarray) and value.ndim:
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
    if not is_integer(value) and not (isinstance(value, float) and value.is_integer()):
        raise ProblemError(field, f"must be a whole number, not {shown(value)}")
    if not low <= value <= high:
        raise ProblemError(field, f"is {shown(value)}, must be {low} to {high}")
    return int(value)


def optional_integer(raw: Mapping[str, Any], name: str, low: int) -> int | None:
    return None if raw.get(name) is None else integer(raw, name, None, low, 1 << 62)


def optional_number(raw: Mapping[str, Any], name: str, low: float) -> float | None:
    value = raw.get(name)
    if value is None:
        return None
    if not _is_number(type(value)) or not _is_finite(value):
        raise ProblemError(name, f"must be a number, not {shown(value)}")
    if value < low:
        raise ProblemError(name, f"is {shown(value)}, must be at least {low:g}")
    return float(value)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def boolean(raw: Mapping[str, Any], name: str, default: bool) -> bool:
    value = raw.get(name, default)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ProblemError(name, f"must be true or false, not {shown(value)}")
    return value


def text(raw: Mapping[str, Any], name: str, default: str) -> str:
    value = raw.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or not 0 < len(value) <= LONGEST_NAME:
        raise ProblemError(name, f"must be a name, not {shown(value)}")
    return value


def member(raw: Mapping[str, Any], name: str, kind: type[Choice], default: Choice) -> Choice:
    value = raw.get(name)
    if value is None:
        return default
    try:
        return kind(value)
    except ValueError:
        raise ProblemError(name, f"is {shown(value)}, must be one of {', '.join(kind)}") from None
