"""Transactions that are applied at most once, whatever is lost on the way.

A transaction whose reply is lost is sent again, and the second copy must not apply twice, nor take its own success for a
defeat. Its compares alone do not give that (`Exists(a) -> put b` holds twice). So each transaction in flight holds a
*ticket*: a key of its own under the reserved prefix, which no caller sees. Every copy of the transaction compares the
ticket's mod_revision with the last one known and, in the same transaction, writes its nonce into it. Then:

- at most one copy can apply, since the first moves the ticket on;
- a copy that fails reads the ticket: our nonce there means that an earlier copy was applied, at the ticket's mod_revision;
- if the ticket has not moved and an earlier copy may still be under way, the ticket is *burnt* (moved on by a transaction
  with the same compare) before failure is reported, so that the earlier copy can not be applied later.

A ticket is used again by the next transaction, one at a time, so a client has as many as it had transactions at once. They hang
on a lease of one hour that is renewed only while the client writes, so they go when the client does.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from eplane.clock import Clock
from eplane.errors import LeaseLost, OutcomeUnknown, StoreError, StoreUnavailable
from eplane.store.base import (
    RESERVED_PREFIX,
    Compare,
    KeyValue,
    Lease,
    ModRevision,
    Op,
    Put,
    TxnResult,
    check_transaction,
    holds,
)

TICKET_TTL_S = 3600.0
_BURNT = b"burnt"


class Unanswered(StoreUnavailable):
    """One attempt got no answer: it may have been applied, may still be, or never arrived."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One request: if `compares` hold do `ops`, else read `reads`."""

    compares: tuple[Compare, ...]
    ops: tuple[Op, ...]
    reads: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    succeeded: bool
    revision: int
    reads: tuple[KeyValue | None, ...]


class Patience(Protocol):
    """How long one call goes on trying. Made anew for each call."""

    async def pause(self) -> bool:
        """Wait before the next attempt; False when the time is up."""


@dataclass(slots=True)
class _Ticket:
    key: str
    revision: int


class Transactor:
    """Sends transactions through `attempt` (one request, one answer or `Unanswered`) so that each is applied at most once."""

    def __init__(
        self,
        attempt: Callable[[Attempt], Awaitable[Answer]],
        grant: Callable[[float], Awaitable[Lease]],
        keepalive: Callable[[Lease], Awaitable[float]],
        patience: Callable[[], Patience],
        clock: Clock,
    ) -> None:
        self._attempt = attempt
        self._grant = grant
        self._keepalive = keepalive
        self._patience = patience
        self._clock = clock
        self._lease: Lease | None = None
        self._renewed_at = 0.0
        self._free: list[_Ticket] = []
        self._renewing = asyncio.Lock()

    async def transact(self, compares: Sequence[Compare], ops: Sequence[Op]) -> TxnResult:
        check_transaction(compares, ops)
        patience = self._patience()
        while True:
            lease = await self._living_lease(patience)
            ticket = self._free.pop() if self._free else _Ticket(f"{RESERVED_PREFIX}{secrets.token_hex(8)}", 0)
            try:
                result = await self._once(compares, ops, ticket, lease, patience)
            except LeaseLost:
                # Nothing was applied. If it is our own lease that is gone (a wiped store), begin again with a new one.
                if await self._is_alive(lease):
                    self._free.append(ticket)
                    raise
                self._forget(lease)
                continue
            if result is not None:
                return result
            self._forget(lease)

    async def _once(
        self,
        compares: Sequence[Compare],
        ops: Sequence[Op],
        ticket: _Ticket,
        lease: Lease,
        patience: Patience,
    ) -> TxnResult | None:
        """The result, or None if the ticket was gone before anything could be applied.

        Where an error leaves, the ticket is not used again: a copy may be under way, and it lapses with its lease.
        """
        nonce = secrets.token_bytes(12)
        guard = ModRevision(ticket.key, ticket.revision)
        keys = tuple(dict.fromkeys(compare.key for compare in compares))
        request = Attempt((*compares, guard), (*ops, Put(ticket.key, nonce, lease.id)), (*keys, ticket.key))
        unanswered = False
        while True:
            try:
                answer = await self._attempt(request)
            except Unanswered as error:
                unanswered = True
                if not await patience.pause():
                    raise OutcomeUnknown(f"a transaction on {', '.join(keys)} got no answer: {error}") from error
                continue
            except StoreError as error:
                # Says nothing about a copy sent before, unless it is the caller's own lease that every copy needs.
                if not unanswered or (isinstance(error, LeaseLost) and await self._is_alive(lease)):
                    raise
                raise OutcomeUnknown(f"a transaction on {', '.join(keys)} got no answer, then: {error}") from error
            if answer.succeeded:
                return self._applied(ticket, answer.revision)
            mark = answer.reads[-1]
            if mark is not None and mark.value == nonce:
                return self._applied(ticket, mark.mod_revision)
            if not holds(guard, mark):
                if unanswered:
                    raise OutcomeUnknown(f"a transaction on {', '.join(keys)}: the store lost its record of it")
                return None
            if unanswered:
                late = await self._burn(ticket, lease, nonce, patience)
                if late is not None:
                    return self._applied(ticket, late)
            self._free.append(ticket)
            return TxnResult(False, answer.revision, MappingProxyType(dict(zip(keys, answer.reads, strict=False))))

    async def _burn(self, ticket: _Ticket, lease: Lease, nonce: bytes, patience: Patience) -> int | None:
        """Move the ticket on so that no earlier copy can apply any more. The revision of one that did after all, or None."""
        guard = ModRevision(ticket.key, ticket.revision)
        mark = _BURNT + nonce
        request = Attempt((guard,), (Put(ticket.key, mark, lease.id),), (ticket.key,))
        while True:
            try:
                answer = await self._attempt(request)
            except Unanswered as error:
                if not await patience.pause():
                    raise OutcomeUnknown(
                        f"a transaction got no answer and could not be called back: {error}"
                    ) from error
                continue
            if answer.succeeded:
                ticket.revision = answer.revision
                return None
            found = answer.reads[0]
            if found is not None and found.value == mark:
                ticket.revision = found.mod_revision
                return None
            if found is not None and found.value == nonce:
                return found.mod_revision
            raise OutcomeUnknown("a transaction got no answer and the store lost its record of it")

    def _applied(self, ticket: _Ticket, revision: int) -> TxnResult:
        ticket.revision = revision
        self._free.append(ticket)
        return TxnResult(True, revision)

    async def _living_lease(self, patience: Patience) -> Lease:
        """The lease of the tickets, renewed when half of it is over: a call takes seconds, so it can not end in between."""
        async with self._renewing:
            return await self._renew(patience)

    async def _renew(self, patience: Patience) -> Lease:
        lease = self._lease
        if lease is not None and self._clock.monotonic() - self._renewed_at < lease.ttl_s / 2:
            return lease
        while True:
            asked_at = self._clock.monotonic()
            try:
                if lease is not None:
                    await self._keepalive(lease)
                else:
                    lease = await self._grant(TICKET_TTL_S)
            except LeaseLost:
                if lease is not None:
                    self._forget(lease)
                lease = None
                continue
            except StoreUnavailable:
                if not await patience.pause():
                    raise
                continue
            self._lease, self._renewed_at = lease, asked_at
            return lease

    async def _is_alive(self, lease: Lease) -> bool:
        try:
            await self._keepalive(lease)
        except LeaseLost:
            return False
        return True

    def _forget(self, lease: Lease) -> None:
        if self._lease == lease:
            self._lease = None
            self._free.clear()
