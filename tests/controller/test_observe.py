"""The book of load windows: only whole ones count, and nothing that is late, twice, foreign or broken reaches them."""

from __future__ import annotations

import numpy as np
import pytest

from controller.detect import shifted, steady_tail
from controller.observe import PENDING_SPANS, WINDOW_TUPLES, WindowBook, mean_balancedness
from eplane.load import LoadReport, SubWindow
from eplane.placement import Placement, linear
from eplane.routing import RankSample, TokenSample
from eplane.topology import ModelShape, World

WORLD = World("g", "a" * 16, ("n0", "n1"), ModelShape("m", 2, 4, 2, 100), 3, 8)
PLACEMENT = linear(2, 4, 2, 3)


def sub(rank: int, seq: int, counts: np.ndarray | None = None, **fields: object) -> SubWindow:
    counts = np.full((2, 3), rank + 1) if counts is None else counts
    base = {"world": WORLD.world, "digest": PLACEMENT.digest, "first_step": seq * 32, "last_step": seq * 32 + 32}
    return SubWindow(**{**base, "rank": rank, "prefill": counts, "decode": counts * 0, "seq": seq, **fields})  # type: ignore[arg-type]


def report(node: str, *subs: SubWindow) -> LoadReport:
    return LoadReport("g", node, "b" * 16, WORLD.world, subs)


@pytest.fixture
def book() -> WindowBook:
    book = WindowBook(64)
    book.enter(WORLD)
    book.know(PLACEMENT)
    return book


def test_a_window_is_whole_when_every_rank_reported_the_span(book: WindowBook) -> None:
    assert book.take(report("n0", sub(0, 0), sub(0, 1))).accepted == 2
    assert book.newest(9) == ()
    assert book.pending()[0][1] == (1,)
    book.take(report("n1", sub(1, 0)))
    (seen,) = book.newest(9)
    assert seen.window.complete
    assert seen.window.total.sum() == 2 * 3 * 1 + 2 * 3 * 2
    assert seen.rank_load.tolist() == [[3.0, 6.0], [3.0, 6.0]]
    assert mean_balancedness(seen.balancedness) == pytest.approx(4.5 / 6)
    assert book.completeness == 1.0


@pytest.mark.parametrize(
    ("node", "bad", "cause", "sentence"),
    [
        ("n0", sub(0, 5, world="c" * 16), "world", "not the life"),
        ("n0", sub(0, 0), "duplicate", "is a duplicate"),
        ("n0", sub(0, 7, first_step=0, last_step=32), "duplicate", "overlaps"),
        ("n0", sub(1, 5), "rank", "runs on node n1"),
        ("n0", sub(7, 5), "rank", "outside"),
        ("n0", sub(0, 5, digest="d" * 16), "digest", "no placement"),
        ("n0", sub(0, 5, np.ones((3, 3), dtype=int)), "shape", "has shape"),
    ],
)
def test_what_is_wrong_is_refused_and_counted(
    book: WindowBook, node: str, bad: SubWindow, cause: str, sentence: str
) -> None:
    book.take(report("n0", sub(0, 0)))
    took = book.take(report(node, bad))
    assert took.accepted == 0
    assert sentence in took.refused[0].reason
    assert book.refused[cause] == 1
    book.take(report("n1", sub(1, 0)))
    assert len(book.newest(9)) == 1


def test_tokens_on_an_empty_slot_are_refused(book: WindowBook) -> None:
    sparse = Placement(np.array([[0, 1, -1, 2, 3, -1]] * 2), 2, 4)
    book.know(sparse)
    took = book.take(report("n0", sub(0, 0, digest=sparse.digest)))
    assert "holds no expert" in took.refused[0].reason


def test_nodes_may_report_out_of_order_and_the_windows_stay_in_order(book: WindowBook) -> None:
    book.take(report("n0", sub(0, 0), sub(0, 2)))
    book.take(report("n1", sub(1, 2)))
    assert [s.window.first_step for s in book.newest(9)] == [64]
    late = WindowBook(64)
    late.enter(WORLD)
    late.know(PLACEMENT)
    late.take(report("n0", sub(0, 0), sub(0, 1), sub(0, 2)))
    late.take(report("n1", sub(1, 0), sub(1, 1), sub(1, 2)))
    assert [s.window.first_step for s in late.newest(9)] == [0, 32, 64]


def test_a_span_that_never_becomes_whole_is_given_up_and_its_rest_is_late(book: WindowBook) -> None:
    for seq in range(PENDING_SPANS + 1):
        book.take(report("n0", sub(0, seq)))
    assert book.incomplete == 1
    assert book.completeness == 0.0
    took = book.take(report("n1", sub(1, 0)))
    assert "is late" in took.refused[0].reason
    assert book.take(report("n1", sub(1, 1))).accepted == 1


def test_a_new_world_begins_with_nothing(book: WindowBook) -> None:
    book.take(report("n0", sub(0, 0)))
    book.take(report("n1", sub(1, 0)))
    book.enter(World("g", "e" * 16, WORLD.node_of_rank, WORLD.shape, 3, 8))
    assert book.newest(9) == ()
    assert "not the life" in book.take(report("n0", sub(0, 1))).refused[0].reason


def routed(rank: int, seq: int, count: int = 2, first: int = 0, tokens: int | None = None) -> RankSample:
    """The sample that belongs to `sub(rank, seq)`: tokens to experts `first` and the next one in both layers."""
    tuples = np.tile(np.array([first, first + 1]), (count, 2, 1))
    return RankSample(rank, seq * 32, seq * 32 + 32, TokenSample(count if tokens is None else tokens, tuples))


def test_the_samples_of_a_window_become_one_when_it_is_whole(book: WindowBook) -> None:
    many = np.full((2, 3), 4000)
    took = book.take(report("n0", sub(0, 0, many), sub(0, 1, many)), (), [routed(0, 0, 300, 0, 3000), routed(0, 1)])
    assert took.refused == ()
    book.take(report("n1", sub(1, 0, many)), (), [routed(1, 0, 300, 2, 1000)])
    (seen,) = book.newest(9)
    assert seen.sample is not None
    assert seen.sampled == WINDOW_TUPLES == 256
    assert seen.sample.tokens == 4000
    assert (seen.sample.tuples[:, 0, 0] == 0).sum() == 192, "each rank gives in proportion to its tokens"
    book.take(report("n1", sub(1, 1, many)))
    assert book.newest(1)[0].sampled == 2, "one rank had nothing to tell"
    assert book.refused["sample"] == 0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (routed(0, 0, first=3), "name expert 4"),
        (RankSample(0, 0, 32, TokenSample(9, np.array([[[0, 1]]]))), "this model routes"),
        (RankSample(0, 0, 32, TokenSample(9, np.array([[[0, 1, 2]] * 2]))), "this model routes"),
        (RankSample(0, 0, 31, routed(0, 0).sample), "no counts of steps 0"),
        (routed(0, 1), "no counts of steps 32"),
        (routed(1, 0), "no counts of steps 0"),
    ],
)
def test_a_bad_sample_is_refused_and_the_counts_are_not(book: WindowBook, bad: RankSample, says: str) -> None:
    took = book.take(report("n0", sub(0, 0)), (), [bad])
    assert took.accepted == 1
    assert says in took.refused[0].reason
    assert book.refused["sample"] == 1
    book.take(report("n1", sub(1, 0)), (), [routed(1, 0)])
    (seen,) = book.newest(9)
    assert seen.window.complete
    assert seen.sampled == 2, "the other rank's sample was taken along"


def test_a_sample_of_more_tokens_than_were_counted_is_not_believed(book: WindowBook) -> None:
    book.take(report("n0", sub(0, 0)), (), [routed(0, 0, tokens=5)])
    book.take(report("n1", sub(1, 0)), (), [routed(1, 0)])
    (seen,) = book.newest(9)
    assert (seen.window.complete, seen.sample) == (True, None)
    assert book.refused["sample"] == 2


def test_a_sample_of_counts_that_are_refused_goes_with_them(book: WindowBook) -> None:
    book.take(report("n0", sub(0, 0)))
    took = book.take(report("n0", sub(0, 0)), (), [routed(0, 0)])
    assert "is a duplicate" in took.refused[0].reason
    book.take(report("n1", sub(1, 0)))
    assert book.newest(9)[0].sample is None


def test_samples_of_spans_and_worlds_that_are_gone_are_let_go(book: WindowBook) -> None:
    for seq in range(PENDING_SPANS + 1):
        book.take(report("n0", sub(0, seq)), (), [routed(0, seq)])
    assert len(book._samples) == PENDING_SPANS
    book.enter(World("g", "e" * 16, WORLD.node_of_rank, WORLD.shape, 3, 8))
    assert not book._samples


def test_a_steady_stream_is_used_whole_and_a_shift_cuts_it() -> None:
    rng = np.random.default_rng(0)
    one, other = rng.dirichlet(np.ones(16), size=3), rng.dirichlet(np.ones(16), size=3)

    def draw(kind: np.ndarray, tokens: int = 2000) -> np.ndarray:
        return np.stack([rng.multinomial(tokens, p) for p in kind]).astype(float)

    steady = [draw(one) for _ in range(20)]
    assert steady_tail(steady) == 20
    assert 3 <= steady_tail([*steady, *(draw(other) for _ in range(4))]) <= 5
    assert not shifted(draw(one, 50), draw(one, 50))
    assert shifted(draw(one), draw(other))
