"""The mirror equals the store, through outages, compaction and wipes."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.clock import ManualClock, settle
from eplane.errors import InvalidTransaction, StoreClosed, StoreUnavailable
from eplane.store.base import Delete, DeletePrefix, Exists, Missing, ModRevision, Op, Put, Store
from eplane.store.etcd import EtcdStore
from eplane.store.memory import MemoryStore, MemoryWatch
from eplane.store.mirror import Mirror
from tests.etcd_process import EtcdProcess
from tests.store.conftest import Bench


async def write(store: Store, key: str, value: bytes) -> int:
    kv = await store.get(key)
    result = await store.transact([ModRevision(key, kv.mod_revision if kv else 0)], [Put(key, value)])
    return result.revision


async def test_a_mirror_follows(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    await write(store, f"{p}a", b"1")
    async with asyncio.timeout(30), Mirror(bench.connect(), p) as mirror:
        kv = mirror.get(f"{p}a")
        assert kv is not None
        assert kv.value == b"1"
        done = await store.transact([Exists(f"{p}a")], [Put(f"{p}b/1", b"2"), Put(f"{p}b/2", b"3"), Delete(f"{p}a")])
        await mirror.wait(done.revision)
        assert mirror.get(f"{p}a") is None
        assert [kv.key for kv in mirror.items()] == [f"{p}b/1", f"{p}b/2"]
        assert [kv.key for kv in mirror.items(f"{p}b/2")] == [f"{p}b/2"]
        assert mirror.items() == (await store.list(p)).items
        assert mirror.lists == 1


async def test_waking_up(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    async with asyncio.timeout(30):
        mirror = Mirror(bench.connect(), p)
        await mirror.start()
        wakeups = mirror.wakeups()
        first = await anext(wakeups)
        made = await write(store, f"{p}a", b"1")
        assert await anext(wakeups) == made > first
        waiting = asyncio.ensure_future(anext(wakeups))
        late = asyncio.ensure_future(mirror.wait(made + 10**6))
        await asyncio.sleep(0.05)
        await mirror.close()
        for ended in (waiting, late):
            with pytest.raises(StoreClosed):
                await ended
        assert mirror.stale_for_s == float("inf")


async def test_a_mirror_of_an_unreachable_store_says_so() -> None:
    store = MemoryStore(ManualClock())
    store.faults.unavailable = True
    with pytest.raises(StoreUnavailable):
        await Mirror(store, "/").start()


async def test_staleness_is_told() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    client = store.connect()
    async with Mirror(client, "/", clock) as mirror:
        assert mirror.stale_for_s == 0
        client.faults.unavailable = True
        await settle()
        assert mirror.stale_for_s == 0
        clock.advance(4)
        assert mirror.stale_for_s == 4
        made = await write(store, "/a", b"1")
        await settle()
        assert mirror.get("/a") is None
        client.faults.unavailable = False
        store.wake_watches()
        await mirror.wait(made)
        assert mirror.stale_for_s == 0


async def test_a_relist_that_fails_is_tried_on_and_counts_as_stale() -> None:
    clock = ManualClock()
    store = MemoryStore(clock)
    client = store.connect()
    for n in range(3):
        await write(store, f"/{n}", b"1")
    async with Mirror(client, "/", clock) as mirror:
        client.faults.unavailable = True
        made = await write(store, "/a", b"1")
        store.compact(made)
        lost = client.list
        client.faults.unavailable = False

        async def fails(prefix: str, *, revision: int | None = None) -> object:
            raise StoreUnavailable("down")

        client.list = fails  # type: ignore[method-assign, assignment]
        store.wake_watches()
        await clock.elapse(2)
        assert mirror.lists == 1
        assert mirror.stale_for_s == 2
        client.list = lost  # type: ignore[method-assign]
        await clock.elapse(1)
        assert mirror.lists == 2
        assert mirror.stale_for_s == 0
        assert mirror.items() == (await store.list("/")).items


async def test_a_mirror_that_breaks_does_not_look_alive() -> None:
    class Broken(MemoryStore):
        def watch(self, prefix: str, *, from_revision: int) -> MemoryWatch:
            raise InvalidTransaction("no such watch")

    async with Mirror(Broken(ManualClock()), "/") as mirror:
        await settle()
        assert mirror.stale_for_s == float("inf")
        with pytest.raises(InvalidTransaction):
            await mirror.wait(10)


async def test_a_wiped_memory_store_is_listed_again() -> None:
    store = MemoryStore(ManualClock())
    for n in range(5):
        await write(store, f"/{n}", b"1")
    async with Mirror(store, "/") as mirror:
        store.wipe()
        await settle()
        assert mirror.items() == ()
        made = await write(store, "/new", b"1")
        await mirror.wait(made)
        assert [kv.key for kv in mirror.items()] == ["/new"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "drop", "away", "back", "compact"]), st.integers(0, 5)), max_size=40
)


@given(steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_the_mirror_comes_to_equal_the_store_whatever_happens(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        store = MemoryStore(ManualClock())
        client = store.connect()
        async with Mirror(client, "/m/") as mirror:
            for what, n in steps:
                key, ops = f"/m/{n % 3}/{n}", list[Op]()
                match what:
                    case "put":
                        ops = [Put(key, b"%d" % n)]
                    case "delete":
                        ops = [Delete(key)]
                    case "drop":
                        ops = [DeletePrefix(f"/m/{n % 3}/")]
                    case "compact":
                        store.compact((await store.status()).revision)
                    case _:
                        client.faults.unavailable = what == "away"
                        store.wake_watches()
                if ops:
                    await store.transact([Missing("/never")], ops)
                if n == 0:
                    await settle(10)
            client.faults.unavailable = False
            store.wake_watches()
            await settle(200)
            assert mirror.items() == (await store.list("/m/")).items
        await store.close()

    asyncio.run(run())


async def test_a_mirror_lives_through_restart_compaction_and_wipe(etcd: EtcdProcess) -> None:
    store = EtcdStore([etcd.endpoint])
    draw = random.Random(7)
    async with asyncio.timeout(15), Mirror(EtcdStore([etcd.endpoint]), "/m/") as mirror:
        for _ in range(20):
            last = await write(store, f"/m/{draw.randrange(8)}", draw.randbytes(8))
        await mirror.wait(last)
        etcd.kill()
        await asyncio.sleep(0.3)
        assert mirror.stale_for_s > 0
        etcd.start()
        last = await write(store, "/m/restarted", b"1")
        await mirror.wait(last)
        assert mirror.lists == 1
        assert mirror.stale_for_s == 0
        # Missed history that is gone: stopped reading, many changes, compaction, and a break.
        etcd.kill()
        etcd.start()
        for n in range(5):
            last = await write(store, "/m/busy", b"%d" % n)
        etcd.compact()
        await mirror.wait(last)
        assert mirror.items() == (await store.list("/m/")).items
        etcd.wipe()
        etcd.start()
        last = await write(store, "/m/after", b"1")
        async with mirror.changed:
            await mirror.changed.wait_for(lambda: mirror.get("/m/after") is not None)
        assert mirror.items() == (await store.list("/m/")).items
        assert mirror.lists >= 2
        await mirror._store.close()
    await store.close()
