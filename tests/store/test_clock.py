"""The clock that a test moves."""

from __future__ import annotations

import asyncio

import pytest

from eplane.clock import ManualClock, SystemClock, settle, wait_for_event


async def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    clock = ManualClock(100.0)
    woke: list[tuple[str, float]] = []

    async def sleeper(name: str, *naps: float) -> None:
        for nap in naps:
            await clock.sleep(nap)
            woke.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper("a", 2, 2)), asyncio.create_task(sleeper("b", 1, 2, 0))]
    await clock.elapse(10)
    await asyncio.gather(*tasks)
    assert woke == [("b", 101.0), ("a", 102.0), ("b", 103.0), ("b", 103.0), ("a", 104.0)]
    assert clock.now() == clock.monotonic() == 110.0


async def test_nothing_moves_by_itself() -> None:
    clock = ManualClock()
    nap = asyncio.create_task(clock.sleep(1))
    await settle()
    assert not nap.done()
    clock.advance(0.5)
    await settle()
    assert not nap.done()
    clock.advance(0.5)
    await settle()
    assert nap.done()
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


async def test_waiting_for_an_event_ends_by_either() -> None:
    clock, event = ManualClock(), asyncio.Event()
    waits = [asyncio.create_task(wait_for_event(clock, event, seconds)) for seconds in (1, 100)]
    await clock.elapse(1)
    assert waits[0].done()
    assert waits[0].result() is False
    event.set()
    await settle()
    assert waits[1].result() is True
    assert await wait_for_event(clock, event, 0) is True


async def test_the_system_clock_is_the_machines() -> None:
    clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0.01)
    await clock.sleep(-1)
    assert clock.monotonic() > before
    assert clock.now() > 1_600_000_000
