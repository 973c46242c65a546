"""Reading one JSON object from outside, field by field. Every refusal names the path of the field it is about.

A record is read once, here, into a frozen dataclass; nothing downstream sees the raw object. JSON's looseness stops
here too: NaN and infinities, booleans posing as numbers, numbers out of range, unknown fields and unknown versions.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from eplane.errors import FieldError, RecordError

MAX_INT = 2**63 - 1
MAX_TEXT = 4096
# The most a packed array may unfold to; keeps a small hostile text from filling the memory.
MAX_UNPACKED_BYTES = 16 * 1024 * 1024

Named = TypeVar("Named", bound=Enum)
Read = TypeVar("Read")
Refuse = Callable[[str, str], FieldError]


class Fields:
    """One JSON object being read. `refuse(path, reason)` makes the error that is raised."""

    __slots__ = ("_data", "_known", "_path", "refuse")

    def __init__(self, data: object, path: str, refuse: Refuse = RecordError) -> None:
        if not isinstance(data, Mapping):
            raise refuse(path or "record", f"must be an object, got {type(data).__name__}")
        self._data: Mapping[object, object] = data
        self._known: set[str] = set()
        self._path = path
        self.refuse = refuse

    def path(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def wrong(self, name: str, reason: str) -> FieldError:
        return self.refuse(self.path(name), reason)

    def value(self, name: str) -> object:
        self._known.add(name)
        if name not in self._data:
            raise self.wrong(name, "is missing")
        return self._data[name]

    def version(self, known: int = 1) -> None:
        found = self.value("v")
        if isinstance(found, bool) or found != known:
            raise self.wrong("v", f"version {found!r} is not known here, {known} is; update this program first")

    def text(self, name: str, *, most: int = MAX_TEXT, empty: bool = False) -> str:
        found = self.value(name)
        if not isinstance(found, str):
            raise self.wrong(name, f"must be text, got {type(found).__name__}")
        if not found and not empty:
            raise self.wrong(name, "is empty")
        if len(found) > most:
            raise self.wrong(name, f"has {len(found)} characters, {most} are allowed")
        if not _whole(found):
            raise self.wrong(name, "holds half a character")
        return found

    def integer(self, name: str, *, low: int = 0, high: int = MAX_INT) -> int:
        return self._integer(self.value(name), name, low, high)

    def number(self, name: str, *, low: float = -math.inf, high: float = math.inf) -> float:
        found = self.value(name)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.wrong(name, f"must be a number, got {type(found).__name__}")
        try:
            number = float(found)
        except OverflowError:
            raise self.wrong(name, "is too large a number") from None
        if not math.isfinite(number):
            raise self.wrong(name, f"must be finite, got {number}")
        if not low <= number <= high:
            raise self.wrong(name, f"is {number}, must be from {low} to {high}")
        return number

    def flag(self, name: str) -> bool:
        found = self.value(name)
        if not isinstance(found, bool):
            raise self.wrong(name, f"must be true or false, got {found!r:.40}")
        return found

    def choice(self, name: str, kind: type[Named]) -> Named:
        found = self.value(name)
        for member in kind:
            if isinstance(found, str) and member.value == found:
                return member
        raise self.wrong(name, f"is {found!r:.40}, must be one of {', '.join(str(m.value) for m in kind)}")

    def hexes(self, name: str, digits: int) -> str:
        """Lower-case hexadecimal text of exactly `digits` digits: a digest or a random id."""
        found = self.text(name)
        if len(found) != digits or not set(found) <= set("0123456789abcdef"):
            raise self.wrong(name, f"must be {digits} lower-case hexadecimal digits, got {found!r:.60}")
        return found

    def maybe(self, name: str, read: Callable[[str], Read]) -> Read | None:
        """`read(name)`, or None where the field is null or missing."""
        self._known.add(name)
        return None if self._data.get(name) is None else read(name)

    def within(self, name: str) -> Fields:
        return Fields(self.value(name), self.path(name), self.refuse)

    def replaced(self, name: str, value: object) -> Fields:
        """The same object with `value` for `name`; what was read stays read."""
        other = Fields({**self._data, name: value}, self._path, self.refuse)
        other._known = self._known
        return other

    def items(self, name: str, *, most: int = 1 << 20) -> Sequence[object]:
        found = self.value(name)
        if not isinstance(found, list | tuple):
            raise self.wrong(name, f"must be a list, got {type(found).__name__}")
        if len(found) > most:
            raise self.wrong(name, f"has {len(found)} entries, {most} are allowed")
        return found

    def texts(self, name: str, *, most: int = 1 << 16) -> tuple[str, ...]:
        found = self.items(name, most=most)
        result: list[str] = []
        for at, item in enumerate(found):
            if not isinstance(item, str) or not 0 < len(item) <= MAX_TEXT or not _whole(item):
                raise self.wrong(f"{name}[{at}]", "must be a text that is neither empty nor too long")
            result.append(item)
        return tuple(result)

    def integers(self, name: str, *, low: int = 0, high: int = MAX_INT, most: int = 1 << 20) -> tuple[int, ...]:
        found = self.items(name, most=most)
        return tuple(self._integer(item, f"{name}[{at}]", low, high) for at, item in enumerate(found))

    def objects(self, name: str, *, most: int = 1 << 16) -> tuple[Fields, ...]:
        found = self.items(name, most=most)
        return tuple(Fields(item, f"{self.path(name)}[{at}]", self.refuse) for at, item in enumerate(found))

    def counts(self, name: str, *, most: int = 1 << 16) -> Mapping[str, int]:
        """An object of whole numbers that are not negative, by name."""
        found = self.value(name)
        if not isinstance(found, Mapping) or len(found) > most:
            raise self.wrong(name, f"must be an object of at most {most} numbers")
        result = {str(key): self._integer(item, f"{name}.{key!s:.60}", 0, MAX_INT) for key, item in found.items()}
        return MappingProxyType(result)

    def packed(self, name: str, shape: tuple[int, ...]) -> NDArray[np.int32]:
        """An int32 array written by `pack`, of exactly `shape`; -1 in `shape` leaves that length open."""
        found = self.within(name)
        lengths = found.integers("shape", high=1 << 31, most=8)
        if len(lengths) != len(shape) or any(w not in (-1, n) for n, w in zip(lengths, shape, strict=True)):
            raise found.wrong("shape", f"is {list(lengths)}, must be {list(shape)}")
        size = math.prod(lengths) * 4
        if size > MAX_UNPACKED_BYTES:
            raise found.wrong("shape", f"unfolds to {size} bytes, {MAX_UNPACKED_BYTES} are allowed")
        raw = _unfold(found, size)
        found.done()
        return np.frombuffer(raw, dtype="<i4").reshape(lengths).astype(np.int32)

    def done(self) -> None:
        """Refuse fields that nobody read: a record with more in it than is known must not be acted on."""
        for name in self._data:
            if name not in self._known:
                raise self.wrong(str(name)[:60], "is not a known field")

    def _integer(self, found: object, name: str, low: int, high: int) -> int:
        if isinstance(found, bool) or not isinstance(found, int):
            raise self.wrong(name, f"must be a whole number, got {found!r:.40}")
        if not low <= found <= high:
            raise self.wrong(name, f"is {found if abs(found) <= MAX_INT else 'huge'}, must be from {low} to {high}")
        return found


def pack(table: NDArray[np.int32]) -> dict[str, object]:
    """An int32 array as `{"shape": [...], "data": base64 of zlib of little-endian int32}`."""
    raw = np.ascontiguousarray(table, dtype="<i4").tobytes()
    return {"shape": list(table.shape), "data": base64.b64encode(zlib.compress(raw, 6)).decode("ascii")}


def inflate(chunk: bytes, size: int) -> bytes:
    """`chunk` unfolded by zlib to exactly `size` bytes; ValueError with the reason otherwise. Never unfolds more."""
    worker = zlib.decompressobj()
    try:
        raw = worker.decompress(chunk, size + 1)
    except zlib.error as error:
        raise ValueError(f"is not zlib data ({error})") from None
    if len(raw) != size or not worker.eof or worker.unused_data:
        raise ValueError(f"unfolds to other than {size} bytes")
    return raw


def _whole(text: str) -> bool:
    """JSON can spell halves of surrogate pairs; such a text can be neither shown nor written anywhere."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _unfold(found: Fields, size: int) -> bytes:
    text = found.text("data", most=2 * MAX_UNPACKED_BYTES)
    try:
        return inflate(base64.b64decode(text.encode("ascii"), validate=True), size)
    except (binascii.Error, UnicodeEncodeError):
        raise found.wrong("data", "is not base64") from None
    except ValueError as error:
        raise found.wrong("data", str(error)) from None
