"""The routing sample of a rank: fair, fresh in every window, of real tokens alone, and nothing that an answer shows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eplane.placement import Placement
from eplane.routing import MAX_SAMPLE_IDS, RankSample
from runtime.dispatch import Dispatcher
from runtime.engine import Engine
from runtime.kvcache import PAGE_TOKENS, PagePool
from runtime.link.counters import CounterReader, CounterWriter
from runtime.model import attach
from runtime.routing import WINDOWS_KEPT, RoutingSampler, most_tokens
from runtime.sampling import Sampling
from runtime.scheduler import Request, Scheduler
from runtime.switch import Switch
from runtime.tables import build_table
from tests.runtime.checkpoints import EXPERTS, LAYERS
from tests.runtime.local import PAGES, LocalRank, local_rank

Get = Callable[[str], Path]
TOP_K = 2


def numbered(first: int, count: int) -> np.ndarray:
    """Tokens `first ..` as their own numbers: `[count, 1, 2]`."""
    ids = np.arange(first, first + count)
    return np.stack([ids, ids + 10_000], axis=1)[:, None]


def window(sampler: RoutingSampler, steps: list[int], start: int = 0) -> RankSample | None:
    """One window of steps of these many tokens, each numbered in the window; its sample."""
    at = 0
    for tokens in steps:
        rows = sampler.draw(tokens)
        assert all(0 <= row < tokens for row in rows)
        if rows:
            sampler.take(numbered(at, tokens)[list(rows)])
        at += tokens
    sampler.cut(start + len(steps))
    found = sampler.since(start)
    return found[-1] if found else None


def test_every_token_of_a_window_is_as_likely_as_any_other() -> None:
    """2000 windows of 50 tokens in steps of several sizes, 8 taken of each: 320 expected of every token, +-6 sigma."""
    sampler = RoutingSampler(0, 1, TOP_K, 8, seed=1)
    taken = np.zeros(50)
    first_of_sample = np.zeros(50)
    for number in range(2000):
        one = window(sampler, [3, 1, 0, 20, 1, 25], 6 * number)
        assert one is not None
        assert (one.sample.tokens, len(one.sample)) == (50, 8)
        ids = one.sample.tuples[:, 0, 0]
        assert len(set(ids.tolist())) == 8, "a token was taken twice"
        taken[ids] += 1
        first_of_sample[ids[0]] += 1
    assert np.abs(taken - 320).max() < 6 * np.sqrt(320 * (1 - 8 / 50))
    # Any first part is a sample, too: an agent cuts it where many ranks share a report.
    assert np.abs(first_of_sample - 40).max() < 6 * np.sqrt(40)


def test_a_long_window_takes_few_tokens_and_asks_for_few_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, asked = RoutingSampler(0, 1, TOP_K, 32, seed=2), [0]
    usual = random.Random.random

    def counted(self: random.Random) -> float:
        asked[0] += 1
        return usual(self)

    monkeypatch.setattr(random.Random, "random", counted)
    rows = [len(sampler.draw(256)) for _ in range(400)]
    # 32 (1 + ln(102400 / 32)) = 290 tokens of 102400 are expected, two numbers for each.
    assert 200 < sum(rows) < 400
    assert asked[0] < 800
    assert max(rows[200:]) <= 4


def test_windows_do_not_mix_and_old_ones_are_let_go() -> None:
    sampler = RoutingSampler(3, 1, TOP_K, 8, seed=3)
    full, short = window(sampler, [100]), window(sampler, [0, 5], 1)
    assert full is not None
    assert short is not None
    assert (full.key, short.key) == ((3, 0, 1), (3, 1, 3))
    assert sorted(short.sample.tuples[:, 0, 0].tolist()) == [0, 1, 2, 3, 4], "a short window holds its own tokens alone"
    assert short.sample.tokens == 5
    assert window(sampler, [0, 0], 3) is None, "a window without tokens has no sample"
    sampler.cut(5)
    sampler.cut(5)
    assert len(sampler.since(0)) == 2, "a cut where no step has passed made a window"
    for number in range(40):
        window(sampler, [2], 5 + number)
    assert [one.first_step for one in sampler.since(0)] == list(range(45 - WINDOWS_KEPT, 45))
    assert [one.first_step for one in sampler.since(44)] == [44]


def test_what_can_not_be_a_routing_is_left_out_and_harms_nothing() -> None:
    sampler = RoutingSampler(0, 1, TOP_K, 4, seed=4)
    sampler.take(np.zeros((len(sampler.draw(9)), 1, 2), dtype=np.int64))  # An expert twice for one token.
    sampler.cut(1)
    assert sampler.since(0) == ()
    assert window(sampler, [9], 1) is not None


def test_a_sample_is_never_larger_than_it_may_be_told() -> None:
    assert most_tokens(8, 4, 32) == 32
    assert most_tokens(58, 8, 64) == MAX_SAMPLE_IDS // (58 * 8) == 35
    assert most_tokens(4096, 8, 32) == 0


class Served:
    """One rank alone with engine, counters and sampler, and a spy on what its router said of real tokens."""

    def __init__(self, folder: Path, at: Path, sampler: RoutingSampler | None, *, seed: int = 5) -> None:
        self.one: LocalRank = local_rank(folder, seed, slots=EXPERTS + 1)
        self.switch = Switch(self.one.table, self.one.pool)
        model = self.one.model
        self.dispatcher = Dispatcher(
            self.one.dispatcher._exchange, self.one.pool, model.experts, int(model.network.config.hidden_size),
            torch.float32, TOP_K, self.switch.check, self.switch.agree, fixed_tiles=True,
        )  # fmt: skip
        self.routed: list[list[np.ndarray]] = []
        attach(model, self.spy, self.one.forward.context)
        self.counters = CounterWriter(at, "ab" * 8, 0, LAYERS, self.one.table.placement.slots, 4)
        scheduler = Scheduler(PagePool(PAGES * PAGE_TOKENS), 10, 99)
        self.engine = Engine(self.one.forward, self.dispatcher, scheduler, self.switch, self.counters, sampler)

    def spy(self, layer: int, hidden: Any, index: Any, weights: Any) -> Any:
        if layer == 0:
            self.routed.append([])
        self.routed[-1].append(index[: self.dispatcher._running().phases.shape[0]].numpy().copy())
        return self.dispatcher.layer(layer, hidden, index, weights)

    def run(self, steps: int, seed: int) -> list[tuple[int, int, float]]:
        """Steps with requests that come and go; everything that was produced."""
        rng, produced = np.random.default_rng(seed), []
        for step in range(steps):
            if step % 9 == 0 and step < max(1, steps - 12):
                prompt = tuple(int(t) for t in rng.integers(0, 256, int(rng.integers(3, 25))))
                self.engine.scheduler.add(Request(step, prompt, 6, Sampling(0.8, 1.0, step, 0)))
            report = self.engine.step()
            produced += [(p.request, p.chosen.token, p.chosen.logprob or 0.0) for p in report.produced]
        return produced


@pytest.fixture(scope="module")
def runs(checkpoint: Get, tmp_path_factory: pytest.TempPathFactory) -> tuple[Served, Served, RoutingSampler, Any, Any]:
    """The same 60 steps with a sampler and without."""
    at, folder = tmp_path_factory.mktemp("counters"), checkpoint("qwen3_moe")
    sampler = RoutingSampler(0, LAYERS, TOP_K, 6, seed=7)
    plain = Served(folder, at / "b", None)
    without = plain.run(60, 1)
    sampled = Served(folder, at / "a", sampler)
    return sampled, plain, sampler, sampled.run(60, 1), without


def test_sampling_changes_no_bit_of_any_answer(runs: tuple[Served, Served, RoutingSampler, Any, Any]) -> None:
    sampled, plain, _, one, other = runs
    assert one == other
    assert len(one) > 20
    assert len(sampled.routed) == len(plain.routed)


def test_the_sample_is_what_the_router_said_of_real_tokens(
    runs: tuple[Served, Served, RoutingSampler, Any, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The rank runs whole tiles of 16 rows, so most rows of a small step are padding, which routes, too."""
    served, _, sampler, _, _ = runs
    said: dict[int, list[np.ndarray]] = {}
    calls = iter(served.routed)
    reader = CounterReader(served.counters._path)
    windows = {(w.first_step, w.last_step): w for w in reader.read_since(0)}
    samples = sampler.since(0)
    assert len(samples) > 8
    assert {one.key[1:] for one in samples} <= set(windows), "cut at the same steps as the counts"
    # Steps with tokens call the layers once, in order: spread the calls over the windows by their counts.
    for span in sorted(windows):
        tokens = windows[span].tokens // (LAYERS * TOP_K)
        rows: list[np.ndarray] = []
        while sum(len(r) for r in rows) < tokens:
            layers = next(calls)
            if len(layers[0]):
                rows.append(np.stack(layers, axis=1))
        if rows:
            said[span[0]] = rows
    for one in samples:
        real = np.concatenate(said[one.first_step])
        assert one.sample.tokens == len(real)
        assert len(one.sample) == min(6, len(real))
        everything = {tuple(row.flatten().tolist()) for row in real}
        assert {tuple(row.flatten().tolist()) for row in one.sample.tuples} <= everything


def test_a_switch_ends_the_sample_of_its_window_with_the_counts(checkpoint: Get, tmp_path: Path) -> None:
    sampler = RoutingSampler(0, LAYERS, TOP_K, 6, seed=8)
    served = Served(checkpoint("qwen3_moe"), tmp_path / "c", sampler)
    served.run(6, 2)
    live = served.switch.live
    moved = live.placement.p2l.copy()
    moved[0, [0, 1]] = moved[0, [1, 0]]
    cells = live.cell_of.copy()
    cells[0, [0, 1]] = cells[0, [1, 0]]
    target = build_table(Placement(moved, 1, EXPERTS), 0, cells)
    served.switch._live = target  # What a switch does for the engine: another table at the next step.
    served.run(10, 3)
    spans = [(w.first_step, w.last_step) for w in CounterReader(tmp_path / "c").read_since(0)]
    assert spans == [(0, 4), (4, 6), (6, 8), (8, 12)]
    assert [one.key[1:] for one in sampler.since(0)] == spans
