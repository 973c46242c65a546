"""The store against a real etcd that is killed, hangs, compacts, loses its majority or its place in the list."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from eplane.election import LeaseKeeper
from eplane.errors import Compacted, HistoryLost, OutcomeUnknown, StoreClosed, StoreRefused, StoreUnavailable
from eplane.store.base import Exists, Missing, ModRevision, Put, Store
from eplane.store.etcd import EtcdStore
from eplane.store.once import Unanswered
from tests.etcd_process import EtcdProcess, cluster, free_port
from tests.store.conftest import until

LEASED = "/leased"


@pytest.fixture
async def store(etcd: EtcdProcess) -> AsyncIterator[EtcdStore]:
    made = EtcdStore([etcd.endpoint], give_up_s=20)
    yield made
    await made.close()


async def collect(store: Store, prefix: str, start: int, found: list[int], count: int) -> None:
    watch = store.watch(prefix, from_revision=start)
    while len(found) < count:
        found.extend(change.kv.mod_revision for change in (await anext(watch)).events)
    await watch.aclose()


async def test_nobody_there_is_one_clear_sentence() -> None:
    endpoints = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    store = EtcdStore(endpoints, give_up_s=0.5)
    with pytest.raises(StoreUnavailable) as caught:
        await store.get("a")
    assert all(endpoint in str(caught.value) for endpoint in endpoints)
    assert caught.value.exit_code == 5
    with pytest.raises(StoreUnavailable):
        await store.transact([Missing("a")], [Put("a", b"")])
    await store.close()


@pytest.mark.parametrize(
    ("endpoints", "words"),
    [
        ([], "no etcd endpoint"),
        (["localhost"], "host:port"),
        (["localhost:x"], "host:port"),
        (["https://localhost:1"], "without TLS"),
    ],
)
def test_bad_settings_are_refused(endpoints: list[str], words: str) -> None:
    with pytest.raises(StoreRefused, match=words) as caught:
        EtcdStore(endpoints)
    assert caught.value.exit_code == 2


def test_pings_that_etcd_punishes_are_refused() -> None:
    with pytest.raises(StoreRefused, match="keepalive_time_s"):
        EtcdStore(["localhost:1"], keepalive_time_s=4)


async def test_a_call_waits_a_restart_out(etcd: EtcdProcess, store: EtcdStore) -> None:
    await store.transact([Missing("a")], [Put("a", b"1")])
    etcd.kill()
    reading = asyncio.create_task(store.get("a"))
    writing = asyncio.create_task(store.transact([Exists("a")], [Put("b", b"2")]))
    await asyncio.sleep(0.3)
    await asyncio.to_thread(etcd.start)
    kv = await reading
    assert kv is not None
    assert kv.value == b"1"
    assert (await writing).succeeded
    kv = await store.get("b")
    assert kv is not None
    assert kv.version == 1


async def test_a_hanging_server_costs_a_deadline_not_the_client(etcd: EtcdProcess) -> None:
    """SIGSTOP: connections stay open and nothing answers. Each request ends by its deadline, and all goes on afterwards."""
    store = EtcdStore([etcd.endpoint], call_timeout_s=0.3, give_up_s=0.8)
    await store.transact([Missing("a")], [Put("a", b"1")])
    lease = await store.lease_grant(60)
    etcd.pause()
    with pytest.raises(StoreUnavailable, match=etcd.endpoint):
        await store.get("a")
    with pytest.raises(StoreUnavailable):
        await store.lease_keepalive(lease)
    with pytest.raises(OutcomeUnknown):
        await store.transact([Exists("a")], [Put("a", b"2")])
    etcd.resume()
    store.call_timeout_s, store._give_up_s = 10, 20
    assert await store.get("a") is not None
    assert await store.lease_keepalive(lease) == 60
    # The copies that hung may arrive now, but at most one can apply.
    kv = await store.get("a")
    assert kv is not None
    assert kv.version <= 2
    assert (await store.transact([Exists("a")], [Put("b", b"")])).succeeded
    await store.close()


async def test_nothing_is_applied_twice_while_the_server_is_killed_and_paused(etcd: EtcdProcess) -> None:
    """Two writers whose compare always holds; etcd's own count of writes is the judge."""
    stores = [EtcdStore([etcd.endpoint], call_timeout_s=0.25, give_up_s=30) for _ in range(2)]
    await stores[0].transact([Missing("anchor")], [Put("anchor", b"")])
    draw = random.Random(3)
    stop = False

    async def write(store: Store, key: str) -> int:
        written = 0
        while not stop:
            written += (await store.transact([Exists("anchor")], [Put(key, b"%d" % written)])).succeeded
        return written

    writers = [asyncio.create_task(write(store, f"w{n}")) for n, store in enumerate(stores)]
    for n in range(6):
        await asyncio.sleep(draw.uniform(0.05, 0.3))
        if n % 2:
            await asyncio.to_thread(etcd.restart)
        else:
            etcd.pause()
            await asyncio.sleep(draw.uniform(0.2, 0.6))
            etcd.resume()
    await asyncio.sleep(0.2)
    stop = True
    for n, written in enumerate(await asyncio.gather(*writers)):
        kv = await stores[0].get(f"w{n}")
        assert kv is not None
        assert kv.version == written
    for store in stores:
        await store.close()


async def test_a_watch_loses_nothing_across_restarts(etcd: EtcdProcess, store: EtcdStore) -> None:
    """Every write's revision comes out of the watch exactly once and in order, whatever happens in between."""
    draw = random.Random(11)
    made: list[int] = []
    found: list[int] = []
    stop = False

    async def write() -> None:
        while not stop:
            key = f"/w/{draw.randrange(4)}"
            result = await store.transact([Missing("/never")], [Put(key, b"x"), Put("/beside", b"")])
            made.append(result.revision)
            await asyncio.sleep(draw.uniform(0, 0.01))

    writer = asyncio.create_task(write())
    watcher = asyncio.create_task(collect(store, "/w/", 1, found, 10**9))
    for n in range(5):
        await asyncio.sleep(draw.uniform(0.05, 0.25))
        if n % 3 == 2:
            etcd.pause()
            await asyncio.sleep(0.3)
            etcd.resume()
        else:
            etcd.kill()
            await asyncio.sleep(draw.uniform(0, 0.2))
            await asyncio.to_thread(etcd.start)
    stop = True
    await writer
    await until(lambda: len(found) >= len(made))
    watcher.cancel()
    await asyncio.gather(watcher, return_exceptions=True)
    assert found == made


async def test_a_watch_that_catches_up_goes_on_from_what_it_delivered(etcd: EtcdProcess, store: EtcdStore) -> None:
    """etcd sends old history in pieces of 1000 revisions, and each carries the newest revision in its header."""
    total = 1500
    await asyncio.gather(*(store.transact([Missing("/never")], [Put(f"/c/{n % 7}", b"")]) for n in range(total)))
    watch = store.watch("/c/", from_revision=1)
    first = await anext(watch)
    assert len(first.events) < total
    found = [change.kv.mod_revision for change in first.events]
    await asyncio.to_thread(etcd.restart)
    while len(found) < total:
        found.extend(change.kv.mod_revision for change in (await anext(watch)).events)
    assert found == sorted(set(found))
    await watch.aclose()


async def test_compaction_is_reported_where_it_matters(etcd: EtcdProcess, store: EtcdStore) -> None:
    first = (await store.transact([Missing("a")], [Put("a", b"1")])).revision
    last = (await store.transact([Exists("a")], [Put("a", b"2")])).revision
    live = store.watch("a", from_revision=last + 1)
    waiting = asyncio.ensure_future(anext(live))
    etcd.compact()
    watch = store.watch("a", from_revision=first)
    with pytest.raises(Compacted) as caught:
        await anext(watch)
    assert caught.value.compact_revision >= last
    with pytest.raises(Compacted):
        await store.list("a", revision=first)
    # A watch that is up to date does not care.
    made = await store.transact([Exists("a")], [Put("a", b"3")])
    assert (await waiting).revision == made.revision
    # Nor does a list without a wanted revision.
    assert (await store.list("a")).items[0].value == b"3"
    await live.aclose()
    await watch.aclose()


async def test_a_list_starts_over_when_its_pages_are_compacted_away(etcd: EtcdProcess, store: EtcdStore) -> None:
    for n in range(0, 192, 64):
        await store.transact([Missing("/never")], [Put(f"/p/{i:04d}", b"old") for i in range(n, n + 64)])
    ask = store._ask_patiently
    pages = 0

    async def between(pick: Any, request: Any) -> Any:
        nonlocal pages
        pages += 1
        if pages == 2:
            await EtcdStore([etcd.endpoint]).transact([Missing("/never")], [Put("/p/0000", b"new")])
            etcd.compact()
        return await ask(pick, request)

    store._ask_patiently = between  # type: ignore[method-assign]
    snapshot = await store.list("/p/")
    assert len(snapshot.items) == 192
    assert snapshot.items[0].value == b"new"
    assert pages > 3


async def test_pages_are_of_one_moment(store: EtcdStore) -> None:
    for n in range(0, 192, 64):
        await store.transact([Missing("/never")], [Put(f"/p/{i:04d}", b"old") for i in range(n, n + 64)])
    ask = store._ask_patiently
    made = 0

    async def between(pick: Any, request: Any) -> Any:
        nonlocal made
        reply = await ask(pick, request)
        if not made:
            made = (
                await store.transact([Missing("/never")], [Put("/p/0000", b"new"), Put("/p/0191", b"new")])
            ).revision
        return reply

    store._ask_patiently = between  # type: ignore[method-assign]
    snapshot = await store.list("/p/")
    assert {kv.value for kv in snapshot.items} == {b"old"}
    assert snapshot.revision == made - 1


async def test_closing_ends_a_call_without_cancelling_its_caller(etcd: EtcdProcess) -> None:
    store = EtcdStore([etcd.endpoint], call_timeout_s=20)
    await store.transact([Missing("a")], [Put("a", b"")])
    etcd.pause()
    going = [asyncio.create_task(store.get("a")), asyncio.create_task(store.transact([Exists("a")], [Put("a", b"")]))]
    await asyncio.sleep(0.2)
    await store.close()
    with pytest.raises(StoreClosed):
        await going[0]
    # It was sent: that the store is closed says nothing about it.
    with pytest.raises(OutcomeUnknown):
        await going[1]
    etcd.resume()


async def test_a_wiped_store_is_not_waited_for(etcd: EtcdProcess, store: EtcdStore) -> None:
    """It comes back at revision 1, with the same name and place, and would reach our revision again some day."""
    for n in range(5):
        last = await store.transact([Missing("/never")], [Put("a", b"%d" % n)])
    watch = store.watch("a", from_revision=last.revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(etcd.wipe)
    await asyncio.to_thread(etcd.start)
    with pytest.raises(HistoryLost):
        async with asyncio.timeout(30):
            await waiting
    # Its leases are gone with it, our own for transactions too: writing goes on.
    assert (await store.transact([Missing("a")], [Put("a", b"new")])).succeeded
    await watch.aclose()


async def test_another_cluster_at_the_same_place_is_not_taken_for_the_old_one(
    tmp_path: Path, etcd: EtcdProcess
) -> None:
    store = EtcdStore([etcd.endpoint], give_up_s=20)
    made = await store.transact([Missing("a")], [Put("a", b"1")])
    watch = store.watch("a", from_revision=made.revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.1)
    etcd.kill()
    other = EtcdProcess(tmp_path / "other", name="other")
    other.client_port = etcd.client_port
    with other:
        writer = EtcdStore([other.endpoint])
        # It is as far as the old one was: only its identity tells.
        for n in range(6):
            await writer.transact([Missing("/never")], [Put("a", b"%d" % n)])
        with pytest.raises(HistoryLost, match="another etcd cluster"):
            async with asyncio.timeout(30):
                await waiting
        await writer.close()
    await watch.aclose()
    await store.close()


async def test_a_lease_outlives_members_that_hang_and_die(tmp_path: Path) -> None:
    """Three members: the one that the client asks hangs for longer than the lease lives, later one is killed, then two."""
    members = cluster(tmp_path, 3)
    try:
        for member in members:
            member.start(wait=False)
        for member in members:
            member.wait_healthy()
        store = EtcdStore([member.endpoint for member in members], call_timeout_s=0.5, give_up_s=20)
        keeper = LeaseKeeper(store, 2)
        lease = await keeper.start()
        made = await store.transact([Missing(LEASED)], [Put(LEASED, b"", lease.id)])
        assert made.succeeded
        found: list[int] = []
        watcher = asyncio.create_task(collect(store, "/w/", 1, found, 2))
        writes: list[int] = []
        asked = next(member for member in members if member.endpoint == store.peers.current().address)
        asked.pause()
        await asyncio.sleep(2.3)
        writes.append((await store.transact([Missing("/never")], [Put("/w/a", b"")])).revision)
        asked.resume()
        asked.wait_healthy()
        others = [member for member in members if member.endpoint != store.peers.current().address]
        others[0].kill()
        writes.append((await store.transact([Missing("/never")], [Put("/w/a", b"")])).revision)
        assert keeper.alive()
        assert await store.get(LEASED) is not None
        async with asyncio.timeout(30):
            await watcher
        assert found == writes
        # Without a majority a watch knows that it is broken, though its own member lives.
        watch = store.watch("/w/", from_revision=writes[-1] + 1)
        waiting = asyncio.ensure_future(anext(watch))
        await until(lambda: watch.broken_for_s == 0)
        others[1].kill()
        await until(lambda: watch.broken_for_s > 0)
        await asyncio.to_thread(others[1].start)
        made = await store.transact([Missing("/never")], [Put("/w/a", b"")])
        assert (await waiting).revision == made.revision
        await watch.aclose()
        await keeper.stop()
        await store.close()
    finally:
        for member in members:
            member.stop()


async def test_a_lost_grant_is_not_made_twice(etcd: EtcdProcess, store: EtcdStore) -> None:
    """The first reply is lost: the second request finds the lease there, under the id that we chose."""
    ask = store._ask_once
    lost = 0

    async def lose(pick: Any, request: Any) -> Any:
        nonlocal lost
        reply = await ask(pick, request)
        if not lost:
            lost += 1
            raise Unanswered("the reply was lost")
        return reply

    store._ask_once = lose  # type: ignore[method-assign]
    lease = await store.lease_grant(30)
    assert lost == 1
    assert await store.lease_keepalive(lease) == 30
    assert len(etcd.post("lease/leases", {})["leases"]) == 1


async def test_many_keys_and_large_values_come_in_pages(etcd: EtcdProcess, store: EtcdStore) -> None:
    blob = random.Random(1).randbytes(250_000)
    for n in range(0, 48, 4):
        await store.transact([Missing("/never")], [Put(f"/big/{i:03d}", blob) for i in range(n, n + 4)])
    for start in range(0, 1280, 64):
        await store.transact([Missing("/never")], [Put(f"/many/{i:05d}", b"") for i in range(start, start + 64)])
    big, many = await store.list("/big/"), await store.list("/many/")
    assert [kv.value for kv in big.items] == [blob] * 48
    assert [kv.key for kv in many.items] == [f"/many/{i:05d}" for i in range(1280)]
    kv = many.items[0]
    assert (await store.transact([ModRevision(kv.key, kv.mod_revision)], [Put(kv.key, b"1")])).succeeded
