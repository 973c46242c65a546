"""The store on etcd v3, over grpc.aio. Only the message types and stubs of the module `etcd3` are used, never its client.

Every request has a short deadline and goes on to the next endpoint when there is no answer; a node that has lost its
majority refuses (`hasleader`) instead of hanging. One client belongs to the event loop that first uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from etcd3 import etcdrpc

from eplane.clock import SystemClock
from eplane.errors import (
    Compacted,
    LeaseLost,
    StoreClosed,
    StoreDenied,
    StoreRefused,
)
from eplane.store.base import (
    Compare,
    KeyValue,
    Lease,
    Op,
    Snapshot,
    StoreStatus,
    TxnResult,
    check_key,
)
from eplane.store.etcd_peers import Peer, Peers
from eplane.store.etcd_watch import EtcdWatch
from eplane.store.etcd_wire import (
    Message,
    StaleLogin,
    encode,
    key_value,
    out_of_time,
    prefix_range,
    transaction,
    visible,
)
from eplane.store.once import Answer, Attempt, Transactor, Unanswered
from eplane.store.tls import TlsFiles

_LEADER = ("hasleader", "true")
_FIRST_PAGE, _LARGEST_PAGE, _PAGE_BYTES = 64, 1024, 1024 * 1024
_RELISTS = 3


class _Patience:
    """Full jitter, so that many clients do not come back at once."""

    def __init__(self, give_up_s: float) -> None:
        self._end = time.monotonic() + give_up_s
        self._tries = 0

    async def pause(self) -> bool:
        self._tries += 1
        wait = random.uniform(0.0, min(0.5, 0.02 * 2.0**self._tries))
        if time.monotonic() + wait >= self._end:
            return False
        await asyncio.sleep(wait)
        return True


class EtcdStore:
    """`call_timeout_s` bounds one request, `give_up_s` a whole call with its retries over all `endpoints` (host:port or URL)."""

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        tls: TlsFiles | None = None,
        username: str | None = None,
        password: str | None = None,
        call_timeout_s: float = 1.0,
        give_up_s: float = 5.0,
        keepalive_time_s: float = 6.0,
        keepalive_timeout_s: float = 2.0,
    ) -> None:
        self.peers = Peers(endpoints, tls, keepalive_time_s, keepalive_timeout_s, grace_s=2 * call_timeout_s)
        self._login = (username, password or "") if username else None
        self._token: str | None = None
        self.call_timeout_s = call_timeout_s
        # Of the last reply; 0 before the first.
        self.cluster_id = 0
        self._give_up_s = give_up_s
        self._watches: weakref.WeakSet[EtcdWatch] = weakref.WeakSet()
        self._closed = False
        self._transactor = Transactor(
            self._attempt, self._grant_once, self.lease_keepalive, self._patience, SystemClock()
        )

    # --- one request ---

    def _patience(self) -> _Patience:
        return _Patience(self._give_up_s)

    def current_peer(self) -> Peer:
        if self._closed:
            raise StoreClosed("the etcd store is closed")
        return self.peers.current()

    async def metadata(self, peer: Peer) -> tuple[tuple[str, str], ...]:
        """Sent with each request; logs in first where there is a user and no token."""
        if self._login is None:
            return (_LEADER,)
        if self._token is None:
            name, password = self._login
            request = etcdrpc.AuthenticateRequest(name=name, password=password)
            with self.peers.answers(peer):
                reply = await peer.auth.Authenticate(request, timeout=self.call_timeout_s)
            self._token = reply.token
        return (_LEADER, ("token", self._token or ""))

    def forget_login(self) -> bool:
        """Log in anew with the next request. False where there is no user to log in."""
        self._token = None
        return self._login is not None

    async def _ask(self, pick: Callable[[Peer], Any], request: Message) -> Message:
        """One request and its reply, logged in anew once if the token turned out stale (a stale one has no effect)."""
        try:
            return await self._ask_once(pick, request)
        except StaleLogin:
            if not self.forget_login():
                raise
        return await self._ask_once(pick, request)

    async def _ask_once(self, pick: Callable[[Peer], Any], request: Message) -> Message:
        peer = self.current_peer()
        metadata = await self.metadata(peer)
        with self.peers.answers(peer):
            reply = await pick(peer)(request, timeout=self.call_timeout_s, metadata=metadata)
        self.cluster_id = reply.header.cluster_id
        return reply

    async def _ask_patiently(self, pick: Callable[[Peer], Any], request: Message) -> Message:
        """For requests that may be repeated."""
        patience = self._patience()
        while True:
            try:
                return await self._ask(pick, request)
            except Unanswered as error:
                if not await patience.pause():
                    raise out_of_time(error, self.peers.endpoints, self._give_up_s) from error

    # --- reading ---

    async def get(self, key: str) -> KeyValue | None:
        check_key(key)
        reply = await self._ask_patiently(lambda peer: peer.kv.Range, etcdrpc.RangeRequest(key=encode(key)))
        return key_value(reply.kvs[0]) if reply.kvs else None

    async def list(self, prefix: str, *, revision: int | None = None) -> Snapshot:
        for _ in range(_RELISTS):
            try:
                return await self._list_at(prefix, revision or 0)
            except Compacted:
                # Without a wanted revision only the pages' common one was compacted away: begin again at a newer one.
                if revision is not None:
                    raise
        return await self._list_at(prefix, revision or 0)

    async def _list_at(self, prefix: str, revision: int) -> Snapshot:
        start, end = prefix_range(prefix)
        items: list[KeyValue] = []
        limit = _FIRST_PAGE
        while True:
            request = etcdrpc.RangeRequest(key=start, range_end=end, limit=limit, revision=revision)
            reply = await self._ask_patiently(lambda peer: peer.kv.Range, request)
            revision = revision or reply.header.revision
            items.extend(visible(reply.kvs))
            if not reply.more:
                return Snapshot(tuple(items), revision)
            start = reply.kvs[-1].key + b"\0"
            limit = min(_LARGEST_PAGE, limit * 2) if reply.ByteSize() < _PAGE_BYTES else max(4, limit // 4)

    async def header(self, key: bytes) -> Message:
        """Which cluster this is and its revision, as its majority knows it; asked once. `key`, one that we may read, is not
        looked at."""
        return (await self._ask(lambda peer: peer.kv.Range, _revision_request(key))).header

    def watch(self, prefix: str, *, from_revision: int) -> EtcdWatch:
        if self._closed:
            raise StoreClosed("the etcd store is closed")
        if from_revision < 1:
            raise StoreRefused(f"a watch from revision {from_revision}: the first is 1")
        watch = EtcdWatch(self, prefix, from_revision)
        self._watches.add(watch)
        return watch

    # --- writing ---

    async def transact(self, compares: Sequence[Compare], ops: Sequence[Op]) -> TxnResult:
        return await self._transactor.transact(compares, ops)

    async def _attempt(self, attempt: Attempt) -> Answer:
        reply = await self._ask(lambda peer: peer.kv.Txn, transaction(attempt))
        reads: list[KeyValue | None] = []
        if not reply.succeeded:
            for response in reply.responses:
                found = response.response_range.kvs
                reads.append(key_value(found[0]) if found else None)
        return Answer(reply.succeeded, reply.header.revision, tuple(reads))

    # --- leases ---

    async def lease_grant(self, ttl_s: float) -> Lease:
        """The id is ours, so a grant whose reply was lost is recognised and not made twice."""
        wanted = _new_lease(ttl_s)
        try:
            reply = await self._ask_patiently(lambda peer: peer.lease.LeaseGrant, _grant_request(wanted))
        except StoreRefused as error:
            if "lease already exists" in str(error):
                return wanted
            raise
        return Lease(wanted.id, float(reply.TTL))

    async def _grant_once(self, ttl_s: float) -> Lease:
        """For the transactor, which has its own patience."""
        wanted = _new_lease(ttl_s)
        reply = await self._ask(lambda peer: peer.lease.LeaseGrant, _grant_request(wanted))
        return Lease(wanted.id, float(reply.TTL))

    async def lease_revoke(self, lease: Lease) -> None:
        with contextlib.suppress(LeaseLost):
            await self._ask_patiently(lambda peer: peer.lease.LeaseRevoke, etcdrpc.LeaseRevokeRequest(ID=lease.id))

    async def lease_keepalive(self, lease: Lease) -> float:
        """A stream of one message: a stream that stays open has no deadline, and hangs with the node it hangs on."""
        peer = self.current_peer()
        metadata = await self.metadata(peer)
        timeout = min(self.call_timeout_s, lease.ttl_s / 3)
        call = peer.lease.LeaseKeepAlive(timeout=timeout, metadata=metadata)
        try:
            with self.peers.answers(peer):
                await call.write(etcdrpc.LeaseKeepAliveRequest(ID=lease.id))
                reply = await call.read()
        except StaleLogin as error:
            self.forget_login()
            raise Unanswered(str(error)) from error
        finally:
            call.cancel()
        if reply is grpc.aio.EOF:
            raise Unanswered(f"etcd at {peer.address}: no answer to a keep-alive")
        if reply.TTL <= 0:
            raise LeaseLost(f"lease {lease.id:x} is gone")
        return float(reply.TTL)

    # --- the store itself ---

    async def status(self) -> StoreStatus:
        member = await self._ask_patiently(lambda peer: peer.maintenance.Status, etcdrpc.StatusRequest())
        try:
            # Needs the majority, so a cluster without one is unavailable here and not merely unhealthy.
            reply = await self._ask_patiently(lambda peer: peer.kv.Range, _revision_request(b"\0"))
            revision = reply.header.revision
        except StoreDenied:
            # The majority did answer; only the role covers other keys.
            revision = member.header.revision
        request = etcdrpc.AlarmRequest(action=etcdrpc.AlarmRequest.GET)
        alarms = await self._ask_patiently(lambda peer: peer.maintenance.Alarm, request)
        healthy = member.leader != 0 and not alarms.alarms
        header = member.header
        return StoreStatus(header.cluster_id, header.member_id, revision, member.version, healthy)

    async def close(self) -> None:
        self._closed = True
        for watch in list(self._watches):
            await watch.aclose()
        await self.peers.close()

    @property
    def closed(self) -> bool:
        return self._closed


def _revision_request(key: bytes) -> Message:
    return etcdrpc.RangeRequest(key=key, count_only=True)


def _new_lease(ttl_s: float) -> Lease:
    return Lease(secrets.randbits(62) + 1, float(max(1, math.ceil(ttl_s))))


def _grant_request(lease: Lease) -> Message:
    return etcdrpc.LeaseGrantRequest(TTL=int(lease.ttl_s), ID=lease.id)
