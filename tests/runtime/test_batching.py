"""The scheduler, the cache's pages, sampling and the text around them: pure, so tested by many random runs."""

from __future__ import annotations

import asyncio
import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import BadInput, QueueFull, WorldEnded
from runtime import wire
from runtime.front import Ask, Front, WorldState
from runtime.kvcache import PAGE_TOKENS, PagePool, pages_for
from runtime.sampling import Chosen, Sampling, choose, log_probabilities
from runtime.scheduler import Finish, Request, Scheduler
from runtime.text import StopText

END = 7


def _request(number: int, prompt: int, max_tokens: int, ends: frozenset[int] = frozenset()) -> Request:
    return Request(number, tuple(range(1, prompt + 1)), max_tokens, Sampling(), ends)


shapes = st.lists(st.tuples(st.integers(1, 150), st.integers(1, 20)), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 70), st.integers(3, 12), st.randoms(use_true_random=False))
def test_every_request_ends_within_the_limits(
    wanted: list[tuple[int, int]], limit: int, pages: int, chance: np.random.Generator
) -> None:
    pool = PagePool(pages * PAGE_TOKENS)
    scheduler = Scheduler(pool, limit, queue=100)
    requests = [_request(n, *shape) for n, shape in enumerate(wanted)]
    for request in requests:
        scheduler.add(request)
    produced: dict[int, int] = {}
    finished: dict[int, Finish] = {}
    cancelled = requests[len(requests) // 2].id if len(requests) > 2 else -1
    for step in range(5000):
        if step == 3 and scheduler.cancel(cancelled):
            finished[cancelled] = Finish.CANCELLED
            assert not scheduler.cancel(cancelled)
        chunks = scheduler.next_step()
        if not chunks:
            break
        assert 1 <= sum(c.count for c in chunks) <= limit
        assert len({c.request.id for c in chunks}) == len(chunks)
        used = [page for c in chunks for page in c.request.pages]
        assert len(set(used)) == len(used)
        for chunk in chunks:
            assert chunk.start == chunk.request.done
            assert (chunk.count == 1) or not chunk.decode
            assert len(chunk.request.pages) * PAGE_TOKENS >= chunk.start + chunk.count
        for new in scheduler.complete(chunks, [Chosen(1, -0.5) if c.last else None for c in chunks]):
            produced[new.request] = produced.get(new.request, 0) + 1
            if new.finish:
                finished[new.request] = new.finish
    assert set(finished) == {r.id for r in requests}
    assert all(produced[r.id] == r.max_tokens for r in requests if finished[r.id] is Finish.LENGTH)
    assert pool.free == pool.pages
    assert (scheduler.running, scheduler.waiting) == (0, 0)


def test_running_requests_are_not_held_up_and_none_starves() -> None:
    scheduler = Scheduler(PagePool(64 * PAGE_TOKENS), 4, queue=100)
    for number in range(8):
        scheduler.add(_request(number, 1, 50))
    turns = dict.fromkeys(range(8), 0)
    for _ in range(40):
        chunks = scheduler.next_step()
        for chunk in chunks:
            turns[chunk.request.id] += 1
        scheduler.complete(chunks, [Chosen(1, 0.0) for _ in chunks])
    assert min(turns.values()) >= 15
    assert sum(turns.values()) == 160
    late = Scheduler(PagePool(64 * PAGE_TOKENS), 8, queue=100)
    late.add(_request(0, 1, 50))
    late.complete(late.next_step(), [Chosen(1, 0.0)])
    late.add(_request(1, 500, 5))
    for _ in range(20):
        chunks = late.next_step()
        assert [c.decode for c in chunks] == [True, False]
        late.complete(chunks, [Chosen(1, 0.0), None])


def test_end_tokens_end_and_are_told() -> None:
    scheduler = Scheduler(PagePool(PAGE_TOKENS), 8, queue=1)
    scheduler.add(_request(0, 2, 9, frozenset({END})))
    (first,) = scheduler.complete(scheduler.next_step(), [Chosen(3, 0.0)])
    (last,) = scheduler.complete(scheduler.next_step(), [Chosen(END, 0.0)])
    assert (first.finish, last.finish, last.chosen.token) == (None, Finish.STOP, END)


def test_what_can_never_run_is_refused_and_a_full_queue_says_so() -> None:
    scheduler = Scheduler(PagePool(2 * PAGE_TOKENS), 8, queue=1)
    for prompt, tokens in ((0, 1), (1, 0)):
        with pytest.raises(BadInput, match="at least one"):
            scheduler.add(_request(0, prompt, tokens))
    with pytest.raises(BadInput, match="130 tokens; the key/value cache holds 128"):
        scheduler.add(_request(0, 120, 10))
    scheduler.add(_request(0, 120, 8))
    scheduler.next_step()
    scheduler.add(_request(1, 1, 1))
    with pytest.raises(QueueFull, match="1 requests wait already"):
        scheduler.add(_request(2, 1, 1))
    assert [c.request.id for c in scheduler.next_step()] == [0]  # Nothing is admitted without pages.
    assert pages_for(PAGE_TOKENS + 1) == 2


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.05, 3.0), st.floats(0.05, 1.0), st.integers(0, 2000))
def test_a_draw_depends_on_seed_and_position_alone_and_keeps_to_top_p(
    seed: int, temperature: float, top_p: float, position: int
) -> None:
    logits = np.random.default_rng(seed).normal(size=260).astype(np.float32) * 3
    wish = Sampling(temperature, top_p, seed)
    chosen = choose(logits, wish, position)
    assert chosen == choose(logits.copy(), wish, position)
    weight = np.exp(logits.astype(np.float64) / temperature)
    weight /= weight.sum()
    better = weight[weight > weight[chosen.token]].sum()
    assert better < top_p + 1e-12
    assert chosen.logprob == float(log_probabilities(logits)[chosen.token])


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32))
    drawn = np.bincount([choose(logits, Sampling(1.0, 1.0, 3), p).token for p in range(4000)], minlength=4) / 4000
    assert np.abs(drawn - [0.5, 0.3, 0.15, 0.05]).max() < 0.03
    cut = {choose(logits, Sampling(1.0, 0.8, 3), p).token for p in range(500)}
    assert cut == {0, 1}


@pytest.mark.parametrize("temperature", [1e-3, 1e-300, 5e-324])
def test_a_temperature_near_0_takes_the_likeliest(temperature: float) -> None:
    """Logits divided by it are beyond all numbers; the choice must not be."""
    logits = np.array([-3.0, 9.0, 8.5, -400.0], dtype=np.float32)
    for position in range(20):
        assert choose(logits, Sampling(temperature, 0.9, 3), position).token == 1


async def test_a_rank_that_stands_still_ends_the_world_and_not_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pipe fills up; a send that waited for ever would keep the other ranks' last words from being read."""
    monkeypatch.setattr("runtime.front.SEND_LIMIT_S", 0.1)
    ours, theirs = multiprocessing.Pipe()
    front = Front({0: ours})
    front.listen()
    wire.send(theirs, wire.READY, vocabulary=260, context=100_000)
    await front.changed.wait()
    front.changed.clear()
    early = front.run(Ask((65,), 4))
    wire.send(theirs, wire.TOKENS, items=[[1, 66, -1.0, None, []]])
    assert (await anext(early)).token == 66
    waiting = [asyncio.ensure_future(anext(front.run(Ask((65,) * 50_000, 4)))) for _ in range(20)]
    await asyncio.wait_for(front.changed.wait(), 20)
    assert (front.state, front.reason) == (WorldState.LOST, "the world is lost: rank 0 is gone")
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(answer) for answer in ended} == {WorldEnded}
    monkeypatch.setattr("runtime.front.wire.send", None)
    await early.aclose()  # Takes nothing back from a world that is lost: each try would cost the loop the limit again.
    ours.close()
    theirs.close()


def test_greedy_takes_the_first_of_equals_and_tells_the_best() -> None:
    logits = np.array([0.0, 2.0, 2.0, 1.0], dtype=np.float32)
    chosen = choose(logits, Sampling(logprobs=3), 0)
    assert chosen.token == 1
    assert [t for t, _ in chosen.top] == [1, 2, 3]
    assert np.float32(chosen.logprob) == chosen.logprob


@pytest.mark.parametrize(
    "bad", [{"temperature": -1.0}, {"top_p": 0.0}, {"logprobs": 21}, {"temperature": float("nan")}]
)
def test_bad_wishes(bad: dict[str, float]) -> None:
    with pytest.raises(BadInput):
        Sampling(**bad)  # type: ignore[arg-type]


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.data())
def test_text_is_cut_at_the_first_stop_whatever_the_pieces(text: str, stops: list[str], data: st.DataObject) -> None:
    cut, shown, at = StopText(tuple(stops)), "", 0
    while at < len(text):
        size = data.draw(st.integers(1, 4))
        shown += cut.push(text[at : at + size])
        at += size
    shown += cut.finish()
    ends = [text.find(s) for s in stops if s in text]
    if not ends:
        assert (shown, cut.stopped) == (text, False)
    else:
        assert cut.stopped
        assert text.startswith(shown)
        assert not any(s in shown for s in stops)
