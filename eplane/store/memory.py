"""A store in memory: for the simulator and for tests. Any number of clients (`connect`) share one state.

It behaves as etcd does, revisions included, and passes the same contract suite. Time comes from a `Clock`, and `Faults` lose
requests and replies, hold requests back and cut the store off, so that every interleaving can be made on purpose.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from eplane.clock import Clock, SystemClock
from eplane.errors import Compacted, HistoryLost, LeaseLost, StoreClosed, StoreUnavailable
from eplane.store.base import (
    RESERVED_PREFIX,
    Batch,
    Change,
    ChangeKind,
    Compare,
    Delete,
    DeletePrefix,
    KeyValue,
    Lease,
    Op,
    Put,
    Snapshot,
    StoreStatus,
    TxnResult,
    check_key,
    covers,
    holds,
)
from eplane.store.once import Answer, Attempt, Transactor, Unanswered

_ATTEMPTS = 8


class Fault(Enum):
    """What becomes of one request of a transaction."""

    LOSE_REQUEST = "lose-request"  # never arrives
    LOSE_REPLY = "lose-reply"  # is applied, the client never hears of it
    HOLD = "hold"  # no answer, and arrives only when `MemoryStore.release_held` is called


@dataclass(slots=True)
class Faults:
    """Faults by the number of the request (the first is 1); a transaction sent again counts again. Change it at any time."""

    transactions: Mapping[int, Fault] = field(default_factory=dict)
    unavailable: bool = False


@dataclass(slots=True)
class _Granted:
    ttl_s: float
    expires_at: float
    keys: set[str] = field(default_factory=set)


class _State:
    """The server: one revision counter, the live keys, the log of changes, the leases."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.revision = 1
        self.compacted = 0
        self.keys: dict[str, KeyValue] = {}
        # `log` is every change after revision `compacted`, `base` what lived then.
        self.base: dict[str, KeyValue] = {}
        self.log: list[tuple[int, tuple[Change, ...]]] = []
        self.leases: dict[int, _Granted] = {}
        self.lease_ids = itertools.count(1)
        self.held: list[Attempt] = []
        self.changed = asyncio.Event()
        self.expiry: asyncio.Task[None] | None = None

    def apply(self, attempt: Attempt) -> Answer:
        self.expire()
        if not all(holds(compare, self.keys.get(compare.key)) for compare in attempt.compares):
            return Answer(False, self.revision, tuple(self.keys.get(key) for key in attempt.reads))
        for op in attempt.ops:
            if isinstance(op, Put) and op.lease and op.lease not in self.leases:
                raise LeaseLost(f"lease {op.lease} is gone")
        self.change(attempt.ops)
        return Answer(True, self.revision, ())

    def change(self, ops: Sequence[Op]) -> None:
        """One revision. Deleting what is not there changes nothing, as in etcd."""
        revision = self.revision + 1
        changes: list[Change] = []
        for op in ops:
            if isinstance(op, Put):
                changes.append(self._put(op, revision))
            else:
                changes.extend(self._delete(op, revision))
        if changes:
            self.revision = revision
            self.log.append((revision, tuple(changes)))
            self.changed.set()
            self.changed = asyncio.Event()

    def _put(self, op: Put, revision: int) -> Change:
        old = self.keys.get(op.key)
        if old is not None and old.lease in self.leases:
            self.leases[old.lease].keys.discard(op.key)
        created, version = (old.create_revision, old.version + 1) if old else (revision, 1)
        kv = KeyValue(op.key, op.value, created, revision, version, op.lease)
        self.keys[op.key] = kv
        if op.lease:
            self.leases[op.lease].keys.add(op.key)
        return Change(ChangeKind.PUT, kv)

    def _delete(self, op: Delete | DeletePrefix, revision: int) -> list[Change]:
        gone = sorted(key for key in self.keys if covers(op, key))
        for key in gone:
            lease = self.leases.get(self.keys.pop(key).lease)
            if lease is not None:
                lease.keys.discard(key)
        return [Change(ChangeKind.DELETE, KeyValue(key, b"", 0, revision, 0, 0)) for key in gone]

    def grant(self, ttl_s: float) -> Lease:
        self.expire()
        ttl = float(max(1, math.ceil(ttl_s)))
        lease = Lease(next(self.lease_ids), ttl)
        self.leases[lease.id] = _Granted(ttl, self.clock.monotonic() + ttl)
        if self.expiry is None or self.expiry.done():
            self.expiry = asyncio.get_running_loop().create_task(self._expire_in_time())
        return lease

    def keepalive(self, lease: Lease) -> float:
        self.expire()
        granted = self.leases.get(lease.id)
        if granted is None:
            raise LeaseLost(f"lease {lease.id} is gone")
        granted.expires_at = self.clock.monotonic() + granted.ttl_s
        return granted.ttl_s

    def revoke(self, lease_id: int) -> None:
        granted = self.leases.pop(lease_id, None)
        if granted is not None:
            self.change([Delete(key) for key in sorted(granted.keys)])

    def expire(self) -> None:
        now = self.clock.monotonic()
        for lease_id in [lease_id for lease_id, granted in self.leases.items() if granted.expires_at <= now]:
            self.revoke(lease_id)

    async def _expire_in_time(self) -> None:
        """Lets watchers see an expiry when nobody calls. Looks again at least each second: a lease may end before others."""
        while self.leases:
            next_at = min(granted.expires_at for granted in self.leases.values())
            await self.clock.sleep(min(1.0, max(0.001, next_at - self.clock.monotonic())))
            self.expire()

    def compact(self, revision: int) -> None:
        kept = bisect_right(self.log, revision, key=lambda entry: entry[0])
        replay(self.base, self.log[:kept])
        del self.log[:kept]
        self.compacted = revision


def replay(keys: dict[str, KeyValue], log: Sequence[tuple[int, tuple[Change, ...]]]) -> None:
    """Carry `keys` forward over the changes in `log`."""
    for _, changes in log:
        for change in changes:
            if change.kind is ChangeKind.PUT:
                keys[change.kv.key] = change.kv
            else:
                keys.pop(change.kv.key, None)


class _CountedPatience:
    """A number of attempts, and no waiting: with a manual clock nobody would move the time."""

    def __init__(self) -> None:
        self._left = _ATTEMPTS - 1

    async def pause(self) -> bool:
        await asyncio.sleep(0)
        self._left -= 1
        return self._left >= 0


class MemoryWatch:
    def __init__(self, store: MemoryStore, state: _State, prefix: str, from_revision: int) -> None:
        self._store = store
        self._state = state
        self._prefix = prefix
        self._next = from_revision
        self._closed = False
        self._cut_at: float | None = None

    @property
    def broken_for_s(self) -> float:
        if not self._store.faults.unavailable:
            self._cut_at = None
            return 0.0
        if self._cut_at is None:
            self._cut_at = self._state.clock.monotonic()
        return self._state.clock.monotonic() - self._cut_at

    def __aiter__(self) -> MemoryWatch:
        return self

    async def __anext__(self) -> Batch:
        while True:
            if self._closed or self._store.closed:
                raise StopAsyncIteration
            changed = self._state.changed
            if not self._store.faults.unavailable:
                batch = self._read()
                if batch is not None:
                    return batch
            await changed.wait()

    def _read(self) -> Batch | None:
        state = self._state
        if self._next <= state.compacted:
            raise Compacted(f"revision {self._next} is compacted", state.compacted)
        if self._next > state.revision + 1:
            raise HistoryLost(f"the store is at revision {state.revision}, before {self._next}", state.revision)
        start = bisect_left(state.log, self._next, key=lambda entry: entry[0])
        for revision, changes in state.log[start:]:
            self._next = revision + 1
            seen = tuple(change for change in changes if _visible(change.kv.key, self._prefix))
            if seen:
                return Batch(revision, seen)
        return None

    async def aclose(self) -> None:
        self._closed = True
        self._state.changed.set()
        self._state.changed = asyncio.Event()


class MemoryStore:
    """One client. `connect` makes another on the same state, with its own faults."""

    def __init__(
        self, clock: Clock | None = None, faults: Faults | None = None, *, _state: _State | None = None
    ) -> None:
        self._state = _state or _State(clock or SystemClock())
        self.faults = faults or Faults()
        self.closed = False
        self.sent = 0
        self._transactor = Transactor(
            self._attempt, self.lease_grant, self.lease_keepalive, _CountedPatience, self._state.clock
        )

    def connect(self, faults: Faults | None = None) -> MemoryStore:
        return MemoryStore(faults=faults, _state=self._state)

    def release_held(self) -> list[Answer]:
        """Let the requests that were held back arrive now, in their order."""
        held, self._state.held = self._state.held, []
        return [self._state.apply(attempt) for attempt in held]

    def compact(self, revision: int) -> None:
        """Forget all history before `revision`."""
        self._state.compact(revision)

    def wipe(self) -> None:
        """Lose everything, as a store whose disk was wiped."""
        state = self._state
        for kept in (state.keys, state.base, state.leases):
            kept.clear()
        state.log.clear()
        state.revision, state.compacted = 1, 0
        self.wake_watches()

    def wake_watches(self) -> None:
        """Needed after `faults.unavailable` is set back to False."""
        self._state.changed.set()
        self._state.changed = asyncio.Event()

    async def get(self, key: str) -> KeyValue | None:
        await self._reach()
        check_key(key)
        return self._state.keys.get(key)

    async def list(self, prefix: str, *, revision: int | None = None) -> Snapshot:
        await self._reach()
        state = self._state
        if revision is None or revision == state.revision:
            found = {key: kv for key, kv in state.keys.items() if _visible(key, prefix)}
            return Snapshot(tuple(found[key] for key in sorted(found)), state.revision)
        if revision < state.compacted:
            raise Compacted(f"revision {revision} is compacted", state.compacted)
        if revision > state.revision:
            raise HistoryLost(f"the store is at revision {state.revision}, before {revision}", state.revision)
        found = dict(state.base)
        replay(found, state.log[: bisect_right(state.log, revision, key=lambda entry: entry[0])])
        return Snapshot(tuple(found[key] for key in sorted(found) if _visible(key, prefix)), revision)

    async def transact(self, compares: Sequence[Compare], ops: Sequence[Op]) -> TxnResult:
        return await self._transactor.transact(compares, ops)

    async def _attempt(self, attempt: Attempt) -> Answer:
        await asyncio.sleep(0)
        self._check_open()
        self.sent += 1
        fault = self.faults.transactions.get(self.sent)
        if self.faults.unavailable or fault is Fault.LOSE_REQUEST:
            raise Unanswered("the request was lost")
        if fault is Fault.HOLD:
            self._state.held.append(attempt)
            raise Unanswered("the request is held back")
        answer = self._state.apply(attempt)
        if fault is Fault.LOSE_REPLY:
            raise Unanswered("the reply was lost")
        return answer

    def watch(self, prefix: str, *, from_revision: int) -> MemoryWatch:
        self._check_open()
        return MemoryWatch(self, self._state, prefix, from_revision)

    async def lease_grant(self, ttl_s: float) -> Lease:
        await self._reach()
        return self._state.grant(ttl_s)

    async def lease_revoke(self, lease: Lease) -> None:
        await self._reach()
        self._state.revoke(lease.id)

    async def lease_keepalive(self, lease: Lease) -> float:
        await self._reach()
        return self._state.keepalive(lease)

    async def status(self) -> StoreStatus:
        await self._reach()
        return StoreStatus(1, 1, self._state.revision, "memory", True)

    async def close(self) -> None:
        self.closed = True
        self.wake_watches()

    async def _reach(self) -> None:
        await asyncio.sleep(0)
        self._check_open()
        if self.faults.unavailable:
            raise StoreUnavailable("the memory store is set unavailable")
        self._state.expire()

    def _check_open(self) -> None:
        if self.closed:
            raise StoreClosed("the memory store is closed")


def _visible(key: str, prefix: str) -> bool:
    return key.startswith(prefix) and not key.startswith(RESERVED_PREFIX)
