"""Routing samples on their way through the agent: told with their windows, cut to size, and never at the cost of a count."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.links import Links
from agent.reporter import Leader as LeaderSeen
from agent.samples import Samples
from eplane.fields import pack
from eplane.load import LoadReport
from eplane.routing import MAX_REPORT_IDS, RankSample, TokenSample, read_samples
from runtime.link.samples import SamplesReply
from runtime.link.server import LinkServer
from tests.agent.rig import Engine, Leader, new_store, running_agent, until
from tests.agent.test_reporter import WORLD, Ear, reporter, window
from tests.link.model_engine import ModelGroup, ModelRank

LAYERS, EXPERTS, TOP_K = 2, 6, 2


@pytest.fixture
def ear() -> Iterator[Ear]:
    made = Ear()
    yield made
    made.close()


def sample(seq: int, rank: int = 0, count: int = 3, experts: tuple[int, int] = (0, 1)) -> RankSample:
    """The sample that belongs to `window(seq, rank)`."""
    tuples = np.tile(np.array(experts), (count, LAYERS, 1))
    return RankSample(rank, seq * 4, seq * 4 + 4, TokenSample(count + 50, tuples))


def said(group: ModelGroup | None = None, rank: int = 0) -> Any:
    return (group or ModelGroup(("n0", "n0"), LAYERS, EXPERTS, 4, 3)).ranks[rank].describe()


def told(ear: Ear) -> list[tuple[set[tuple[int, int, int]], list[RankSample]]]:
    """Of every report: rank and steps of its windows, and its samples."""
    result = []
    for body in ear.bodies:
        report, _ = LoadReport.from_json(body["report"])
        samples, refused = read_samples(body["samples"])
        assert not refused
        result.append(({(w.rank, w.first_step, w.last_step) for w in report.subwindows}, list(samples)))
    return result


async def test_a_running_agent_tells_the_samples_of_the_windows_it_tells(ear: Ear, tmp_path: Path) -> None:
    engine, store = Engine(tmp_path), new_store()
    await Leader(store, engine).lead(ear.url)
    try:
        async with running_agent(store, engine.folder):
            await until(lambda: sum(len(samples) for _, samples in told(ear)) > 20)
    finally:
        engine.close()
        await store.close()
    for windows, samples in told(ear):
        for rank in (0, 1):
            mine = sorted(key for key in windows if key[0] == rank)
            keys = [one.key for one in samples if one.rank == rank]
            # An agent that was away for long finds the newest samples alone; none is missing among these.
            assert keys == mine[len(mine) - len(keys) :], "a window was told before its sample was there"
            assert keys or not mine
        for one in samples:
            first, second = np.moveaxis(one.sample.tuples.astype(int), 2, 0)
            assert ((second - first) % EXPERTS == 1).all()
            assert one.sample.tokens == 100


async def test_an_engine_that_samples_nothing_is_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    group = ModelGroup(("n0",), LAYERS, EXPERTS, 6, 1, samples=False)
    server = LinkServer(group.ranks[0], tmp_path / "rank0.sock")
    links = Links(tmp_path, "life", 20.0)
    await links.refresh(None)
    group.sample(0, 4)
    assert await links.samples({0: 0}) == {}
    assert "refuses" not in caplog.text
    await links.close()
    server.close()


class Odd(ModelRank):
    """Tells what it should not."""

    def __init__(self, group: ModelGroup, answer: dict[str, object]) -> None:
        super().__init__(group, 0, 20)
        self.answer = answer

    def samples(self, after_step: int) -> Any:
        return self

    def to_json(self) -> dict[str, object]:
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"world": 3, "samples": []},
        {"world": "ab" * 8, "samples": {}},
        {"world": "ab" * 8, "samples": [{**sample(0).to_json(), "tokens": -1}]},
        {"world": "ab" * 8, "samples": [{**sample(0).to_json(), "tuples": pack(np.zeros((1, 2, 2), dtype=np.int32))}]},
        {"world": "ab" * 8, "samples": [None]},
    ],
)
async def test_an_answer_that_is_none_is_counted_and_costs_no_link(tmp_path: Path, answer: dict[str, object]) -> None:
    group = ModelGroup(("n0",), LAYERS, EXPERTS, 6, 1)
    server = LinkServer(Odd(group, answer), tmp_path / "rank0.sock")
    links, kept = Links(tmp_path, "life", 20.0), Samples(16)
    await links.refresh(None)
    kept.take("ab" * 8, await links.samples({0: 0}))
    assert kept.refused == 1
    assert list(links.ranks) == [0]
    assert list(await links.statuses()) == [0]
    await links.close()
    server.close()


@pytest.mark.parametrize(
    "wrong",
    [
        sample(1, experts=(1, EXPERTS)),
        replace(sample(1), rank=1),
        replace(sample(1), sample=TokenSample(9, np.array([[[0, 1]]]))),
        replace(sample(1), sample=TokenSample(9, np.array([[[0, 1, 2]] * 2]))),
    ],
)
def test_what_a_rank_can_not_have_routed_is_dropped_and_counted(wrong: RankSample) -> None:
    kept = Samples(16)
    kept.take(WORLD, {0: (said(), SamplesReply(WORLD, (sample(0), wrong)))})
    assert kept.refused == 1
    assert [one.key for one in kept.of([window(0), window(1), window(1, 1)])] == [(0, 0, 4)]


def test_samples_are_kept_for_a_while_and_belong_to_one_world() -> None:
    kept = Samples(4)
    kept.take(WORLD, {0: (said(), SamplesReply(WORLD, tuple(sample(n) for n in range(9))))})
    windows = [window(n) for n in range(9)]
    assert [one.first_step for one in kept.of(windows)] == [20, 24, 28, 32]
    assert kept.of([window(5)])[0].key == (0, 20, 24), "what was told once is told again to a new leader"
    kept.take(WORLD, {0: (said(), SamplesReply("cd" * 8, (sample(9),)))})
    assert kept.of([window(9)]) == (), "a rank of another life told a sample"
    kept.take("cd" * 8, {})
    assert kept.of([*windows, replace(window(8), world="cd" * 8)]) == (), "a sample of the life before"


async def test_a_report_stays_small(ear: Ear) -> None:
    """Thirty-two ranks that sample as much as they may, after an outage of eight windows: still one small report."""
    group = ModelGroup(("n0",) * 32, LAYERS, EXPERTS, 1, 0)
    kept, one = Samples(16), reporter([0.0])
    replies = {
        rank: (said(group, rank), SamplesReply(WORLD, tuple(sample(n, rank, 4000) for n in range(8))))
        for rank in range(32)
    }
    kept.take(WORLD, replies)
    windows = [window(n, rank) for n in range(8) for rank in range(32)]
    one.add(windows)
    await one.report(LeaderSeen(ear.url, 5), WORLD, windows, None, (), kept.of)
    ((keys, samples),) = told(ear)
    assert len(keys) == len(samples) == 256
    assert sum(s.sample.ids for s in samples) <= MAX_REPORT_IDS
    await one.close()
