"""Routing samples: what can not have been drawn is refused by name, and a merged sample is one of all tokens together."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from eplane.errors import LoadReportError
from eplane.fields import Fields, pack
from eplane.routing import (
    MAX_REPORT_IDS,
    MAX_REPORT_SAMPLES,
    MAX_SAMPLE_IDS,
    RankSample,
    TokenSample,
    fitted,
    merge,
    read_samples,
)
from eplane.topology import ModelShape

SHAPE = ModelShape("m", 3, 8, 2, 100)


def tuples(count: int, first: int = 0) -> np.ndarray:
    """`[count, 3, 2]`: experts e and e + 1, with `first` as the expert of every token's first layer."""
    rows = np.tile(np.array([[0, 1], [2, 3], [6, 7]]), (count, 1, 1))
    rows[:, 0] = first, first + 1
    return rows


def sample(rank: int = 0, window: int = 0, count: int = 4, tokens: int = 100) -> RankSample:
    return RankSample(rank, window * 8, window * 8 + 8, TokenSample(tokens, tuples(count)))


def test_a_sample_survives_its_json_form() -> None:
    one = sample(3, 5)
    raw = json.loads(json.dumps(one.to_json()))
    back = RankSample.read(Fields(raw, "sample", LoadReportError))
    assert back.key == one.key == (3, 40, 48)
    assert back.sample.tokens == 100
    assert (back.sample.tuples == one.sample.tuples).all()
    assert not back.sample.tuples.flags.writeable
    back.check(SHAPE)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"tokens": 3}, "can not have been drawn"),
        ({"tokens": 2**31}, "overflow"),
        ({"rank": -1}, "rank"),
        ({"rank": 2**16}, "rank"),
        ({"first_step": 8}, "no span"),
        ({"last_step": 2**63}, "last_step"),
        ({"more": 1}, "not a known field"),
        ({"tuples": [[[0, 1]]]}, "tuples"),
        ({"tuples": pack(np.zeros((0, 3, 2), dtype=np.int32))}, "shape"),
        ({"tuples": pack(np.zeros((4, 6), dtype=np.int32))}, "shape"),
        ({"tuples": pack(-tuples(4).astype(np.int32))}, "names expert -"),
        ({"tuples": pack(tuples(4).astype(np.int32) + 2**16)}, "names expert 6"),
        ({"tuples": pack(np.zeros((4, 3, 2), dtype=np.int32))}, "twice"),
        ({"tuples": pack(tuples(MAX_SAMPLE_IDS // 6 + 1).astype(np.int32)), "tokens": 9999}, "are allowed"),
        ({"tuples": {**pack(tuples(4).astype(np.int32)), "shape": [5, 3, 2]}}, "unfolds to other"),
    ],
)
def test_what_can_not_have_been_drawn_is_refused(changed: dict[str, object], says: str) -> None:
    good, bad = sample(0, 1).to_json(), {**sample(0).to_json(), **changed}
    read, refused = read_samples(json.loads(json.dumps([bad, good])))
    assert [one.key for one in read] == [(0, 8, 16)], "what is wrong took the good one with it"
    assert len(refused) == 1
    assert says in refused[0].reason


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (ModelShape("m", 2, 8, 2, 100), "this model routes"),
        (ModelShape("m", 3, 8, 3, 100), "this model routes"),
        (ModelShape("m", 3, 7, 2, 100), "name expert 7"),
    ],
)
def test_a_sample_of_another_model_is_refused(shape: ModelShape, says: str) -> None:
    with pytest.raises(LoadReportError, match=says):
        sample().check(shape)


def test_no_samples_and_no_list_of_samples() -> None:
    assert read_samples(None) == ((), ())
    several: tuple[object, ...] = ({}, "samples", 3, [sample().to_json()] * (MAX_REPORT_SAMPLES + 1))
    for noise in several:
        read, refused = read_samples(noise)
        assert not read
        assert "must be a list" in refused[0].reason
    assert "must be an object" in read_samples([None])[1][0].reason


def test_a_report_holds_no_more_than_it_may_and_each_sample_once() -> None:
    count = MAX_SAMPLE_IDS // 6
    read, refused = read_samples([sample(rank, count=count, tokens=9999).to_json() for rank in range(4)])
    assert sum(one.sample.ids for one in read) <= MAX_REPORT_IDS
    assert ["overflow" in r.reason for r in refused] == [True] * (4 - len(read))
    read, refused = read_samples([sample().to_json(), sample().to_json()])
    assert len(read) == 1
    assert "told twice" in refused[0].reason


@pytest.mark.parametrize(("ranks", "windows", "ids"), [(8, 1, 900), (8, 30, 900), (2, 2, 10_000), (1, 1, 5)])
def test_samples_are_cut_to_what_fits_and_the_newest_stay(ranks: int, windows: int, ids: int) -> None:
    given = [sample(rank, window, 40) for window in range(windows) for rank in range(ranks)]
    kept = fitted(given, ids)
    assert sum(one.sample.ids for one in kept) <= ids
    assert [one.key for one in kept] == [one.key for one in given[len(given) - len(kept) :]]
    if len(given) * 6 * 40 <= ids:
        assert [len(one.sample) for one in kept] == [40] * len(given)
    elif kept:
        assert len(kept) == min(len(given), ids // 6), "a sample was left out though each could have had a tuple"


def test_a_merged_sample_is_in_proportion_to_tokens_and_bounded() -> None:
    busy = TokenSample(3000, tuples(30, first=2))
    quiet = TokenSample(1000, tuples(30, first=6))
    merged = merge([busy, quiet], 256, (1,))
    assert merged is not None
    assert merged.tokens == 4000
    assert Counter(merged.tuples[:, 0, 0].tolist()) == {2: 30, 6: 10}
    few = merge([busy, quiet], 8, (1,))
    assert few is not None
    assert Counter(few.tuples[:, 0, 0].tolist()) == {2: 6, 6: 2}
    assert merge([], 8, (1,)) is None


def test_a_merged_sample_gives_every_token_the_same_chance() -> None:
    """Three ranks with 1000, 300 and 7 tokens, 10 tuples at most: in the mean each has its part, to a tenth of a tuple."""
    parts = [TokenSample(1000, tuples(20, 0)), TokenSample(300, tuples(20, 2)), TokenSample(7, tuples(7, 4))]
    total: Counter[int] = Counter()
    for seed in range(2000):
        merged = merge(parts, 10, (seed,))
        assert merged is not None
        assert len(merged) == 10
        total.update(merged.tuples[:, 0, 0].tolist())
    for first, tokens in ((0, 1000), (2, 300), (4, 7)):
        assert total[first] / 2000 == pytest.approx(10 * tokens / 1307, abs=0.1)


def test_a_sample_that_came_in_order_is_drawn_from_as_a_whole() -> None:
    ordered = TokenSample(100, np.concatenate([tuples(5, first) for first in range(6)]))
    drawn = [merge([ordered], 3, (seed,)) for seed in range(30)]
    assert {int(e) for one in drawn if one is not None for e in one.tuples[:, 0, 0]} == set(range(6))


def test_the_same_seed_gives_the_same_sample() -> None:
    parts = [TokenSample(100, tuples(20, first)) for first in range(6)]
    one, same, other = (merge(parts, 16, seed) for seed in ((1, 2), (1, 2), (1, 3)))
    assert one is not None
    assert same is not None
    assert other is not None
    assert (one.tuples == same.tuples).all()
    assert (one.tuples != other.tuples).any()
