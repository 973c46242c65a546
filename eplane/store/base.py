"""What a store is: revisions, compare-guarded transactions, leases and watches. Every implementation passes one contract suite.

Rules that hold for every store:
- Every change makes the next revision of the whole store; a transaction is one revision.
- There is no plain write. A write is a transaction with at least one compare, so whoever writes says what must be true.
- A transaction is applied at most once, also when its reply is lost and it is sent again (see `once`). If the outcome can
  not be found out in time, `OutcomeUnknown` says so.
- A watch delivers every change of its prefix once, in order, whole revisions at a time, across restarts of the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Protocol

from eplane.errors import InvalidTransaction, TooManyOperations, ValueTooLarge

MAX_OPS = 64
MAX_VALUE_BYTES = 256 * 1024
# etcd takes requests of 1.5 MiB by default.
MAX_TRANSACTION_BYTES = 1280 * 1024
# Bookkeeping of the store itself; no caller sees or touches it.
RESERVED_PREFIX = "~eplane-txn/"


@dataclass(frozen=True, slots=True)
class KeyValue:
    """One key as it stood at some revision. A deleted key in a `Change` has value b"" and create_revision 0."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True, slots=True)
class Exists:
    key: str


@dataclass(frozen=True, slots=True)
class Missing:
    key: str


@dataclass(frozen=True, slots=True)
class ModRevision:
    """The key was last written at `revision` (0: it does not exist)."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class CreateRevision:
    """The key was created at `revision` and has lived since (0: it does not exist)."""

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class ValueIs:
    key: str
    value: bytes


Compare = Exists | Missing | ModRevision | CreateRevision | ValueIs


@dataclass(frozen=True, slots=True)
class Put:
    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    key: str


@dataclass(frozen=True, slots=True)
class DeletePrefix:
    prefix: str


Op = Put | Delete | DeletePrefix


@dataclass(frozen=True, slots=True)
class TxnResult:
    """`revision`: the one that the transaction made, or at which it failed. `found`: on failure, every compared key as it stood."""

    succeeded: bool
    revision: int
    found: Mapping[str, KeyValue | None] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All keys of a prefix as they stood at `revision`, sorted by key."""

    items: tuple[KeyValue, ...]
    revision: int


class ChangeKind(Enum):
    PUT = "put"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Change:
    kind: ChangeKind
    kv: KeyValue


@dataclass(frozen=True, slots=True)
class Batch:
    """Whole revisions of changes, in order; `revision` is the last one in it."""

    revision: int
    events: tuple[Change, ...]


WatchEvent = Batch


@dataclass(frozen=True, slots=True)
class Lease:
    """`ttl_s` is what the server granted, which can be more than was asked for."""

    id: int
    ttl_s: float


@dataclass(frozen=True, slots=True)
class StoreStatus:
    cluster_id: int
    member_id: int
    revision: int
    version: str
    healthy: bool


class Watch(Protocol):
    """An async iterator over the changes of a prefix. Raises `Compacted` when the store no longer has what comes next: list
    again and watch from there. Waiting on it may be cancelled and taken up again; nothing is lost."""

    @property
    def broken_for_s(self) -> float:
        """Seconds since the stream broke and was not yet resumed; 0 while it stands."""

    def __aiter__(self) -> AsyncIterator[WatchEvent]: ...

    async def __anext__(self) -> WatchEvent: ...

    async def aclose(self) -> None: ...


class Store(Protocol):
    """Any method can raise `StoreUnavailable`; what more a method raises stands beside it."""

    async def get(self, key: str) -> KeyValue | None: ...

    async def list(self, prefix: str, *, revision: int | None = None) -> Snapshot:
        """Everything under `prefix`, read in pages at one revision. `Compacted` if that revision is gone."""

    async def transact(self, compares: Sequence[Compare], ops: Sequence[Op]) -> TxnResult:
        """Apply all `ops` if all `compares` hold, else none. `OutcomeUnknown` if that can not be found out in time."""

    def watch(self, prefix: str, *, from_revision: int) -> Watch:
        """Changes from `from_revision` on (included). After a `list`, watch from its revision + 1."""

    async def lease_grant(self, ttl_s: float) -> Lease: ...

    async def lease_revoke(self, lease: Lease) -> None:
        """End the lease and delete its keys. A lease that is gone already is no error."""

    async def lease_keepalive(self, lease: Lease) -> float:
        """Ask once, with a deadline, and return the seconds left. `LeaseLost` if the lease is gone.

        Never retried here: the keeper counts from before each single request.
        """

    async def status(self) -> StoreStatus: ...

    async def close(self) -> None: ...


def holds(compare: Compare, found: KeyValue | None) -> bool:
    """Whether `compare` is true of its key as found."""
    match compare:
        case Exists():
            return found is not None
        case Missing():
            return found is None
        case ModRevision(revision=revision):
            return (found.mod_revision if found else 0) == revision
        case CreateRevision(revision=revision):
            return (found.create_revision if found else 0) == revision
        case ValueIs(value=value):
            return found is not None and found.value == value


def failed_compares(result: TxnResult, compares: Sequence[Compare]) -> tuple[Compare, ...]:
    """Which of the compares did not hold; empty after a success."""
    if result.succeeded:
        return ()
    return tuple(compare for compare in compares if not holds(compare, result.found.get(compare.key)))


def check_key(key: str) -> None:
    if not key or "\0" in key:
        raise InvalidTransaction(f"{key!r} is no key: a key is a non-empty text without NUL")
    if key.startswith(RESERVED_PREFIX):
        raise InvalidTransaction(f"{key!r} lies under {RESERVED_PREFIX!r}, which the store keeps for itself")


def check_transaction(compares: Sequence[Compare], ops: Sequence[Op]) -> None:
    """Refuse what no store would take, with the same error from every store, before anything is sent."""
    if not compares:
        raise InvalidTransaction("a write without a compare: say what must be true for it to be applied")
    if not ops:
        raise InvalidTransaction("a transaction without an operation: use get or list to read")
    for what, count in (("operations", len(ops)), ("compares", len(compares))):
        if count > MAX_OPS:
            raise TooManyOperations(f"{count} {what} in one transaction, {MAX_OPS} are allowed: split it")
    for compare in compares:
        check_key(compare.key)
    _check_ops(ops)


def _check_ops(ops: Sequence[Op]) -> None:
    total, puts, deleted = 0, set[str](), list[Delete | DeletePrefix]()
    for op in ops:
        match op:
            case Put(key=key, value=value):
                check_key(key)
                if len(value) > MAX_VALUE_BYTES:
                    raise ValueTooLarge(f"{key}: {len(value)} bytes, {MAX_VALUE_BYTES} are allowed: store it in parts")
                if key in puts:
                    raise InvalidTransaction(f"{key} is put twice in one transaction")
                puts.add(key)
                total += len(value) + len(key.encode())
            case Delete(key=key):
                check_key(key)
                deleted.append(op)
            case DeletePrefix(prefix=prefix):
                if not prefix or RESERVED_PREFIX.startswith(prefix):
                    raise InvalidTransaction(f"deleting everything under {prefix!r} would take the store's own keys")
                check_key(prefix)
                deleted.append(op)
    if total > MAX_TRANSACTION_BYTES:
        raise ValueTooLarge(f"{total} bytes in one transaction, {MAX_TRANSACTION_BYTES} are allowed: split it")
    for op in deleted:
        both = next((key for key in puts if covers(op, key)), None)
        if both is not None:
            raise InvalidTransaction(f"{both} is put and deleted in one transaction")


def covers(op: Delete | DeletePrefix, key: str) -> bool:
    return key == op.key if isinstance(op, Delete) else key.startswith(op.prefix)
