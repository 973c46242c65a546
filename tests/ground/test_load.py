"""Load: what is counted is kept to the token; what can not be is refused, counted, and never gets through."""

from __future__ import annotations

import base64
import copy
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import LoadReportError
from eplane.load import MAX_COUNT, Intake, LoadReport, LoadWindow, SubWindow, fold
from eplane.placement import EMPTY, Placement, linear
from eplane.topology import ModelShape, World
from tests.ground.tables import placements

FAST = settings(deadline=None, max_examples=60)
WORLD = "a" * 16
PLACEMENT = linear(2, 8, 4, 3)


def sub(
    rank: int = 0, first: int = 0, last: int = 32, seq: int = 0, placement: Placement = PLACEMENT, seed: int = 0
) -> SubWindow:
    rng = np.random.default_rng((seed, rank, seq))
    held = (placement.by_rank()[:, rank] != EMPTY).astype(np.int64)
    counts = [rng.integers(0, 100, held.shape) * held for _ in range(2)]
    return SubWindow(WORLD, placement.digest, first, last, rank, counts[0], counts[1], seq)


def report(*subs: SubWindow) -> dict[str, Any]:
    made = LoadReport("g", "n0", "b" * 16, WORLD, subs).to_json()
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


@FAST
@given(st.data())
def test_a_report_comes_back_as_it_was(data: st.DataObject) -> None:
    table = data.draw(placements())
    subs = tuple(sub(rank, seq=5, placement=table, seed=data.draw(st.integers(0, 99))) for rank in range(table.ranks))
    found, refused = LoadReport.from_json(report(*subs))
    assert refused == ()
    assert found == LoadReport("g", "n0", "b" * 16, WORLD, subs)
    assert {hash(s) for s in found.subwindows} == {hash(s) for s in subs}


@FAST
@given(st.data())
def test_fold_keeps_every_token_where_it_belongs(data: st.DataObject) -> None:
    table = data.draw(placements())
    seed = data.draw(st.integers(0, 999))
    subs = [sub(r, 32 * w, 32 * w + 32, w, table, seed) for r in range(table.ranks) for w in range(3)]
    window = fold(table, data.draw(st.permutations(subs)))
    assert (window.first_step, window.last_step, window.complete) == (0, 96, True)
    assert window.ranks_seen == tuple(range(table.ranks))
    assert window.tokens == sum(s.tokens for s in subs)
    expected = np.zeros((2, table.layers, table.experts))
    for s in subs:
        for layer, k in np.ndindex(table.layers, table.slots):
            expert = table.by_rank()[layer, s.rank, k]
            if expert != EMPTY:
                expected[:, layer, expert] += s.prefill[layer, k], s.decode[layer, k]
    assert np.array_equal(window.prefill, expected[0])
    assert np.array_equal(window.decode, expected[1])
    assert np.array_equal(window.total, expected.sum(axis=0))


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 0, 32), (1, 0, 32), (2, 0, 32)],
        [(0, 0, 32), (1, 0, 32), (2, 0, 32), (3, 0, 64)],
        [(0, 0, 32), (1, 0, 32), (2, 0, 32), (3, 1, 32)],
        [(r, first, first + 32) for r in range(4) for first in (0, 64)],
    ],
)
def test_a_window_with_a_hole_is_not_complete(spans: list[tuple[int, int, int]]) -> None:
    window = fold(PLACEMENT, [sub(r, first, last, first) for r, first, last in spans])
    assert not window.complete
    assert window.tokens > 0


def test_counts_under_another_placement_are_refused() -> None:
    other = PLACEMENT.apply(PLACEMENT.delta(Placement(PLACEMENT.p2l[::, ::-1], 4, 8)))
    with pytest.raises(LoadReportError, match="digest"):
        fold(other, [sub()])


def test_tokens_at_an_empty_slot_are_refused() -> None:
    table = Placement(np.array([[0, 1, EMPTY, 2]], dtype=np.int32), 2, 3)
    counts = np.array([[1, 2]])
    bad = SubWindow(WORLD, table.digest, 0, 1, 1, counts, counts, 0)
    with pytest.raises(LoadReportError, match="holds no expert"):
        fold(table, [bad])


def _made(**changes: Any) -> SubWindow:
    good = sub()
    values: dict[str, Any] = {
        name: getattr(good, name)
        for name in ("world", "digest", "first_step", "last_step", "rank", "prefill", "decode", "seq")
    }
    return SubWindow(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"world": "c" * 16},
        {"rank": 4},
        {"prefill": np.zeros((2, 2), int), "decode": np.zeros((2, 2), int)},
        {"prefill": np.zeros((3, 3), int), "decode": np.zeros((3, 3), int)},
    ],
)
def test_what_does_not_fit_is_not_folded(changes: dict[str, Any]) -> None:
    with pytest.raises(LoadReportError):
        fold(PLACEMENT, [sub(1), _made(**changes)])


def test_the_same_step_of_a_rank_is_not_folded_twice() -> None:
    with pytest.raises(LoadReportError, match="twice"):
        fold(PLACEMENT, [sub(0, 0, 32, 0), sub(0, 16, 48, 1)])
    with pytest.raises(LoadReportError, match="none"):
        fold(PLACEMENT, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"first_step": 32},
        {"first_step": -1},
        {"last_step": 2**63},
        {"rank": -1},
        {"rank": 1 << 16},
        {"seq": -1},
        {"prefill": np.full((2, 3), -1)},
        {"decode": np.full((2, 3), MAX_COUNT + 1)},
        {"decode": np.full((2, 3), 1.5)},
        {"decode": np.full((2, 3), np.nan)},
        {"decode": np.full((2, 3), True)},
        {"prefill": np.zeros((2, 2), int)},
        {"prefill": np.zeros(3, int)},
        {"prefill": np.zeros((2, 0), int), "decode": np.zeros((2, 0), int)},
    ],
)
def test_what_can_not_have_been_counted_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(LoadReportError):
        _made(**changes)


def test_a_count_of_unsigned_overflow_is_refused() -> None:
    with pytest.raises(LoadReportError, match="overflow"):
        _made(prefill=np.full((2, 3), 2**64 - 1, dtype=np.uint64))


def _packed(values: Any, dtype: str = "<i4", shape: list[Any] | None = None) -> dict[str, Any]:
    table = np.asarray(values, dtype=dtype)
    data = base64.b64encode(zlib.compress(table.tobytes())).decode()
    return {"shape": list(table.shape) if shape is None else shape, "data": data}


GOOD = np.ones((2, 3), np.int32)
POISON: dict[str, Any] = {
    "seq": [-1, 1.0, True, None, "1", float("nan"), 2**63],
    "rank": [-1, 0.0, False, "0", [0], 1 << 16],
    "first_step": [-1, 32, 33, float("nan"), float("inf"), None],
    "last_step": [0, -1, 2**63, "32", float("nan")],
    "world": ["", "A" * 16, "a" * 15, 7, None, "c" * 16],
    "digest": ["", "g" * 16, "a" * 17, 1.5],
    "prefill": [
        None,
        [[1, 2, 3], [4, 5, 6]],
        {},
        _packed(-GOOD),
        _packed(GOOD.astype(float), "<f8"),
        _packed(np.full((2, 3), np.nan), "<f4", [2, 3]) | {"data": "AAAA"},
        _packed(GOOD, shape=[2, 4]),
        _packed(GOOD, shape=[3, 3]),
        _packed(GOOD, shape=[-2, -3]),
        _packed(GOOD, shape=[2, 3.0]),
        _packed(GOOD, shape=[6]),
        _packed(GOOD, shape=[1 << 30, 1 << 30]),
        _packed(np.zeros((2, 2), np.int32)),
        _packed(GOOD) | {"data": "not base64!"},
        _packed(GOOD) | {"data": "ünï"},
        _packed(GOOD) | {"data": base64.b64encode(b"not zlib").decode()},
        _packed(GOOD) | {"data": base64.b64encode(zlib.compress(bytes(1 << 20))).decode()},
        _packed(GOOD) | {"data": base64.b64encode(zlib.compress(GOOD.tobytes())[:-3]).decode()},
        _packed(GOOD) | {"data": base64.b64encode(zlib.compress(GOOD.tobytes()) + b"x").decode()},
        _packed(GOOD) | {"more": 1},
    ],
    "extra": [1],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in POISON.items() for value in values])
def test_a_poisoned_subwindow_is_refused_by_name_and_its_neighbours_are_taken(name: str, value: Any) -> None:
    data = report(sub(0, seq=1), sub(1, seq=2), sub(2, seq=3))
    data["subwindows"][1][name] = value
    found, refused = LoadReport.from_json(data)
    assert found.subwindows == (sub(0, seq=1), sub(2, seq=3))
    assert len(refused) == 1
    assert "subwindows[1]" in refused[0].reason
    assert name in ("extra", "first_step") or name in refused[0].reason
    if name not in ("rank", "seq"):
        assert (refused[0].rank, refused[0].seq) == (1, 2)


@pytest.mark.parametrize("name", ["v", "group", "node", "incarnation", "world", "subwindows"])
@pytest.mark.parametrize("value", [None, 2, -1, "", "x" * 200, [], {}, float("nan")])
def test_a_report_that_can_not_be_read_as_a_whole_is_refused(name: str, value: Any) -> None:
    if name == "subwindows" and value == []:
        return
    data = report(sub())
    data[name] = value
    with pytest.raises(LoadReportError, match=name):
        LoadReport.from_json(data)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_no_poison_gets_through(data: st.DataObject) -> None:
    """Any field of a report replaced by anything: what is taken can have been counted, or nothing is taken."""
    poisoned: Any = copy.deepcopy(report(sub(0), sub(1)))
    at = poisoned if data.draw(st.booleans()) else poisoned["subwindows"][0]
    name = data.draw(st.sampled_from(sorted(at)))
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=5,
    )
    at[name] = data.draw(anything)
    try:
        found, _ = LoadReport.from_json(poisoned)
    except LoadReportError:
        return
    for taken in found.subwindows:
        assert taken.prefill.dtype == taken.decode.dtype == np.int64
        assert taken.prefill.min() >= 0
        assert taken.decode.max() <= MAX_COUNT
        assert 0 <= taken.first_step < taken.last_step
        assert taken.world == WORLD


SHAPE = ModelShape("tiny", 2, 8, 2, 1000)
INTAKE = Intake(World("g", WORLD, ("n0", "n0", "n1", "n1"), SHAPE, 3, 8))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (sub(0, 0, 32, 3), "duplicate"),
        (sub(0, 64, 96, 2), "duplicate"),
        (sub(0, 63, 96, 4), "overlaps"),
        (sub(1, 0, 64, 0), "late"),
        (_made(world="c" * 16), "life"),
        (_made(rank=4), "outside"),
        (_made(prefill=np.zeros((2, 4), int), decode=np.zeros((2, 4), int)), "shape"),
    ],
)
def test_the_intake_refuses(bad: SubWindow, says: str) -> None:
    at = INTAKE.take(sub(0, 32, 64, 3)).close(32)
    with pytest.raises(LoadReportError, match=says):
        at.take(bad)


def test_the_intake_goes_on_after_a_gap_and_never_reopens() -> None:
    at = INTAKE.take(sub(0, 32, 64, 3)).take(sub(0, 128, 160, 9)).take(sub(3, 0, 32, 0)).close(64).close(32)
    assert at.closed_before == 64
    assert INTAKE.taken == {}


@FAST
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=40))
def test_whatever_order_and_however_often_nothing_counts_twice(order: list[tuple[int, int]]) -> None:
    at, taken = INTAKE, []
    for rank, window in order:
        one = sub(rank, 32 * window, 32 * window + 32, window)
        try:
            at = at.take(one)
        except LoadReportError:
            continue
        taken.append(one)
    assert len({(s.rank, s.seq) for s in taken}) == len(taken)
    if taken:
        assert fold(PLACEMENT, taken).tokens == sum(s.tokens for s in taken)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_a_load_window_holds_only_finite_tokens(value: float) -> None:
    good, bad = np.ones((2, 8)), np.ones((2, 8))
    bad[1, 3] = value
    for prefill, decode in ((good, bad), (bad, good), (good, np.ones((2, 7)))):
        with pytest.raises(LoadReportError):
            LoadWindow(WORLD, PLACEMENT.digest, 0, 1, prefill, decode, True, (0,))
