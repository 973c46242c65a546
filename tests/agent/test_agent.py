"""The agent against a model engine over real sockets: what it acknowledges, when, and what it never does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agent.daemon import EXIT_PRESENCE_LOST, EXIT_SUPERSEDED
from eplane.errors import LinkError
from eplane.keys import AckKind
from eplane.plan import LeaderEpoch
from eplane.records import PresenceRecord, decode
from eplane.store.base import Delete, Exists
from eplane.store.memory import MemoryStore
from eplane.wave import WaveState
from runtime.link.client import LinkClient
from tests.agent.rig import KEYS, NODE, Engine, Leader, exchanged, new_store, running_agent, until


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def store() -> AsyncIterator[MemoryStore]:
    made = new_store()
    yield made
    await made.close()


@pytest.fixture
async def leader(store: MemoryStore, engine: Engine) -> Leader:
    made = Leader(store, engine)
    await made.lead("http://127.0.0.1:9")
    return made


async def presence(store: MemoryStore) -> PresenceRecord | None:
    found = await store.get(KEYS.agent(NODE))
    return None if found is None else decode(PresenceRecord, found.value)


async def has_ack(leader: Leader, record: object, kind: AckKind) -> None:
    async with asyncio.timeout(15):
        while await leader.ack(record, kind) is None:  # type: ignore[arg-type]
            await asyncio.sleep(0.01)


async def test_presence_tells_world_ranks_and_what_is_live(store: MemoryStore, engine: Engine, leader: Leader) -> None:
    async with running_agent(store, engine.folder):
        async with asyncio.timeout(15):
            while (seen := await presence(store)) is None or seen.digest is None:
                await asyncio.sleep(0.01)
        assert (seen.world, seen.ranks, seen.digest) == (engine.group.world, (0, 1), engine.group.start.digest)
        assert seen.epoch is None
        await leader.adopt(7)
        await until(lambda: [rank.epoch for rank in engine.group.ranks] == [7, 7])
    assert await presence(store) is None


async def test_a_wave_goes_from_staging_to_clean_and_each_ack_comes_after_the_engine(
    store: MemoryStore, engine: Engine, leader: Leader
) -> None:
    group = engine.group
    group.hold = True
    async with running_agent(store, engine.folder):
        await leader.adopt()
        record = leader.wave(group.start, exchanged(group.start))
        await leader.order(record)
        await until(lambda: all(rank.staged is not None for rank in group.ranks))
        await asyncio.sleep(0.2)
        assert await leader.ack(record, AckKind.VERIFIED) is None, "acknowledged before the bundles were there"
        group.hold = False
        await has_ack(leader, record, AckKind.VERIFIED)
        assert [rank.armed for rank in group.ranks] == [None, None], "armed before the cutover"
        switching = leader.wave(group.start, exchanged(group.start))
        wave = switching.wave
        cut = switching.at(
            type(wave)(**{**{n: getattr(wave, n) for n in wave.__slots__}, "state": WaveState.SWITCHING,
                          "verified": frozenset(wave.nodes), "cut": True}),
            now=2.0, leader=leader.epoch, nonce="0" * 16,
        )  # fmt: skip
        await leader.order(cut)
        await has_ack(leader, record, AckKind.SWITCHED)
        await has_ack(leader, record, AckKind.CLEAN)
        assert {rank.placement_live.digest for rank in group.ranks} == {record.identity.digest}
        said = await leader.ack(record, AckKind.SWITCHED)
        assert said is not None
        assert said.identity == record.identity
        assert said.last_step == max(rank.last_step_under_old or 0 for rank in group.ranks)


async def test_an_aborted_wave_is_dropped_and_only_then_called_clean(
    store: MemoryStore, engine: Engine, leader: Leader
) -> None:
    group = engine.group
    group.hold = True
    async with running_agent(store, engine.folder):
        await leader.adopt()
        record = leader.wave(group.start, exchanged(group.start))
        await leader.order(record)
        await until(lambda: all(rank.staged is not None for rank in group.ranks))
        wave = record.wave
        aborted = type(wave)(
            **{**{n: getattr(wave, n) for n in wave.__slots__}, "state": WaveState.ABORTED, "reason": "a test"}
        )
        await leader.order(record.at(aborted, now=2.0, leader=leader.epoch, nonce="0" * 16))
        await has_ack(leader, record, AckKind.CLEAN)
        assert [rank.staged for rank in group.ranks] == [None, None]
        assert {rank.placement_live.digest for rank in group.ranks} == {group.start.digest}
        assert await leader.ack(record, AckKind.VERIFIED) is None


async def test_an_engine_that_can_not_stage_is_reported_with_its_sentence(
    store: MemoryStore, engine: Engine, leader: Leader
) -> None:
    group = engine.group
    for rank in group.ranks:
        rank.held = dict.fromkeys(rank.held, b"\x00" * 16)
    async with running_agent(store, engine.folder):
        await leader.adopt()
        record = leader.wave(group.start, exchanged(group.start))
        await leader.order(record)
        await has_ack(leader, record, AckKind.FAILED)
        said = await leader.ack(record, AckKind.FAILED)
        assert said is not None
        assert "wrong digest" in said.reason
        assert await leader.ack(record, AckKind.VERIFIED) is None


async def test_an_older_life_acknowledges_nothing_once_a_newer_one_is_here(
    store: MemoryStore, engine: Engine, leader: Leader
) -> None:
    group = engine.group
    group.hold = True
    async with running_agent(store, engine.folder) as older:
        await leader.adopt()
        async with running_agent(store, engine.folder):
            assert await asyncio.wait_for(older, 10) == EXIT_SUPERSEDED
            record = leader.wave(group.start, exchanged(group.start))
            group.hold = False
            await leader.order(record)
            await has_ack(leader, record, AckKind.VERIFIED)
            said, here = await leader.ack(record, AckKind.VERIFIED), await presence(store)
            assert said is not None
            assert here is not None
            assert said.incarnation == here.incarnation


async def test_two_agents_of_a_node_do_not_take_it_from_each_other(
    store: MemoryStore, engine: Engine, leader: Leader, caplog: pytest.LogCaptureFixture
) -> None:
    """The newer one has the node once and for all; a presence that is lost to nobody is claimed again by another start."""
    async with running_agent(store, engine.folder) as older:
        await leader.adopt()
        async with running_agent(store, engine.folder) as newer:
            assert await asyncio.wait_for(older, 10) == EXIT_SUPERSEDED
            said = [r.getMessage() for r in caplog.records if "superseded" in r.getMessage()]
            here = await presence(store)
            assert here is not None
            assert len(said) == 1
            assert said[0].startswith(f"superseded: agent life {here.incarnation} has taken node ")
            assert said[0].endswith("ends and must not be started again")
            await store.transact([Exists(KEYS.agent(here.node))], [Delete(KEYS.agent(here.node))])
            assert await asyncio.wait_for(newer, 10) == EXIT_PRESENCE_LOST


async def test_a_new_life_of_the_ranks_is_found_again(store: MemoryStore, engine: Engine, leader: Leader) -> None:
    async with running_agent(store, engine.folder):
        first = engine.group.world
        async with asyncio.timeout(15):
            while (seen := await presence(store)) is None or seen.world != first:
                await asyncio.sleep(0.01)
        engine.restart()
        async with asyncio.timeout(15):
            while (seen := await presence(store)) is None or seen.world != engine.group.world:
                await asyncio.sleep(0.01)
        assert engine.group.world != first


async def test_orders_of_another_world_touch_nothing(store: MemoryStore, engine: Engine, leader: Leader) -> None:
    record = leader.wave(engine.group.start, exchanged(engine.group.start))
    engine.restart()
    async with running_agent(store, engine.folder):
        await leader.order(record)
        async with asyncio.timeout(15):
            while (seen := await presence(store)) is None or seen.world != engine.group.world:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert all(rank.staged is None for rank in engine.group.ranks)
        assert await leader.ack(record, AckKind.VERIFIED) is None


async def test_an_order_under_a_lower_leader_epoch_is_refused_by_the_engine(
    store: MemoryStore, engine: Engine, leader: Leader
) -> None:
    group = engine.group
    async with running_agent(store, engine.folder):
        await leader.adopt()
        await until(lambda: all(rank.epoch == 1 for rank in group.ranks))
        stale = leader.wave(group.start, exchanged(group.start))
        leader.epoch = LeaderEpoch(leader.epoch.cluster, 1)
        lower = leader.wave(group.start, exchanged(group.start))
        assert lower.leader.revision < stale.leader.revision
        await leader.order(lower)
        await asyncio.sleep(0.3)
        assert all(rank.staged is None for rank in group.ranks)
        assert await leader.ack(lower, AckKind.VERIFIED) is None


async def test_a_damaged_record_is_no_order(store: MemoryStore, engine: Engine, leader: Leader) -> None:
    async with running_agent(store, engine.folder) as life:
        await leader.adopt()
        record = leader.wave(engine.group.start, exchanged(engine.group.start))
        await leader.order(record)
        await leader.put(KEYS.wave("m1", 1), b'{"v":1,"kind":"wave"}')
        await asyncio.sleep(0.2)
        assert not life.done()


async def test_the_agent_goes_on_when_the_store_was_away(store: MemoryStore, engine: Engine, leader: Leader) -> None:
    async with running_agent(store, engine.folder) as life:
        await leader.adopt()
        await until(lambda: all(rank.epoch == 1 for rank in engine.group.ranks))
        store.faults.unavailable = True
        await asyncio.sleep(0.4)
        store.faults.unavailable = False
        record = leader.wave(engine.group.start, exchanged(engine.group.start))
        await leader.order(record)
        await has_ack(leader, record, AckKind.VERIFIED)
        assert not life.done()


async def test_a_second_session_from_an_older_agent_is_closed(engine: Engine) -> None:
    path = engine.folder / NODE / "rank0.sock"
    await until(path.exists)
    older, newer = LinkClient(path), LinkClient(path)
    await older.connect("older")
    await newer.connect("newer")
    await asyncio.sleep(0.1)
    with pytest.raises(LinkError):
        await older.status()
    await newer.status()
    await newer.close()
    await older.close()
