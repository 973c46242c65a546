"""What every store promises. Each test runs on the memory store and on a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from eplane.errors import (
    HistoryLost,
    InvalidTransaction,
    LeaseLost,
    StoreClosed,
    TooManyOperations,
    ValueTooLarge,
)
from eplane.store.base import (
    MAX_OPS,
    MAX_VALUE_BYTES,
    RESERVED_PREFIX,
    Change,
    ChangeKind,
    Compare,
    CreateRevision,
    Delete,
    DeletePrefix,
    Exists,
    Missing,
    ModRevision,
    Op,
    Put,
    ValueIs,
    Watch,
    failed_compares,
)
from tests.store.conftest import Bench, put


async def next_changes(watch: Watch, count: int) -> list[Change]:
    found: list[Change] = []
    async with asyncio.timeout(20):
        while len(found) < count:
            found.extend((await anext(watch)).events)
    return found


async def test_a_key_carries_its_value_and_revisions(bench: Bench) -> None:
    store, key = bench.connect(), f"{bench.prefix}a"
    assert await store.get(key) is None
    first = await put(store, key, b"\x00one\xff")
    second = await put(store, key, b"")
    kv = await store.get(key)
    assert kv is not None
    assert (kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.version) == (key, b"", first, second, 2)


@pytest.mark.parametrize(
    ("compare", "holds_now", "holds_before"),
    [
        (Exists("a"), True, False),
        (Missing("a"), False, True),
        (ValueIs("a", b"v"), True, False),
        (ValueIs("a", b"w"), False, False),
        (ValueIs("a", b""), False, False),
        (ModRevision("a", 0), False, True),
        (CreateRevision("a", 0), False, True),
        (ModRevision("a", 10**12), False, False),
        (CreateRevision("a", 10**12), False, False),
    ],
)
async def test_compares_decide(bench: Bench, compare: Compare, holds_now: bool, holds_before: bool) -> None:
    store = bench.connect()
    key = f"{bench.prefix}a"
    kind = type(compare)
    rest = [getattr(compare, name) for name in ("revision", "value") if hasattr(compare, name)]
    placed = kind(key, *rest)
    before = await store.transact([placed], [Put(f"{bench.prefix}seen", b"before")])
    await put(store, key, b"v")
    now = await store.transact([placed], [Put(f"{bench.prefix}seen", b"now")])
    assert (before.succeeded, now.succeeded) == (holds_before, holds_now)


async def test_revision_compares_follow_the_key(bench: Bench) -> None:
    store, key, out = bench.connect(), f"{bench.prefix}a", f"{bench.prefix}out"
    created = await put(store, key)
    changed = await put(store, key)
    truths: list[tuple[Compare, bool]] = [
        (CreateRevision(key, created), True),
        (ModRevision(key, changed), True),
        (CreateRevision(key, changed), False),
        (ModRevision(key, created), False),
    ]
    for compare, truth in truths:
        assert (await store.transact([compare], [Put(out, b"")])).succeeded is truth


async def test_all_or_nothing_at_one_revision(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    await put(store, f"{p}old/1")
    await put(store, f"{p}old/2")
    await put(store, f"{p}gone")
    ops: list[Op] = [Put(f"{p}a", b"1"), Put(f"{p}b", b"2"), Delete(f"{p}gone"), DeletePrefix(f"{p}old/")]
    refused = await store.transact([Missing(f"{p}a"), Exists(f"{p}never")], ops)
    assert not refused.succeeded
    assert [kv.key for kv in (await store.list(p)).items] == [f"{p}gone", f"{p}old/1", f"{p}old/2"]
    done = await store.transact([Missing(f"{p}a"), Exists(f"{p}gone")], ops)
    assert done.succeeded
    snapshot = await store.list(p)
    assert [(kv.key, kv.value, kv.mod_revision) for kv in snapshot.items] == [
        (f"{p}a", b"1", done.revision),
        (f"{p}b", b"2", done.revision),
    ]


async def test_a_failed_transaction_names_the_compares_that_failed(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    await put(store, f"{p}a", b"v")
    compares: Sequence[Compare] = [
        Exists(f"{p}a"),
        ValueIs(f"{p}a", b"w"),
        Missing(f"{p}b"),
        Exists(f"{p}c"),
        ModRevision(f"{p}a", 1),
    ]
    result = await store.transact(compares, [Put(f"{p}x", b"")])
    assert failed_compares(result, compares) == (compares[1], compares[3], compares[4])
    found = result.found[f"{p}a"]
    assert found is not None
    assert found.value == b"v"
    assert result.found[f"{p}b"] is None
    assert failed_compares(await store.transact([Exists(f"{p}a")], [Put(f"{p}x", b"")]), compares) == ()


async def test_a_transaction_must_be_one_that_any_store_takes(bench: Bench) -> None:
    store, key = bench.connect(), f"{bench.prefix}a"
    free = Missing(key)
    small = [Put(f"{key}{n}", b"") for n in range(MAX_OPS)]
    with pytest.raises(InvalidTransaction, match="without a compare"):
        await store.transact([], [Put(key, b"")])
    with pytest.raises(InvalidTransaction, match="without an operation"):
        await store.transact([free], [])
    with pytest.raises(TooManyOperations, match="65 operations"):
        await store.transact([free], [*small, Put(key, b"")])
    with pytest.raises(TooManyOperations, match="65 compares"):
        await store.transact([free] * 65, [Put(key, b"")])
    with pytest.raises(ValueTooLarge, match="262145 bytes"):
        await store.transact([free], [Put(key, bytes(MAX_VALUE_BYTES + 1))])
    with pytest.raises(ValueTooLarge, match="in one transaction"):
        await store.transact([free], [Put(f"{key}{n}", bytes(MAX_VALUE_BYTES)) for n in range(6)])
    with pytest.raises(InvalidTransaction, match="put twice"):
        await store.transact([free], [Put(key, b"1"), Put(key, b"2")])
    for delete in (Delete(key), DeletePrefix(bench.prefix)):
        with pytest.raises(InvalidTransaction, match="put and deleted"):
            await store.transact([free], [Put(key, b""), delete])
    for prefix in ("", "~", RESERVED_PREFIX, f"{RESERVED_PREFIX}x"):
        with pytest.raises(InvalidTransaction):
            await store.transact([free], [DeletePrefix(prefix)])
    for bad in ("", "a\0b", f"{RESERVED_PREFIX}x"):
        with pytest.raises(InvalidTransaction):
            await store.transact([free], [Put(bad, b"")])
        with pytest.raises(InvalidTransaction):
            await store.transact([Missing(bad)], [Put(key, b"")])
    assert await store.get(key) is None


async def test_the_largest_transaction_is_taken(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    assert (
        await store.transact(
            [Missing(f"{p}{n}") for n in range(MAX_OPS)], [Put(f"{p}{n}", b"") for n in range(MAX_OPS)]
        )
    ).succeeded
    parts: list[Op] = [Put(f"{p}part{n}", bytes([n]) * (MAX_VALUE_BYTES - 64)) for n in range(5)]
    assert (await store.transact([Missing(f"{p}part0")], parts)).succeeded
    snapshot = await store.list(f"{p}part")
    assert [kv.value[:1] for kv in snapshot.items] == [bytes([n]) for n in range(5)]


async def test_a_list_is_one_moment(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    revision = 0
    for start in range(0, 192, MAX_OPS):
        ops = [Put(f"{p}k/{n:04d}", b"%d" % n) for n in range(start, start + MAX_OPS)]
        revision = (await store.transact([Missing(f"{p}k/{start:04d}")], ops)).revision
    await put(store, f"{p}k2", b"beside the prefix")
    await store.transact([Exists(f"{p}k2")], [DeletePrefix(f"{p}k/")])
    await put(store, f"{p}k/later")
    then = await store.list(f"{p}k/", revision=revision)
    assert [kv.value for kv in then.items] == [b"%d" % n for n in range(192)]
    assert then.revision == revision
    now = await store.list(f"{p}k/")
    assert [kv.key for kv in now.items] == [f"{p}k/later"]
    assert now.revision >= now.items[0].mod_revision
    with pytest.raises(HistoryLost):
        await store.list(p, revision=now.revision + 10**6)


async def test_a_watch_tells_each_change_once_in_order(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    early = await put(store, f"{p}a", b"1")
    watch = store.watch(p, from_revision=early)
    one = await store.transact([Exists(f"{p}a")], [Put(f"{p}b", b"2"), Delete(f"{p}a")])
    await put(store, f"{bench.prefix[:-1]}-beside", b"not under the prefix")
    two = await put(store, f"{p}b", b"3")
    seen = await next_changes(watch, 4)
    assert [(c.kind, c.kv.key, c.kv.value, c.kv.mod_revision) for c in seen[:1] + seen[3:]] == [
        (ChangeKind.PUT, f"{p}a", b"1", early),
        (ChangeKind.PUT, f"{p}b", b"3", two),
    ]
    assert {(c.kind, c.kv.key, c.kv.mod_revision) for c in seen[1:3]} == {
        (ChangeKind.PUT, f"{p}b", one.revision),
        (ChangeKind.DELETE, f"{p}a", one.revision),
    }
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(watch)


async def test_a_batch_holds_whole_revisions(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    start = await put(store, f"{p}start")
    watch = store.watch(p, from_revision=start + 1)
    done = await store.transact([Exists(f"{p}start")], [Put(f"{p}{n}", b"") for n in range(10)])
    async with asyncio.timeout(20):
        batch = await anext(watch)
    assert batch.revision == done.revision
    assert len(batch.events) == 10
    await watch.aclose()


async def test_waiting_on_a_watch_can_be_cancelled_and_taken_up_again(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    start = (await store.list(p)).revision
    watch = store.watch(p, from_revision=start + 1)
    found: list[int] = []
    made: list[int] = []
    for n in range(12):
        if n % 2:
            made.append(await put(store, f"{p}{n}"))
        try:
            async with asyncio.timeout(0.01 * (n % 4)):
                found.extend(change.kv.mod_revision for change in (await anext(watch)).events)
        except TimeoutError:
            continue
    found.extend(c.kv.mod_revision for c in await next_changes(watch, len(made) - len(found)))
    assert found == made
    await watch.aclose()


async def test_closing_a_watch_ends_who_waits_on_it(bench: Bench) -> None:
    store = bench.connect()
    watch = store.watch(bench.prefix, from_revision=(await store.list(bench.prefix)).revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.1)
    await watch.aclose()
    with pytest.raises(StopAsyncIteration):
        async with asyncio.timeout(20):
            await waiting


async def test_a_watch_from_beyond_the_store_says_that_history_is_lost(bench: Bench) -> None:
    """As after a wipe: waiting until the store gets there would miss everything that it does before."""
    store = bench.connect()
    now = (await store.list(bench.prefix)).revision
    watch = store.watch(bench.prefix, from_revision=now + 10**6)
    with pytest.raises(HistoryLost):
        async with asyncio.timeout(20):
            await anext(watch)


async def test_a_lease_carries_its_keys_away(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    kept, dropped = await store.lease_grant(60), await store.lease_grant(60)
    await put(store, f"{p}stays", lease=kept.id)
    start = await put(store, f"{p}goes", lease=dropped.id)
    await put(store, f"{p}moved", lease=dropped.id)
    await put(store, f"{p}moved", lease=kept.id)
    kv = await store.get(f"{p}goes")
    assert kv is not None
    assert kv.lease == dropped.id
    assert await store.lease_keepalive(dropped) == dropped.ttl_s
    await store.lease_revoke(dropped)
    assert [kv.key for kv in (await store.list(p)).items] == [f"{p}moved", f"{p}stays"]
    watch = store.watch(f"{p}goes", from_revision=start + 1)
    assert [c.kind for c in await next_changes(watch, 1)] == [ChangeKind.DELETE]
    await watch.aclose()
    await store.lease_revoke(dropped)
    with pytest.raises(LeaseLost):
        await store.lease_keepalive(dropped)
    with pytest.raises(LeaseLost):
        await store.transact([Missing(f"{p}new")], [Put(f"{p}new", b"", dropped.id)])
    assert (await store.transact([Missing(f"{p}new")], [Put(f"{p}new", b"", kept.id)])).succeeded


async def test_a_lease_that_nobody_keeps_runs_out(bench: Bench) -> None:
    store, p = bench.connect(), bench.prefix
    lease = await store.lease_grant(1)
    assert lease.ttl_s >= 1
    made = await put(store, f"{p}a", lease=lease.id)
    watch = store.watch(p, from_revision=made + 1)
    assert [c.kind for c in await next_changes(watch, 1)] == [ChangeKind.DELETE]
    assert await store.get(f"{p}a") is None
    await watch.aclose()


async def test_status_names_the_cluster(bench: Bench) -> None:
    store = bench.connect()
    revision = await put(store, f"{bench.prefix}a")
    status = await store.status()
    assert status.healthy
    assert status.cluster_id != 0
    assert status.revision >= revision
    assert (await bench.connect().status()).cluster_id == status.cluster_id


async def test_a_closed_store_says_so(bench: Bench) -> None:
    store = bench.connect()
    watch = store.watch(bench.prefix, from_revision=(await store.list(bench.prefix)).revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    await store.close()
    with pytest.raises(StopAsyncIteration):
        await waiting
    with pytest.raises(StoreClosed):
        await store.get(f"{bench.prefix}a")
    with pytest.raises(StoreClosed):
        store.watch(bench.prefix, from_revision=1)


async def test_bookkeeping_is_invisible(bench: Bench) -> None:
    store = bench.connect()
    start = (await store.list("")).revision
    watch = store.watch("", from_revision=start + 1)
    await put(store, f"{bench.prefix}a", b"1")
    seen = await next_changes(watch, 1)
    assert all(not kv.key.startswith(RESERVED_PREFIX) for kv in (await store.list("")).items)
    assert all(not change.kv.key.startswith(RESERVED_PREFIX) for change in seen)
    with pytest.raises(InvalidTransaction):
        await store.get(f"{RESERVED_PREFIX}x")
    await watch.aclose()
