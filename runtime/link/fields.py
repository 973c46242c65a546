"""Reading a JSON object field by field: what comes from outside is parsed once, here, or refused with its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from eplane.errors import MessageError

T = TypeVar("T")
MAX_INT = 2**63 - 1
MAX_TEXT = 4096


class Fields:
    """One JSON object of a message; `where` names it in sentences."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise MessageError(f"{where} must be an object, got {type(value).__name__}")
        self._value: Mapping[str, object] = value
        self._where = where

    def _get(self, key: str) -> object:
        if key not in self._value:
            raise MessageError(f"{self._where} lacks {key!r}")
        return self._value[key]

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise MessageError(f"{self._where}.{key} must be a text of at most {MAX_TEXT} characters")
        return value

    def text_or_none(self, key: str) -> str | None:
        return None if self._get(key) is None else self.text(key)

    def integer(self, key: str, low: int = 0, high: int = MAX_INT) -> int:
        return as_integer(self._get(key), f"{self._where}.{key}", low, high)

    def integer_or_none(self, key: str, low: int = 0) -> int | None:
        return None if self._get(key) is None else self.integer(key, low)

    def number_or_none(self, key: str) -> float | None:
        """A finite number above 0, or null."""
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise MessageError(f"{self._where}.{key} must be a number above 0 or null, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key)
        if not isinstance(value, bool):
            raise MessageError(f"{self._where}.{key} must be true or false, got {value!r}")
        return value

    def items(self, key: str) -> list[object]:
        value = self._get(key)
        if not isinstance(value, list):
            raise MessageError(f"{self._where}.{key} must be a list, got {type(value).__name__}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        values = self.items(key)
        texts = tuple(v for v in values if isinstance(v, str) and len(v) <= MAX_TEXT)
        if len(texts) != len(values):
            raise MessageError(f"{self._where}.{key} must be a list of texts")
        return texts

    def nested(self, key: str) -> Fields:
        return Fields(self._get(key), f"{self._where}.{key}")

    def nested_or_none(self, key: str) -> Fields | None:
        return None if self._get(key) is None else self.nested(key)

    def pairs(self, key: str) -> list[tuple[str, object]]:
        value = self._get(key)
        if not isinstance(value, Mapping):
            raise MessageError(f"{self._where}.{key} must be an object")
        return [(str(name), item) for name, item in value.items()]

    def choice(self, key: str, make: Callable[[str], T]) -> T:
        """A text that `make` (a StrEnum) knows."""
        text = self.text(key)
        try:
            return make(text)
        except ValueError:
            raise MessageError(f"{self._where}.{key} is unknown: {text!r}") from None

    def integers_2d(self, key: str) -> NDArray[np.int32]:
        value = self._table(key)
        if value.dtype.kind != "i" or value.min() < -(2**31) or value.max() >= 2**31:
            raise MessageError(f"{self._where}.{key} must be a table of integers")
        return value.astype(np.int32)

    def numbers_2d_or_none(self, key: str) -> NDArray[np.float64] | None:
        if self._get(key) is None:
            return None
        value = self._table(key)
        if value.dtype.kind not in "if" or not np.isfinite(value).all():
            raise MessageError(f"{self._where}.{key} must be a table of finite numbers")
        return value.astype(np.float64)

    def _table(self, key: str) -> NDArray[np.generic]:
        try:
            table = np.array(self.items(key))
        except (ValueError, OverflowError):
            raise MessageError(f"{self._where}.{key} has rows of different lengths") from None
        if table.ndim != 2 or table.size == 0:
            raise MessageError(f"{self._where}.{key} must be a table of two dimensions, got shape {table.shape}")
        return table


def as_integer(value: object, where: str, low: int = 0, high: int = MAX_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise MessageError(f"{where} must be a whole number from {low} to {high}, got {value!r}")
    return value


def as_integers(value: object, count: int, where: str, low: int = 0) -> tuple[int, ...]:
    """A list of exactly `count` whole numbers."""
    if not isinstance(value, list) or len(value) != count:
        raise MessageError(f"{where} must be a list of {count} numbers, got {value!r}")
    return tuple(as_integer(item, where, low, 2**31) for item in value)
