"""Time as an argument: whoever decides or waits is given a `Clock`, so that tests and simulations own the time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for people and records, monotonic time for durations. All in seconds."""

    def now(self) -> float: ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own time."""

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))


class ManualClock:
    """Time that moves only when told. Sleepers wake in the order of their deadlines."""

    def __init__(self, start: float = 1_000_000.0) -> None:
        self._now = start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        wakened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + seconds, next(self._order), wakened))
        await wakened

    def advance(self, seconds: float) -> None:
        """Move time at once; who sleeps less than that is made ready, and runs when the event loop is next free."""
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds}")
        self._now += seconds
        self._wake()

    async def elapse(self, seconds: float) -> None:
        """Move time from deadline to deadline and let the tasks run in between, so that chains of sleeps come out right."""
        end = self._now + seconds
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now = max(self._now, self._sleepers[0][0])
            self._wake()
            await settle()
        self._now = end

    def _wake(self) -> None:
        while self._sleepers and self._sleepers[0][0] <= self._now:
            _, _, wakened = heapq.heappop(self._sleepers)
            if not wakened.done():
                wakened.set_result(None)


async def settle(turns: int = 50) -> None:
    """Let every task that can run without input from outside run until it waits."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def wait_for_event(clock: Clock, event: asyncio.Event, timeout_s: float) -> bool:
    """Wait until `event` is set or `timeout_s` have passed on `clock`; True if it is set."""
    if event.is_set():
        return True
    waits = [asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(timeout_s))]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return event.is_set()
