"""A local copy of everything under a prefix: listed at a revision, then kept up by a watch, listed again when history is gone.

A mirror is for reading and for waking up. It runs a little behind the store; what makes a decision that was read from it safe is
the compare that its write carries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from types import TracebackType

from eplane.clock import Clock, SystemClock
from eplane.errors import Compacted, StoreClosed, StoreError, StoreUnavailable
from eplane.store.base import Batch, ChangeKind, KeyValue, Store, Watch

_log = logging.getLogger(__name__)

_RETRY_S = 0.3


class Mirror:
    """`async with Mirror(store, prefix) as mirror:` lists before the body runs; `start` and `close` do the same by hand."""

    def __init__(self, store: Store, prefix: str, clock: Clock | None = None) -> None:
        self._store = store
        self._prefix = prefix
        self._clock = clock or SystemClock()
        self._keys: dict[str, KeyValue] = {}
        self._revision = 0
        self._watch: Watch | None = None
        self._following: asyncio.Task[None] | None = None
        self._behind_since: float | None = None
        self._failure: StoreError | None = None
        # How often everything was listed anew; the first list counts.
        self.lists = 0
        self.changed = asyncio.Condition()

    async def start(self) -> None:
        """The first list is not tried again and again: a store that can not be reached is the caller's to know."""
        await self._list()
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        if self._failure is None:
            self._failure = StoreClosed(f"the mirror of {self._prefix} is closed")
        await self._notify()

    async def __aenter__(self) -> Mirror:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- reading; never waits ---

    def get(self, key: str) -> KeyValue | None:
        return self._keys.get(key)

    def items(self, prefix: str | None = None) -> tuple[KeyValue, ...]:
        """Sorted by key; `prefix` narrows down the mirror's own."""
        wanted = self._prefix if prefix is None else prefix
        return tuple(self._keys[key] for key in sorted(self._keys) if key.startswith(wanted))

    @property
    def revision(self) -> int:
        """Every change under the prefix up to this revision is in. It stands still while nothing under the prefix changes."""
        return self._revision

    @property
    def stale_for_s(self) -> float:
        """For how long changes may have been missed: 0 while the watch stands; infinite once the mirror has ended."""
        if self._failure is not None:
            return float("inf")
        own = 0.0 if self._behind_since is None else self._clock.monotonic() - self._behind_since
        return max(own, self._watch.broken_for_s if self._watch is not None else 0.0)

    # --- waiting ---

    async def wait(self, revision: int) -> None:
        """Until the write that made `revision` under this prefix is in. Raises what ended the mirror, if that comes first."""
        async with self.changed:
            await self.changed.wait_for(lambda: self._failure is not None or self._revision >= revision)
        if self._revision < revision and self._failure is not None:
            raise self._failure

    async def wakeups(self) -> AsyncIterator[int]:
        """The revision at once, and again after changes; several changes in between come as one. Raises what ends the mirror."""
        seen = (-1, -1)
        while True:
            async with self.changed:
                while self._failure is None and self._position() == seen:
                    await self.changed.wait()
            if self._failure is not None:
                raise self._failure
            seen = self._position()
            yield self._revision

    def _position(self) -> tuple[int, int]:
        return self.lists, self._revision

    # --- keeping up ---

    async def _list(self) -> None:
        snapshot = await self._store.list(self._prefix)
        self._keys = {kv.key: kv for kv in snapshot.items}
        self._revision = snapshot.revision
        self.lists += 1
        await self._notify()

    async def _follow(self) -> None:
        try:
            while True:
                try:
                    await self._watch_on()
                except Compacted as error:
                    _log.info("%s: listing again: %s", self._prefix, error)
                self._behind_since = self._clock.monotonic()
                await self._list_again()
                self._behind_since = None
        except Exception as error:
            # Whatever it is, readers must hear that the mirror stands still.
            self._failure = error if isinstance(error, StoreError) else StoreError(f"the mirror broke: {error!r}")
            await self._notify()
            _log.exception("the mirror of %s has ended", self._prefix)

    async def _watch_on(self) -> None:
        """Until the watch can not go on. `StoreClosed` when it ends without a reason."""
        watch = self._watch = self._store.watch(self._prefix, from_revision=self._revision + 1)
        try:
            async for batch in watch:
                self._apply(batch)
                await self._notify()
        finally:
            self._watch = None
            await watch.aclose()
        raise StoreClosed(f"the watch of {self._prefix} was closed")

    def _apply(self, batch: Batch) -> None:
        for change in batch.events:
            if change.kind is ChangeKind.PUT:
                self._keys[change.kv.key] = change.kv
            else:
                self._keys.pop(change.kv.key, None)
        self._revision = batch.revision

    async def _list_again(self) -> None:
        while True:
            try:
                await self._list()
                return
            except StoreUnavailable as error:
                _log.warning("%s: can not list, trying on: %s", self._prefix, error)
                await self._clock.sleep(_RETRY_S)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()
