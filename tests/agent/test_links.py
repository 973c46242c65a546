"""Links to ranks that stand still: all are asked at once, and the loss of an old link is not the loss of a new one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.links import Links
from eplane.errors import LinkRefused
from runtime.link.messages import ErrorCode, RankStatus
from runtime.link.server import LinkServer
from tests.link.model_engine import ModelGroup, ModelRank

RANKS = 4
# Far beyond every test's own patience: what waits for it one after the other fails.
LONG_S = 3600.0


class Together(ModelRank):
    """Answers a status only while all other ranks are asked for theirs too."""

    barrier = threading.Barrier(RANKS)

    def status(self) -> RankStatus:
        try:
            self.barrier.wait(20)
        except threading.BrokenBarrierError as error:
            raise LinkRefused(ErrorCode.BAD_REQUEST, "the ranks were asked one after the other") from error
        return super().status()


@pytest.fixture
def group() -> ModelGroup:
    return ModelGroup(("n0",) * RANKS, layers=1, experts=8, slots=2, spare=1)


@pytest.fixture
def servers(tmp_path: Path, group: ModelGroup) -> Iterator[list[LinkServer]]:
    ranks = [Together(group, rank, 3) for rank in range(RANKS)]
    servers = [LinkServer(rank, tmp_path / f"rank{rank.rank}.sock") for rank in ranks]
    yield servers
    for server in servers:
        server.close()


async def test_all_ranks_are_asked_at_once(tmp_path: Path, servers: list[LinkServer]) -> None:
    links = Links(tmp_path, "life", LONG_S)
    await links.refresh(None)
    assert links.complete()
    assert sorted(await links.statuses()) == list(range(RANKS))
    await links.close()


async def test_sockets_that_accept_and_say_nothing_are_waited_for_at_once(tmp_path: Path) -> None:
    waiting, all_wait = 0, asyncio.Event()

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal waiting
        waiting += 1
        if waiting == RANKS:
            all_wait.set()
        await reader.read()
        writer.close()

    deaf = [await asyncio.start_unix_server(say_nothing, tmp_path / f"rank{rank}.sock") for rank in range(RANKS)]
    links = Links(tmp_path, "life", LONG_S)
    refresh = asyncio.create_task(links.refresh(None))
    await asyncio.wait_for(all_wait.wait(), 20)
    refresh.cancel()
    await asyncio.gather(refresh, return_exceptions=True)
    assert links.ranks == {}
    for server in deaf:
        server.close()


async def test_a_late_word_on_an_old_link_does_not_cut_the_new_one(tmp_path: Path, servers: list[LinkServer]) -> None:
    links = Links(tmp_path, "life", LONG_S)
    await links.refresh(None)
    old = links.ranks[0]
    await links.drop(0, old, "it did not answer")
    assert 0 not in links.ranks
    await links.refresh(None)
    await links.drop(0, old, "the other half of the loop saw it too")
    assert links.ranks[0] is not old
    assert links.ranks[0].client.connected
    await links.close()


async def test_a_session_that_was_taken_over_is_given_up(tmp_path: Path, servers: list[LinkServer]) -> None:
    old, new = Links(tmp_path, "old", LONG_S), Links(tmp_path, "new", LONG_S)
    await old.refresh(None)
    await new.refresh(None)
    assert await old.describe() == []
    assert old.ranks == {}
    await old.refresh(None)
    assert old.ranks == {}
    assert len(await new.describe()) == RANKS
    await new.close()
