"""Who leads, and who is here: leases kept alive, leader election and presence, on top of any store.

A lease is kept by asking each third of its TTL. The keeper counts from *before* each request that succeeded: at
`surely_lost_at` the store may have ended the lease, so from then on its holder acts no more, whether it could ask or not. That
clock spares useless work; what makes a stale holder harmless is the compare that each of its writes carries.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from eplane.clock import Clock, SystemClock, wait_for_event
from eplane.errors import Compacted, LeaseLost, StoreError, StoreUnavailable
from eplane.plan import LeaderEpoch
from eplane.store.base import (
    ChangeKind,
    CreateRevision,
    Delete,
    KeyValue,
    Lease,
    Missing,
    ModRevision,
    Put,
    Store,
)


class ProgressGate:
    """True while `beat` was called within the last `limit_s`: a loop that hangs stops beating, and its lease runs out."""

    def __init__(self, limit_s: float, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._limit_s = limit_s
        self._beat_at = self._clock.monotonic()

    def beat(self) -> None:
        self._beat_at = self._clock.monotonic()

    def __call__(self) -> bool:
        return self._clock.monotonic() - self._beat_at <= self._limit_s


def _always() -> bool:
    return True


class LeaseKeeper:
    """Holds one lease from `start` until `stop`, or until it is lost; lost is final."""

    def __init__(
        self, store: Store, ttl_s: float, clock: Clock | None = None, progress: Callable[[], bool] = _always
    ) -> None:
        self._store = store
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._progress = progress
        self._lease: Lease | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.surely_lost_at = 0.0
        self.lost = asyncio.Event()

    @property
    def lease(self) -> Lease:
        if self._lease is None:
            raise LeaseLost("the lease was not granted yet")
        return self._lease

    async def start(self) -> Lease:
        """Grant the lease and begin to keep it."""
        asked_at = self._clock.monotonic()
        lease = self._lease = await self._store.lease_grant(self._ttl_s)
        self.surely_lost_at = asked_at + lease.ttl_s
        self._tasks = [asyncio.create_task(self._keep(lease)), asyncio.create_task(self._watch_clock())]
        for task in self._tasks:
            task.add_done_callback(self._died)
        return lease

    def alive(self) -> bool:
        """Whether the lease surely still stands. Right even if nothing could run for a while, as after SIGCONT."""
        return not self.lost.is_set() and self._clock.monotonic() < self.surely_lost_at

    async def stop(self, *, revoke: bool = True) -> None:
        """Stop keeping, and give the lease back if the store can be reached; else it runs out by itself."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.lost.set()
        if revoke and self._lease is not None:
            with suppress(StoreError):
                await self._store.lease_revoke(self._lease)

    async def _keep(self, lease: Lease) -> None:
        pause = lease.ttl_s / 3
        while not await wait_for_event(self._clock, self.lost, pause):
            pause = lease.ttl_s / 10
            if not self._progress():
                continue
            asked_at = self._clock.monotonic()
            if asked_at >= self.surely_lost_at:
                # Lost is final: the store may still renew the lease, but its holder was told that it is gone.
                self.lost.set()
                return
            try:
                left = await self._store.lease_keepalive(lease)
            except LeaseLost:
                self.lost.set()
                return
            except StoreUnavailable:
                continue
            # Never before what was known: a slow answer to an old request takes nothing back.
            self.surely_lost_at = max(self.surely_lost_at, asked_at + left)
            pause = lease.ttl_s / 3

    async def _watch_clock(self) -> None:
        while (left := self.surely_lost_at - self._clock.monotonic()) > 0:
            if await wait_for_event(self._clock, self.lost, left):
                return
        self.lost.set()

    def _died(self, task: asyncio.Task[None]) -> None:
        """An error nobody foresaw must not leave a holder that believes in its lease."""
        if not task.cancelled() and task.exception() is not None:
            self.lost.set()


class LeasedKey:
    """A key that lives as long as its keeper's lease. Base of `Election` and `Presence`."""

    def __init__(
        self,
        store: Store,
        key: str,
        value: bytes,
        ttl_s: float,
        clock: Clock | None = None,
        progress: Callable[[], bool] = _always,
    ) -> None:
        self._store = store
        self.key = key
        self._value = value
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._progress = progress
        self._keeper: LeaseKeeper | None = None
        self._created = 0
        self._watching: asyncio.Task[None] | None = None
        # Of the present term: each time the key is taken there is a new event.
        self.lost = asyncio.Event()

    @property
    def surely_lost_at(self) -> float:
        return self._keeper.surely_lost_at if self._keeper else 0.0

    def held(self) -> bool:
        return self._keeper is not None and not self.lost.is_set() and self._keeper.alive()

    def compare(self) -> CreateRevision:
        """Carried by every write that is made in the name of this key; a write without it is not fenced."""
        if self._created == 0:
            raise LeaseLost(f"{self.key} is not held")
        return CreateRevision(self.key, self._created)

    async def observe(self) -> KeyValue | None:
        """Who holds the key now, whoever that is."""
        return await self._store.get(self.key)

    async def update(self, value: bytes) -> None:
        """Change the value and keep the key. `LeaseLost` if it is no longer ours."""
        lease = self._keeper.lease.id if self._keeper else 0
        result = await self._store.transact([self.compare()], [Put(self.key, value, lease)])
        if not result.succeeded:
            self.lost.set()
            raise LeaseLost(f"{self.key} has a new holder")
        self._value = value

    async def _create(self) -> int:
        """Put the key if it is missing, on a fresh lease. Its create revision, or 0 if someone else has it."""
        await self._drop_keeper()
        keeper = LeaseKeeper(self._store, self._ttl_s, self._clock, self._progress)
        try:
            lease = await keeper.start()
            result = await self._store.transact([Missing(self.key)], [Put(self.key, self._value, lease.id)])
        except BaseException:
            await keeper.stop(revoke=False)
            raise
        if not result.succeeded:
            await keeper.stop()
            return 0
        self._keeper, self._created = keeper, result.revision
        lost = self.lost = asyncio.Event()
        self._watching = asyncio.create_task(self._watch_key(keeper, result.revision))
        self._watching.add_done_callback(lambda _: lost.set())
        return result.revision

    async def _watch_key(self, keeper: LeaseKeeper, created: int) -> None:
        """Returns when the key is no longer ours or its lease is lost; `lost` is set then."""
        ours = asyncio.create_task(self._gone(created))
        lease_lost = asyncio.create_task(keeper.lost.wait())
        try:
            await asyncio.wait([ours, lease_lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (ours, lease_lost):
                task.cancel()
            await asyncio.gather(ours, lease_lost, return_exceptions=True)

    async def _gone(self, created: int) -> None:
        while True:
            with suppress(StoreUnavailable):
                kv = await self._store.get(self.key)
                if kv is None or kv.create_revision != created:
                    return
                if await self._deleted(kv.mod_revision + 1):
                    return
                continue
            await self._clock.sleep(self._ttl_s / 10)

    async def _deleted(self, from_revision: int) -> bool:
        """Wait until the key is deleted; False if the store can not tell any more and the key must be read again."""
        watch = self._store.watch(self.key, from_revision=from_revision)
        try:
            async for batch in watch:
                if any(change.kv.key == self.key and change.kind is ChangeKind.DELETE for change in batch.events):
                    return True
        except Compacted:
            return False
        finally:
            await watch.aclose()
        return False

    async def _release(self) -> None:
        """Delete the key if it is still ours; if the store can not be reached it goes with its lease."""
        if self._created:
            with suppress(StoreError):
                await self._store.transact([CreateRevision(self.key, self._created)], [Delete(self.key)])
        await self._drop_keeper()

    async def _drop_keeper(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
            self._watching = None
        if self._keeper is not None:
            await self._keeper.stop()
            self._keeper = None
        self._created = 0
        self.lost.set()


class Election(LeasedKey):
    """One seat, any number of candidates. `value` tells everybody how to reach the leader."""

    async def campaign(self) -> LeaderEpoch:
        """Wait for the seat as long as it takes, through any outage of the store, and take it.

        A candidate holds no lease while it waits. Whoever creates the missing key first wins; the others wait for it to go.
        """
        while True:
            try:
                cluster = (await self._store.status()).cluster_id
                holder = await self.observe()
                if holder is not None:
                    await self._deleted(holder.mod_revision + 1)
                    continue
                created = await self._create()
                if created:
                    return LeaderEpoch(cluster, created)
            except (StoreUnavailable, LeaseLost):
                await self._clock.sleep(self._ttl_s / 10)

    async def resign(self) -> None:
        """Give the seat up at once, so that a successor need not wait for the lease to run out."""
        await self._release()


class Presence(LeasedKey):
    """Says that one life of an agent is here. A newer life takes the key over; the older one sees it and stops."""

    async def claim(self) -> CreateRevision:
        """Take the key, from an older life too. What it returns is the compare of every write made by this life.

        Taking over deletes the old key and creates it anew, so the older life's compare can never hold again.
        """
        while True:
            kv = await self.observe()
            if kv is not None:
                await self._store.transact([ModRevision(self.key, kv.mod_revision)], [Delete(self.key)])
            if await self._create():
                return self.compare()

    async def leave(self) -> None:
        """Delete the key on an orderly end."""
        await self._release()
