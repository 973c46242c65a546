"""EPlane's words for what etcd speaks, and back. Pure translation; messages come from the module `etcd3` (cslab-etcd3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from etcd3 import etcdrpc

from eplane.errors import (
    Compacted,
    HistoryLost,
    LeaseLost,
    StoreDenied,
    StoreError,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
)
from eplane.store.base import (
    RESERVED_PREFIX,
    Change,
    ChangeKind,
    Compare,
    CreateRevision,
    Delete,
    DeletePrefix,
    Exists,
    KeyValue,
    Missing,
    ModRevision,
    Op,
    Put,
    ValueIs,
)
from eplane.store.once import Attempt, Unanswered

# Messages are typed `Any`: the module has no type information.
Message = Any

# Codes after which nobody can say whether the request was applied.
_UNANSWERED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)


def encode(key: str) -> bytes:
    return key.encode("utf-8", "surrogateescape")


def decode(key: bytes) -> str:
    """Foreign keys under a watched prefix may be any bytes; they survive the round trip."""
    return key.decode("utf-8", "surrogateescape")


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """First key and end (not included) of a prefix, as etcd wants them; NUL, NUL is everything."""
    start = encode(prefix)
    stripped = start.rstrip(b"\xff")
    if not stripped:
        return (start or b"\0"), b"\0"
    return start, stripped[:-1] + bytes([stripped[-1] + 1])


def key_value(message: Message) -> KeyValue:
    return KeyValue(
        decode(message.key),
        message.value,
        message.create_revision,
        message.mod_revision,
        message.version,
        message.lease,
    )


def visible(messages: Iterable[Message]) -> Iterable[KeyValue]:
    """All but the store's own bookkeeping."""
    return (kv for kv in map(key_value, messages) if not kv.key.startswith(RESERVED_PREFIX))


def changes(events: Iterable[Message]) -> tuple[Change, ...]:
    found = []
    for event in events:
        kv = key_value(event.kv)
        if not kv.key.startswith(RESERVED_PREFIX):
            found.append(Change(ChangeKind.DELETE if event.type else ChangeKind.PUT, kv))
    return tuple(found)


def transaction(attempt: Attempt) -> Message:
    reads = [etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=encode(key))) for key in attempt.reads]
    return etcdrpc.TxnRequest(compare=_compares(attempt.compares), success=_ops(attempt.ops), failure=reads)


def _compares(compares: Sequence[Compare]) -> list[Message]:
    kind = etcdrpc.Compare
    found = []
    for compare in compares:
        key = encode(compare.key)
        match compare:
            case Exists():
                found.append(kind(result=kind.GREATER, target=kind.CREATE, key=key, create_revision=0))
            case Missing():
                found.append(kind(result=kind.EQUAL, target=kind.CREATE, key=key, create_revision=0))
            case ModRevision(revision=revision):
                found.append(kind(result=kind.EQUAL, target=kind.MOD, key=key, mod_revision=revision))
            case CreateRevision(revision=revision):
                found.append(kind(result=kind.EQUAL, target=kind.CREATE, key=key, create_revision=revision))
            case ValueIs(value=value):
                found.append(kind(result=kind.EQUAL, target=kind.VALUE, key=key, value=value))
    return found


def _ops(ops: Sequence[Op]) -> list[Message]:
    found = []
    for op in ops:
        match op:
            case Put(key=key, value=value, lease=lease):
                put = etcdrpc.PutRequest(key=encode(key), value=value, lease=lease)
                found.append(etcdrpc.RequestOp(request_put=put))
            case Delete(key=key):
                one = etcdrpc.DeleteRangeRequest(key=encode(key))
                found.append(etcdrpc.RequestOp(request_delete_range=one))
            case DeletePrefix(prefix=prefix):
                start, end = prefix_range(prefix)
                many = etcdrpc.DeleteRangeRequest(key=start, range_end=end)
                found.append(etcdrpc.RequestOp(request_delete_range=many))
    return found


class StaleLogin(StoreDenied):
    """The token ran out, or is older than the last change of users. Nothing was applied: log in and ask again."""


def translate(code: grpc.StatusCode, details: str, where: str) -> StoreError:
    """What an etcd error means to the caller. `Unanswered` may be tried again."""
    told = f"etcd at {where}: {details or code.name}"
    if code in _UNANSWERED:
        return Unanswered(told)
    for words, kind in _BY_WORDS:
        if words in details:
            return kind(told, 0) if issubclass(kind, Compacted) else kind(told)
    return _BY_CODE.get(code, StoreRefused)(told)


_BY_WORDS: tuple[tuple[str, type[StoreError]], ...] = (
    ("requested lease not found", LeaseLost),
    ("has been compacted", Compacted),
    ("future revision", HistoryLost),
    ("database space exceeded", StoreFull),
    ("revision in header is old", StaleLogin),
    ("user name is empty", StaleLogin),
    ("invalid auth token", StaleLogin),
    ("authentic", StoreDenied),
)
_BY_CODE: dict[grpc.StatusCode, type[StoreError]] = {
    grpc.StatusCode.UNAUTHENTICATED: StaleLogin,
    grpc.StatusCode.PERMISSION_DENIED: StoreDenied,
    # Too many requests: none of them was taken.
    grpc.StatusCode.RESOURCE_EXHAUSTED: Unanswered,
}


def out_of_time(last: StoreUnavailable, endpoints: Sequence[str], seconds: float) -> StoreUnavailable:
    return StoreUnavailable(f"no etcd answers at {', '.join(endpoints)} within {seconds:g} s; last: {last}")
