"""Transactions whose requests and replies are lost, held back and come late: applied at most once, and told right."""

from __future__ import annotations

import asyncio

import pytest

from eplane.errors import (
    LeaseLost,
    OutcomeUnknown,
)
from eplane.store.base import (
    Compare,
    Delete,
    Exists,
    Missing,
    ModRevision,
    Put,
    Store,
    ValueIs,
    failed_compares,
)
from eplane.store.memory import Fault
from tests.store.conftest import Bench, put


async def versions(store: Store, key: str) -> int:
    """How often the key was written since it was created."""
    kv = await store.get(key)
    return kv.version if kv else 0


async def test_a_lost_reply_is_recognised_as_success(bench: Bench) -> None:
    key = f"{bench.prefix}a"
    store = bench.connect({1: Fault.LOSE_REPLY, 3: Fault.LOSE_REPLY, 4: Fault.LOSE_REPLY})
    first = await store.transact([Missing(key)], [Put(key, b"1")])
    kv = await store.get(key)
    assert kv is not None
    assert (first.succeeded, first.revision) == (True, kv.mod_revision)
    second = await store.transact([ModRevision(key, first.revision)], [Put(key, b"2")])
    kv = await store.get(key)
    assert kv is not None
    assert (second.succeeded, second.revision, kv.value) == (True, kv.mod_revision, b"2")


async def test_a_compare_that_holds_twice_does_not_apply_twice(bench: Bench) -> None:
    key = f"{bench.prefix}a"
    store = bench.connect({2: Fault.LOSE_REPLY})
    await store.transact([Missing(key)], [Put(key, b"1")])
    assert (await store.transact([Exists(key)], [Put(key, b"2")])).succeeded
    assert await versions(store, key) == 2


async def test_success_is_recognised_after_others_wrote_over_it(bench: Bench) -> None:
    """What the transaction wrote is gone when it is sent again: the keys themselves can not tell."""
    key = f"{bench.prefix}a"
    other = bench.connect()

    async def overwrite() -> None:
        await other.transact([Exists(key)], [Delete(key)])
        await put(other, key, b"theirs")

    store = bench.connect({1: Fault.LOSE_REPLY}, before={2: overwrite})
    result = await store.transact([Missing(key)], [Put(key, b"mine")])
    assert result.succeeded
    kv = await other.get(key)
    assert kv is not None
    assert kv.value == b"theirs"
    assert result.revision < kv.create_revision


async def test_a_lost_request_is_sent_again(bench: Bench) -> None:
    key = f"{bench.prefix}a"
    store = bench.connect({1: Fault.LOSE_REQUEST, 2: Fault.LOSE_REQUEST, 4: Fault.LOSE_REQUEST})
    assert (await store.transact([Missing(key)], [Put(key, b"1")])).succeeded
    assert not (await store.transact([Missing(key)], [Put(key, b"2")])).succeeded
    assert await versions(store, key) == 1


async def test_a_failure_stays_a_failure_when_its_reply_is_lost(bench: Bench) -> None:
    """Also when the reply to the call-back is lost."""
    key = f"{bench.prefix}a"
    store = bench.connect({2: Fault.LOSE_REPLY, 4: Fault.LOSE_REPLY})
    await put(store, key, b"1")
    compares: list[Compare] = [ValueIs(key, b"other"), Exists(key)]
    result = await store.transact(compares, [Put(key, b"2")])
    assert failed_compares(result, compares) == (compares[0],)
    assert (await store.transact([ValueIs(key, b"1")], [Put(key, b"3")])).succeeded


async def test_a_late_copy_can_not_apply_after_failure_was_reported(bench: Bench) -> None:
    """The first copy hangs on a stuck node, the second fails, then the world changes so that the first would hold."""
    key, flag = f"{bench.prefix}a", f"{bench.prefix}flag"
    store, other = bench.connect({1: Fault.HOLD}), bench.connect()
    assert not (await store.transact([Exists(flag)], [Put(key, b"late")])).succeeded
    await put(other, flag)
    assert [answer.succeeded for answer in await bench.release_held(store)] == [False]
    assert await other.get(key) is None


async def test_a_late_copy_can_not_apply_after_success(bench: Bench) -> None:
    key = f"{bench.prefix}a"
    store = bench.connect({2: Fault.HOLD})
    await store.transact([Missing(key)], [Put(key, b"1")])
    assert (await store.transact([Exists(key)], [Put(key, b"2")])).succeeded
    assert [answer.succeeded for answer in await bench.release_held(store)] == [False]
    assert await versions(store, key) == 2


async def test_a_copy_that_applies_before_it_is_called_back_is_a_success(bench: Bench) -> None:
    key, flag = f"{bench.prefix}a", f"{bench.prefix}flag"
    other = bench.connect()

    async def arrive() -> None:
        await put(other, flag)
        assert [answer.succeeded for answer in await bench.release_held(store)] == [True]

    # 1 is held back, 2 fails its compare, 3 would call 1 back.
    store = bench.connect({1: Fault.HOLD}, before={3: arrive})
    result = await store.transact([Exists(flag)], [Put(key, b"late")])
    kv = await other.get(key)
    assert kv is not None
    assert (result.succeeded, result.revision) == (True, kv.mod_revision)


async def test_no_answer_at_all_is_an_unknown_outcome(bench: Bench) -> None:
    """And the client goes on working."""
    key = f"{bench.prefix}a"
    store = bench.connect(dict.fromkeys(range(1, 200), Fault.LOSE_REPLY))
    if bench.kind == "etcd":
        store._give_up_s = 0.3  # type: ignore[attr-defined]
    with pytest.raises(OutcomeUnknown):
        await store.transact([Missing(key)], [Put(key, b"1")])
    assert await versions(store, key) == 1
    clean = bench.connect()
    assert (await clean.transact([Exists(key)], [Put(key, b"2")])).succeeded


async def test_concurrent_writers_count_right_whatever_is_lost(bench: Bench) -> None:
    key = f"{bench.prefix}count"
    kinds = [Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.LOSE_REPLY, None, None]
    clients = [bench.connect({n: fault for n in range(2, 400) if (fault := kinds[(n * 7 + c) % 5])}) for c in range(3)]
    await put(clients[0], key, b"0")

    async def count(store: Store, times: int) -> None:
        while times:
            kv = await store.get(key)
            assert kv is not None
            done = await store.transact([ModRevision(key, kv.mod_revision)], [Put(key, b"%d" % (int(kv.value) + 1))])
            times -= done.succeeded

    await asyncio.gather(*(count(store, 8) for store in clients for _ in range(2)))
    kv = await clients[0].get(key)
    assert kv is not None
    assert (int(kv.value), kv.version) == (48, 49)


async def test_a_client_whose_bookkeeping_lapsed_goes_on(bench: Bench) -> None:
    """Its hidden lease is gone (a wiped store, or a client asleep for hours): no caller hears of it, old ticket or new."""
    store, p = bench.connect(), bench.prefix
    await put(store, f"{p}a")
    hidden = store._transactor._lease  # type: ignore[attr-defined]
    await bench.connect().lease_revoke(hidden)
    writes = [store.transact([Missing(f"{p}{n}")], [Put(f"{p}{n}", b"")]) for n in range(3)]
    assert all(result.succeeded for result in await asyncio.gather(*writes))
    assert store._transactor._lease != hidden  # type: ignore[attr-defined]


async def test_a_lost_reply_and_a_lapsed_ticket_leave_the_outcome_unknown(bench: Bench) -> None:
    """The record of the first copy is gone before the second is sent: to send it afresh could apply it twice."""
    key = f"{bench.prefix}a"
    other = bench.connect()

    async def lapse() -> None:
        await other.lease_revoke(store._transactor._lease)  # type: ignore[attr-defined]

    await put(other, key, b"1")
    store = bench.connect({1: Fault.LOSE_REPLY}, before={2: lapse})
    with pytest.raises(OutcomeUnknown):
        await store.transact([Exists(key)], [Put(key, b"2")])
    assert await versions(other, key) == 2
    # With a ticket that was used before, the same.
    await put(store, key, b"3")
    store = bench.connect({2: Fault.LOSE_REPLY}, before={3: lapse})
    await put(store, key, b"4")
    with pytest.raises(OutcomeUnknown):
        await store.transact([Exists(key)], [Put(key, b"5")])
    assert await versions(other, key) == 5


async def test_a_callers_lease_that_ended_is_told_after_a_lost_request_too(bench: Bench) -> None:
    key = f"{bench.prefix}a"
    store = bench.connect({1: Fault.LOSE_REQUEST})
    lease = await store.lease_grant(30)
    await store.lease_revoke(lease)
    with pytest.raises(LeaseLost):
        await store.transact([Missing(key)], [Put(key, b"", lease.id)])
    assert await store.get(key) is None
