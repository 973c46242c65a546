"""A watch on etcd that outlives its streams."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import grpc.aio
from etcd3 import etcdrpc

from eplane.errors import Compacted, HistoryLost, StoreDenied, StoreUnavailable
from eplane.store.base import Batch
from eplane.store.etcd_peers import Peer
from eplane.store.etcd_wire import Message, changes, prefix_range
from eplane.store.once import Unanswered

if TYPE_CHECKING:
    from eplane.store.etcd import EtcdStore

_REFUSALS = 3
# A stream that stood this long was a good one: what breaks it is news.
_STOOD_S = 5.0


class EtcdWatch:
    """After a break it goes on at the last delivered event's mod_revision + 1: the revision in a reply's header runs ahead of
    the events that were delivered, and going on from there loses some."""

    def __init__(self, store: EtcdStore, prefix: str, from_revision: int) -> None:
        self._store = store
        self._prefix = prefix
        self._next = from_revision
        # The one that `from_revision` was read from.
        self._cluster = store.cluster_id
        self._call: Any = None
        self._peer: Peer | None = None
        self._step: asyncio.Task[Batch | None] | None = None
        self._breaks = 0
        self._refusals = 0
        self._broken_at: float | None = time.monotonic()
        self._opened_at = 0.0
        self._closed = False

    @property
    def broken_for_s(self) -> float:
        """Late by at most the channel's keepalive: a server that hangs is noticed only then."""
        return 0.0 if self._broken_at is None else time.monotonic() - self._broken_at

    def __aiter__(self) -> EtcdWatch:
        return self

    async def __anext__(self) -> Batch:
        while not (self._closed or self._store.closed):
            if self._step is None:
                # A task of its own: cancelling who waits must not end the stream, nor lose what is read.
                self._step = asyncio.create_task(self._advance())
                self._step.add_done_callback(self._ended)
            step = self._step
            await asyncio.wait({step})
            if self._step is step:
                self._step = None
            if step.cancelled():
                continue
            try:
                batch = step.result()
            except StoreUnavailable:
                await self._pause()
                continue
            if batch is not None:
                return batch
        raise StopAsyncIteration

    async def _advance(self) -> Batch | None:
        """One message. Whatever fails, the next begins with a new stream."""
        try:
            if self._call is None:
                await self._open()
            return self._take(await self._read())
        except BaseException:
            self._drop()
            raise

    async def _open(self) -> None:
        start, end = prefix_range(self._prefix)
        peer = self._peer = self._store.current_peer()
        metadata = await self._store.metadata(peer)
        create = etcdrpc.WatchCreateRequest(key=start, range_end=end, start_revision=self._next, progress_notify=True)
        self._call = peer.watch.Watch(metadata=metadata)
        try:
            async with asyncio.timeout(self._store.call_timeout_s):
                with self._store.peers.answers(peer):
                    await self._call.write(etcdrpc.WatchRequest(create_request=create))
                # A request with a stale token gets no reply at all from some servers.
                reply = await self._read()
        except TimeoutError as error:
            self._store.peers.leave(peer)
            self._store.forget_login()
            raise Unanswered(f"etcd at {peer.address}: no answer to a watch request") from error
        self._take(reply)
        await self._check_history(start)
        self._broken_at, self._opened_at = None, time.monotonic()

    async def _check_history(self, key: bytes) -> None:
        """A store that was wiped or restored would let us wait in silence until it reaches our revision again.

        Asked after the stream stands: asked before, the store could be wiped in between.
        """
        header = await self._store.header(key)
        if self._cluster not in (0, header.cluster_id):
            raise HistoryLost(f"{self._prefix}: another etcd cluster answers", header.revision)
        self._cluster = header.cluster_id
        if header.revision + 1 < self._next:
            told = f"{self._prefix}: the store is at revision {header.revision}, before {self._next}"
            raise HistoryLost(told, header.revision)

    async def _read(self) -> Message:
        if self._call is None or self._peer is None:
            raise Unanswered("the watch was closed")
        with self._store.peers.answers(self._peer):
            reply = await self._call.read()
        if reply is grpc.aio.EOF:
            raise Unanswered(f"etcd at {self._peer.address}: the watch ended")
        return reply

    def _take(self, reply: Message) -> Batch | None:
        if reply.compact_revision:
            raise Compacted(f"{self._prefix}: revision {self._next} is compacted", reply.compact_revision)
        if reply.canceled:
            self._refused(reply.cancel_reason)
        if not reply.events:
            return None
        revision = max(event.kv.mod_revision for event in reply.events)
        self._next = revision + 1
        seen = changes(reply.events)
        return Batch(revision, seen) if seen else None

    def _refused(self, reason: str) -> None:
        """etcd says why it ends a watch only here, also when the token ran out: log in again, and give up if that is no help."""
        self._refusals += 1
        self._store.forget_login()
        if self._refusals >= _REFUSALS:
            raise StoreDenied(f"etcd refuses to watch {self._prefix}: {reason}")
        raise Unanswered(f"etcd ended the watch of {self._prefix}: {reason}")

    async def _pause(self) -> None:
        self._breaks += 1
        await asyncio.sleep(random.uniform(0.0, min(0.5, 0.02 * 2.0 ** min(self._breaks, 8))))

    def _ended(self, step: asyncio.Task[Batch | None]) -> None:
        """A break is noted when it happens, whether somebody waits on the watch or not."""
        if (step.cancelled() or step.exception() is not None) and self._broken_at is None:
            self._broken_at = time.monotonic()
            if self._broken_at - self._opened_at > _STOOD_S:
                self._breaks = self._refusals = 0

    def _drop(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    async def aclose(self) -> None:
        self._closed = True
        step, self._step = self._step, None
        if step is not None:
            step.cancel()
            await asyncio.wait({step})
        self._drop()
