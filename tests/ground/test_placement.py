"""Placement: the table's rules, the linear start, deltas, moves, loads and shares."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import PlacementError
from eplane.placement import EMPTY, Change, Placement, check_shares, linear
from tests.ground.tables import placements, shapes, shares_for

FAST = settings(deadline=None, max_examples=60)


@FAST
@given(shapes())
def test_linear_start(shape: tuple[int, int, int, int]) -> None:
    layers, experts, ranks, slots = shape
    table = linear(layers, experts, ranks, slots)
    assert (table.layers, table.experts, table.ranks, table.slots) == (layers, experts, ranks, slots)
    assert (table.p2l == table.p2l[0]).all()
    for rank, row in enumerate(table.by_rank()[0]):
        held = [e for e in row.tolist() if e != EMPTY]
        own = range(experts * rank // ranks, experts * (rank + 1) // ranks)
        assert held[: len(own)] == list(own)
        assert len(held) == min(slots, experts), "a slot stays empty only where the rank holds every expert"
    counts = table.replica_count[0]
    if slots < experts:
        assert counts.sum() == ranks * slots
        assert counts.min() >= max(1, ranks * slots // experts - 1), "copies are spread"


@pytest.mark.parametrize("shape", [(0, 4, 2, 2), (1, 0, 2, 2), (1, 4, 0, 2), (1, 4, 2, 0), (1, 5, 2, 2)])
def test_linear_refuses_what_does_not_fit(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(PlacementError):
        linear(*shape)


@pytest.mark.parametrize(
    ("table", "ranks", "experts", "says"),
    [
        ([0, 1, 2, 3], 2, 4, "shape"),
        ([[0, 1, 2]], 2, 3, "shape"),
        ([[]], 2, 1, "shape"),
        ([[0, 1, 2, 3]], 0, 4, "shape"),
        ([[0, 1, 2, 4]], 2, 4, "names expert 4"),
        ([[0, 1, 2, -2]], 2, 3, "names expert"),
        ([[0, 1, 2, 0]], 2, 4, "expert 3 has no replica"),
        ([[0, 1, 2, 3], [0, 1, 2, EMPTY]], 2, 4, "layer 1: expert 3"),
        ([[0, 0, 1, 2]], 2, 3, "rank 0 holds expert 0 twice"),
    ],
)
def test_a_bad_table_is_refused(table: list[object], ranks: int, experts: int, says: str) -> None:
    with pytest.raises(PlacementError, match=says):
        Placement(np.array(table, dtype=np.int32), ranks, experts)


def test_it_is_immutable() -> None:
    given_table = np.array([[0, 1, 1, 0]], dtype=np.int32)
    table = Placement(given_table, 2, 2)
    with pytest.raises(ValueError):
        table.p2l[0, 0] = 1


def test_it_does_not_change_with_the_array_it_was_made_of() -> None:
    given_table = np.array([[0, 1, 1, 0]], dtype=np.int32)
    table = Placement(given_table, 2, 2)
    given_table[0, 0] = 1
    assert table.p2l[0, 0] == 0


@pytest.mark.parametrize("value", [2**32 + 1, -(2**32) + 1, 2**63])
def test_a_number_that_would_wrap_is_refused(value: int) -> None:
    wide: Any = np.array([[0, value]], dtype=np.uint64 if value > 2**62 else np.int64)
    with pytest.raises(PlacementError, match="names expert"):
        Placement(wide, 2, 2)


@pytest.mark.parametrize("table", [[[0.0, 1.0]], [[0.5, 1.0]], [[0.0, np.nan]], [[False, True]]])
def test_only_whole_numbers_make_a_table(table: Any) -> None:
    with pytest.raises(PlacementError, match="whole numbers"):
        Placement(np.array(table), 2, 2)


@FAST
@given(placements())
def test_the_digest_names_the_table(table: Placement) -> None:
    again = Placement(table.p2l.copy(), table.ranks, table.experts)
    assert again.digest64 == table.digest64
    assert len(table.digest) == 16
    assert int(table.digest, 16) == table.digest64 % 2**64
    assert -(2**63) <= table.digest64 < 2**63


@FAST
@given(placements(), st.randoms(use_true_random=False))
def test_the_digest_tells_tables_apart(table: Placement, rng: object) -> None:
    flipped = table.p2l[:, ::-1]
    other = Placement(flipped, table.ranks, table.experts)
    assert (other.digest64 == table.digest64) == bool((flipped == table.p2l).all())


def test_the_digest_knows_the_ranks_and_experts() -> None:
    row = np.array([[0, 1, 2, 3]], dtype=np.int32)
    assert Placement(row, 2, 4).digest != Placement(row, 4, 4).digest
    assert linear(2, 4, 2, 2).digest != linear(1, 4, 2, 2).digest


@FAST
@given(st.data())
def test_delta_and_apply_are_inverse(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(placements(shape)), data.draw(placements(shape))
    delta = a.delta(b)
    assert a.apply(delta).digest == b.digest
    assert len(delta) == int((a.p2l != b.p2l).sum())
    assert list(delta) == sorted(delta, key=lambda c: (c.layer, c.slot))
    assert a.delta(a) == ()


@FAST
@given(st.data())
def test_moves_are_the_bundles_that_a_rank_lacks(data: st.DataObject) -> None:
    shape = data.draw(shapes())
    a, b = data.draw(placements(shape)), data.draw(placements(shape))
    moves = a.moves(b)
    assert len(set(moves)) == len(moves) <= len(a.delta(b))
    for layer in range(a.layers):
        for rank in range(a.ranks):
            mine, theirs = (set(p.by_rank()[layer, rank].tolist()) - {EMPTY} for p in (a, b))
            assert {e for (x, e, r) in moves if (x, r) == (layer, rank)} == theirs - mine


def test_a_swap_inside_a_rank_is_no_move() -> None:
    a = linear(1, 4, 2, 2)
    b = Placement(np.array([[1, 0, 2, 3]], dtype=np.int32), 2, 4)
    assert len(a.delta(b)) == 2
    assert a.moves(b) == ()


def test_a_delta_of_different_worlds_is_refused() -> None:
    with pytest.raises(PlacementError, match="different worlds"):
        linear(1, 4, 2, 2).delta(linear(1, 4, 4, 1))


@pytest.mark.parametrize("change", [Change(1, 0, 0), Change(-1, 0, 0), Change(0, 4, 0), Change(0, -1, 0)])
def test_a_change_outside_the_table_is_refused(change: Change) -> None:
    with pytest.raises(PlacementError, match="outside"):
        linear(1, 4, 2, 2).apply([change])


def test_a_change_that_loses_an_expert_is_refused() -> None:
    with pytest.raises(PlacementError, match="expert 0 has no replica"):
        linear(1, 4, 2, 2).apply([Change(0, 0, EMPTY)])


@FAST
@given(st.data())
def test_rank_load_keeps_the_tokens(data: st.DataObject) -> None:
    table = data.draw(placements())
    seed = data.draw(st.integers(0, 2**32 - 1))
    load = np.random.default_rng(seed).integers(0, 1000, (table.layers, table.experts)).astype(float)
    shares = data.draw(st.none() | shares_for(table))
    per_rank = table.rank_load(load, shares)
    assert per_rank.shape == (table.layers, table.ranks)
    assert np.allclose(per_rank.sum(axis=1), load.sum(axis=1))
    expected = np.zeros_like(per_rank)
    split = table.even_shares() if shares is None else shares
    for layer in range(table.layers):
        for slot, expert in enumerate(table.p2l[layer].tolist()):
            if expert != EMPTY:
                expected[layer, table.rank_of(slot)] += load[layer, expert] * split[layer, slot]
    assert np.allclose(per_rank, expected)


@FAST
@given(placements())
def test_even_shares_and_replicas(table: Placement) -> None:
    shares = check_shares(table, table.even_shares())
    for layer in range(table.layers):
        for expert in range(table.experts):
            slots = table.replicas(layer, expert)
            assert len(slots) == table.replica_count[layer, expert] >= 1
            assert all(table.p2l[layer, slot] == expert for slot in slots)
            assert np.allclose(shares[layer, list(slots)], 1 / len(slots))


@FAST
@given(st.data())
def test_valid_shares_are_taken_read_only(data: st.DataObject) -> None:
    table = data.draw(placements())
    shares = data.draw(shares_for(table))
    taken = check_shares(table, shares)
    assert np.array_equal(taken, shares)
    with pytest.raises(ValueError):
        taken[0, 0] = 0.5


@pytest.mark.parametrize(
    ("at", "value"), [((0, 0), np.nan), ((0, 0), np.inf), ((0, 0), -0.1), ((0, 0), 0.5), ((0, 3), 0.5), ((0, 4), 0.1)]
)
def test_bad_shares_are_refused(at: tuple[int, int], value: float) -> None:
    table = Placement(np.array([[0, 1, 2, 1, EMPTY, EMPTY]], dtype=np.int32), 2, 3)
    shares = table.even_shares()
    shares[at] = value
    if at == (0, 3):
        shares[0, 1] = 0.4
    with pytest.raises(PlacementError, match="shares"):
        check_shares(table, shares)


def test_shares_of_another_shape_are_refused() -> None:
    with pytest.raises(PlacementError, match="shape"):
        check_shares(linear(1, 4, 2, 2), np.ones((1, 3)))
