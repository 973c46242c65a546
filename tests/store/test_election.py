"""Leases, leadership and presence: on a clock that the test moves, and with real processes on a real etcd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from eplane.clock import ManualClock, settle
from eplane.election import Election, LeaseKeeper, Presence, ProgressGate
from eplane.errors import LeaseLost, StoreUnavailable
from eplane.plan import LeaderEpoch
from eplane.store.base import Delete, Exists, Lease, Missing, Put, ValueIs
from eplane.store.etcd import EtcdStore
from eplane.store.memory import Fault, MemoryStore
from tests.etcd_process import EtcdProcess


class SlowStore(MemoryStore):
    """Answers keep-alives only after `delay_s` of the test's clock, and counts them."""

    delay_s = 0.0
    asked = 0

    async def lease_keepalive(self, lease: Lease) -> float:
        self.asked += 1
        left = await super().lease_keepalive(lease)
        await self._state.clock.sleep(self.delay_s)
        return left


# --- the keeper ---


async def test_a_kept_lease_lives_on() -> None:
    clock = ManualClock()
    store = SlowStore(clock)
    keeper = LeaseKeeper(store, 3, clock)
    lease = await keeper.start()
    await store.transact([Missing("k")], [Put("k", b"", lease.id)])
    await clock.elapse(30)
    assert keeper.alive()
    assert await store.get("k") is not None
    # Each third of the TTL, not more often.
    assert 25 <= store.asked - 1 <= 31
    await keeper.stop()
    assert not keeper.alive()
    assert keeper.lost.is_set()
    assert await store.get("k") is None


async def test_the_lease_is_counted_from_before_the_request() -> None:
    """The store may have counted from any moment since then, so an answer that took 0.8 s is worth 0.8 s less."""
    clock = ManualClock()
    store = SlowStore(clock)
    store.delay_s = 0.8
    keeper = LeaseKeeper(store, 3, clock)
    began = clock.monotonic()
    await keeper.start()
    assert keeper.surely_lost_at == began + 3
    await clock.elapse(1.0)
    assert keeper.surely_lost_at == began + 3
    await clock.elapse(0.8)
    assert keeper.surely_lost_at == began + 1.0 + 3
    await keeper.stop()


async def test_a_lease_that_could_not_be_renewed_is_lost_on_time() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    keeper = LeaseKeeper(store, 3, clock)
    await keeper.start()
    await clock.elapse(2.5)
    lost_at = keeper.surely_lost_at
    store.faults.unavailable = True
    await clock.elapse(lost_at - clock.monotonic() - 0.01)
    assert keeper.alive()
    assert not keeper.lost.is_set()
    await clock.elapse(0.01)
    assert not keeper.alive()
    assert keeper.lost.is_set()
    # Lost is final, even if the store still had it.
    store.faults.unavailable = False
    await clock.elapse(5)
    assert not keeper.alive()
    await keeper.stop()


async def test_a_short_outage_costs_nothing() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    keeper = LeaseKeeper(store, 3, clock)
    await keeper.start()
    for _ in range(5):
        store.faults.unavailable = True
        await clock.elapse(1.5)
        store.faults.unavailable = False
        await clock.elapse(1.0)
    assert keeper.alive()
    await keeper.stop()


async def test_after_a_pause_the_lease_is_known_lost_before_anything_runs() -> None:
    """As after SIGCONT: the time is past, no task has run yet. And no late keep-alive brings the lease back to life."""
    clock = ManualClock()
    # The store's own time stands still, so it would still grant a renewal.
    store = SlowStore(ManualClock())
    keeper = LeaseKeeper(store, 3, clock)
    await keeper.start()
    await settle()
    clock.advance(3)
    assert not keeper.alive()
    await clock.elapse(2)
    assert store.asked == 0
    assert keeper.lost.is_set()
    assert not keeper.alive()
    await keeper.stop()


async def test_a_lease_that_the_store_ended_is_lost_at_once() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    keeper = LeaseKeeper(store, 30, clock)
    lease = await keeper.start()
    await store.connect().lease_revoke(lease)
    await clock.elapse(10.5)
    assert keeper.lost.is_set()
    assert not keeper.alive()
    await keeper.stop()


async def test_a_loop_that_hangs_gives_its_lease_up() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    gate = ProgressGate(2.0, clock)
    keeper = LeaseKeeper(store, 3, clock, gate)
    await keeper.start()
    for _ in range(10):
        gate.beat()
        await clock.elapse(1)
    assert keeper.alive()
    await clock.elapse(6)
    assert keeper.lost.is_set()
    await keeper.stop()


async def test_a_keeper_that_breaks_gives_its_lease_up() -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    clock = ManualClock()
    keeper = LeaseKeeper(MemoryStore(clock), 30, clock, broken)
    await keeper.start()
    await clock.elapse(11)
    assert not keeper.alive()
    await keeper.stop()


# --- leadership ---


async def test_one_leads_and_the_next_takes_over_when_it_resigns() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    a, b = (Election(store.connect(), "leader", name, 3, clock) for name in (b"a", b"b"))
    first = await a.campaign()
    waiting = asyncio.create_task(b.campaign())
    await clock.elapse(30)
    assert not waiting.done()
    assert a.held()
    assert not b.held()
    holder = await b.observe()
    assert holder is not None
    assert (holder.value, holder.create_revision) == (b"a", first.revision)
    await a.resign()
    assert a.lost.is_set()
    second = await waiting
    assert second.cluster == first.cluster
    assert second.revision > first.revision
    assert b.held()
    with pytest.raises(LeaseLost):
        a.compare()
    await b.resign()
    assert await store.get("leader") is None


async def test_two_candidates_never_hold_one_seat() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    stores = [store.connect() for _ in range(2)]
    seats = [Election(client, "leader", b"%d" % n, 3, clock) for n, client in enumerate(stores)]

    async def run(seat: Election) -> None:
        while True:
            await seat.campaign()
            await seat.lost.wait()

    tasks = [asyncio.create_task(run(seat)) for seat in seats]
    led = set()
    for step in range(120):
        for n, client in enumerate(stores):
            client.faults.unavailable = (step // 12) % 4 == 1 + 2 * n
        await clock.elapse(0.5)
        held = [n for n, seat in enumerate(seats) if seat.held()]
        assert len(held) <= 1
        led.update(held)
    assert led == {0, 1}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for seat in seats:
        await seat.resign()


async def test_candidates_that_find_the_seat_empty_together() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    seats = [Election(store.connect(), "leader", b"%d" % n, 3, clock) for n in range(4)]
    tasks = [asyncio.create_task(seat.campaign()) for seat in seats]
    await settle(200)
    assert [task.done() for task in tasks].count(True) == 1
    winner = next(n for n, task in enumerate(tasks) if task.done())
    kv = await store.get("leader")
    assert kv is not None
    assert (kv.value, kv.version, kv.create_revision) == (b"%d" % winner, 1, tasks[winner].result().revision)
    assert [seat.held() for seat in seats].count(True) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await seats[winner].resign()


async def test_a_stale_leader_is_fenced() -> None:
    """It still believes, as its clock stood still; its compare does not hold."""
    clock = ManualClock()
    store = MemoryStore(clock)
    a, b = (Election(store.connect(), "leader", name, 3, clock) for name in (b"a", b"b"))
    await a.campaign()
    stale = a.compare()
    await store.transact([Exists("leader")], [Put("by", b"a")])
    await store.lease_revoke(a._keeper.lease)  # type: ignore[union-attr]
    await b.campaign()
    assert not (await store.transact([stale], [Put("by", b"a again")])).succeeded
    assert (await store.transact([b.compare()], [Put("by", b"b")])).succeeded
    await settle()
    assert a.lost.is_set()
    await b.resign()
    await a.resign()
    assert await store.get("leader") is None


async def test_a_leader_whose_key_is_deleted_hears_of_it() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    seat = Election(store, "leader", b"a", 30, clock)
    await seat.campaign()
    await seat.update(b"changed, and still ours")
    await settle()
    assert seat.held()
    # The watch falls behind, and what it missed is compacted away: the key itself must be read.
    other = store.connect()
    store.faults.unavailable = True
    for value in (b"1", b"2"):
        await other.transact([Exists("leader")], [Put("leader", value, seat._keeper.lease.id)])  # type: ignore[union-attr]
    store.compact((await other.status()).revision)
    store.faults.unavailable = False
    store.wake_watches()
    await settle()
    assert seat.held()
    await other.transact([Exists("leader")], [Delete("leader")])
    await settle()
    assert seat.lost.is_set()
    assert not seat.held()
    await seat.resign()


async def test_a_lost_reply_to_the_winning_write_still_wins() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    store.faults.transactions = {1: Fault.LOSE_REPLY}
    seat = Election(store, "leader", b"a", 3, clock)
    epoch = await seat.campaign()
    kv = await store.get("leader")
    assert kv is not None
    assert epoch == LeaderEpoch(1, kv.create_revision)
    await seat.resign()


async def test_a_campaign_outlasts_an_outage() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    store.faults.unavailable = True
    seat = Election(store, "leader", b"a", 3, clock)
    going = asyncio.create_task(seat.campaign())
    await clock.elapse(60)
    store.faults.unavailable = False
    await clock.elapse(1)
    assert (await going).revision > 0
    # An unknown outcome may leave the key behind, on a lease that nobody keeps: it runs out, and the campaign goes on.
    await seat.resign()
    store.faults.transactions = {store.sent + n: Fault.LOSE_REPLY for n in range(1, 9)}
    going = asyncio.create_task(seat.campaign())
    await clock.elapse(0.1)
    assert await store.get("leader") is not None
    assert not seat.held()
    await clock.elapse(6)
    assert (await going).revision > 0
    assert seat.held()
    await seat.resign()


# --- presence ---


async def test_a_newer_life_takes_over_and_the_older_stops() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    old, new = (Presence(store.connect(), "agents/n0", life, 3, clock) for life in (b"old", b"new"))
    stale = await old.claim()
    assert (await store.transact([stale], [Put("ack/1", b"")])).succeeded
    fresh = await new.claim()
    await settle()
    assert old.lost.is_set()
    assert not old.held()
    assert new.held()
    assert not (await store.transact([stale], [Put("ack/2", b"")])).succeeded
    assert (await store.transact([fresh], [Put("ack/2", b"")])).succeeded
    # What the older one does on its way out must not hurt the newer.
    await old.leave()
    await clock.elapse(10)
    assert new.held()
    kv = await store.get("agents/n0")
    assert kv is not None
    assert kv.value == b"new"
    await new.leave()
    assert await store.get("agents/n0") is None


async def test_presence_keeps_its_compare_while_its_value_changes() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    here = Presence(store, "agents/n0", b"epoch 1", 3, clock)
    compare = await here.claim()
    await here.update(b"epoch 2")
    await clock.elapse(10)
    assert here.held()
    done = await store.transact([compare, ValueIs("agents/n0", b"epoch 2")], [Put("ack", b"")])
    assert done.succeeded
    newer = Presence(store.connect(), "agents/n0", b"newer", 3, clock)
    await newer.claim()
    with pytest.raises(LeaseLost):
        await here.update(b"epoch 3")
    await newer.leave()
    await here.leave()


async def test_presence_says_when_the_store_is_away() -> None:
    store = MemoryStore(ManualClock())
    store.faults.unavailable = True
    with pytest.raises(StoreUnavailable):
        await Presence(store, "agents/n0", b"", 3).claim()


# --- real processes, real etcd ---


class Candidate:
    """`leader_process` with its lines."""

    def __init__(self, endpoint: str, prefix: str, name: str) -> None:
        command = [sys.executable, "-m", "tests.store.leader_process", endpoint, prefix, name]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root)
        self.lines: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        if self.process.stdout is not None:
            for line in self.process.stdout:
                self.lines.put(json.loads(line))

    def until(self, event: str) -> dict[str, Any]:
        while True:
            said = self.lines.get(timeout=60)
            if said["event"] == event:
                return said

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextlib.contextmanager
def candidates(endpoint: str, prefix: str) -> Iterator[tuple[Candidate, Candidate]]:
    first = Candidate(endpoint, prefix, "first")
    second: Candidate | None = None
    try:
        first.until("wrote")
        second = Candidate(endpoint, prefix, "second")
        yield first, second
    finally:
        for candidate in (first, second):
            if candidate is not None:
                candidate.end()


async def test_a_leader_paused_past_its_ttl_and_continued_writes_nothing_more(shared_etcd: EtcdProcess) -> None:
    prefix = "/paused/"
    store = EtcdStore([shared_etcd.endpoint])
    with candidates(shared_etcd.endpoint, prefix) as (first, second):
        first.send(signal.SIGSTOP)
        leads = await asyncio.to_thread(second.until, "leads")
        await asyncio.to_thread(second.until, "wrote")
        first.send(signal.SIGCONT)
        refused = await asyncio.to_thread(first.until, "refused")
        assert refused["held"] is False
        await asyncio.to_thread(first.until, "stepped-down")
        # Since the second leads, every value is the second's.
        snapshot = await store.list(prefix)
        watch = store.watch(f"{prefix}out", from_revision=leads["revision"] + 1)
        seen: list[bytes] = []
        while True:
            batch = await anext(watch)
            seen.extend(change.kv.value for change in batch.events)
            if batch.revision >= snapshot.revision - 1:
                break
        assert seen
        assert all(value.startswith(b"second") for value in seen)
        await watch.aclose()
    await store.close()


async def test_a_killed_leader_is_succeeded(shared_etcd: EtcdProcess) -> None:
    with candidates(shared_etcd.endpoint, "/killed/") as (first, second):
        first.send(signal.SIGKILL)
        await asyncio.to_thread(second.until, "leads")
        assert (await asyncio.to_thread(second.until, "wrote"))["held"] is True
