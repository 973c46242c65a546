"""How every record is stored: `{"v": 1, "record": <kind>, ...}`, at most 256 KiB, read strictly.

A record is a small frozen dataclass with `KIND`, `body` (plain JSON) and `read`. Whoever reads gets a whole record of the
kind and version asked for, or a RecordError that names the field.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import ClassVar, Protocol, Self, TypeVar

from eplane.errors import InvariantBroken, PlacementError, PlanError, RecordError, TopologyError
from eplane.fields import Fields
from eplane.store.base import MAX_VALUE_BYTES

NONCE_DIGITS = 16
VERSION = 1


class Record(Protocol):
    """What `encode` and `decode` need of a record."""

    KIND: ClassVar[str]

    def body(self) -> dict[str, object]: ...

    @classmethod
    def read(cls, fields: Fields) -> Self: ...


SomeRecord = TypeVar("SomeRecord", bound=Record)


def new_nonce() -> str:
    return secrets.token_hex(NONCE_DIGITS // 2)


def encode(record: Record) -> bytes:
    """The stored form. Raises RecordError if it would be over 256 KiB or holds what JSON has no word for."""
    return to_bytes(record.KIND, record.body())


def decode(kind: type[SomeRecord], raw: bytes) -> SomeRecord:
    """The record in `raw`. Raises RecordError, naming the field, for anything but a whole record of this kind."""
    fields = open_record(kind.KIND, raw)
    try:
        result = kind.read(fields)
    except (TopologyError, PlacementError, PlanError, InvariantBroken) as error:
        raise RecordError(kind.KIND, f"contradicts itself: {error}") from error
    fields.done()
    return result


def to_bytes(kind: str, body: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps({**body, "v": VERSION, "record": kind}, separators=(",", ":"), allow_nan=False)
        raw = text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise RecordError(kind, f"can not be written as JSON: {error}") from None
    if len(raw) > MAX_VALUE_BYTES:
        raise RecordError(kind, f"would be {len(raw)} bytes, {MAX_VALUE_BYTES} are allowed")
    return raw


def open_record(kind: str, raw: bytes) -> Fields:
    """The fields of a stored value, version and kind checked."""
    if len(raw) > MAX_VALUE_BYTES:
        raise RecordError(kind, f"is {len(raw)} bytes, {MAX_VALUE_BYTES} are allowed")
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_twins)
    except RecordError as error:
        raise RecordError(f"{kind}.{error.field}", error.reason) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(kind, f"is not JSON: {error}") from None
    fields = Fields(data, kind)
    fields.version(VERSION)
    found = fields.text("record", most=40)
    if found != kind:
        raise fields.wrong("record", f"is {found!r}")
    return fields


def signed(actor: str, reason: str, at: float, nonce: str) -> dict[str, object]:
    return {"actor": actor, "reason": reason, "at": at, "nonce": nonce}


def read_signed(fields: Fields) -> tuple[str, str, float, str]:
    return fields.text("actor"), fields.text("reason", empty=True), read_at(fields), read_nonce(fields)


def read_at(fields: Fields) -> float:
    return fields.number("at", low=0)


def read_nonce(fields: Fields) -> str:
    return fields.hexes("nonce", NONCE_DIGITS)


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for name, value in pairs:
        if name in result:
            raise RecordError(name[:60], "stands there twice")
        result[name] = value
    return result
