"""Live tables: tokens are split by shares, on every rank and at any pace, and only ready cells are named."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import PlacementError, TableError
from eplane.placement import Placement, linear
from runtime.cells import CellPool
from runtime.tables import LiveTable, build_table, check_cells, source_shares
from tests.moving.rig import RealGroup, all_digests, bundle, manifest

TWO = Placement(np.array([[0, 1, 0, 2], [0, 1, 2, 0]]), 2, 3)


def table_of(placement: Placement, rank: int = 0, shares: np.ndarray | None = None, **names: bool) -> LiveTable:
    held = placement.by_rank()[:, rank] >= 0
    cells = np.where(held, np.cumsum(held.reshape(-1)).reshape(held.shape) - 1, -1)
    return build_table(placement, rank, cells.astype(np.int32), shares, **names)


def test_every_slot_chosen_holds_the_expert() -> None:
    rng = np.random.default_rng(1)
    for ranks, slots, experts in ((1, 4, 4), (4, 3, 6), (3, 5, 7), (8, 2, 16)):
        placement = linear(2, experts, ranks, slots)
        table = table_of(placement, ranks - 1)
        for size in (0, 1, 7, 300):
            ids = torch.from_numpy(rng.integers(experts, size=size))
            for layer in range(2):
                slot = table.choose(layer, ids)
                assert slot.dtype == torch.int64
                assert (placement.p2l[layer][slot.numpy()] == ids.numpy()).all()


@pytest.mark.parametrize("rank", range(4))
def test_half_and_half_at_one_token_a_step(rank: int) -> None:
    placement = linear(2, 6, 4, 3)
    table = table_of(placement, rank)
    for layer in range(2):
        count = np.zeros(12, dtype=int)
        for _ in range(1000):
            count[int(table.choose(layer, torch.tensor([1])))] += 1
        first, second = (count[slot] for slot in placement.replicas(layer, 1))
        assert first + second == 1000
        assert abs(first - 500) <= 3


def test_half_and_half_over_the_ranks_of_every_single_step() -> None:
    placement = linear(1, 6, 4, 3)
    tables = [table_of(placement, rank) for rank in range(4)]
    for _ in range(100):
        slots = [int(table.choose(0, torch.tensor([1]))) for table in tables]
        assert sorted(slots.count(slot) for slot in placement.replicas(0, 1)) == [2, 2]


def test_without_the_running_remainder_one_token_a_step_is_never_split() -> None:
    placement = linear(1, 6, 4, 3)
    table = table_of(placement, 1)
    slots = set()
    for _ in range(100):
        slots.add(int(table.choose(0, torch.tensor([1]))))
        table._cursor.zero_()
    assert len(slots) == 1, "this is what the cursor is for"


@settings(max_examples=20, deadline=None)
@given(
    weights=st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda w: sum(w) > 0.01),
    sizes=st.lists(st.integers(1, 40), min_size=5, max_size=5),
    rank=st.integers(0, 3),
)
def test_weighted_shares_hold_at_any_pace(weights: list[float], sizes: list[int], rank: int) -> None:
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3, 0, -1]]), 4, 4)
    shares = placement.even_shares()
    shares[0, [0, 2, 4, 6]] = np.array(weights) / sum(weights)
    table = table_of(placement, rank, shares)
    count = np.zeros(8)
    total = 0
    while total < 1500:
        for size in [*sizes, 1]:
            slots = table.choose(0, torch.zeros(size, dtype=torch.int64))
            count += np.bincount(slots.numpy(), minlength=8)
            total += size
    assert np.abs(count - shares[0] * total)[[0, 2, 4, 6]].max() <= 12
    assert (count[shares[0] == 0] == 0).all(), "a replica without a share gets no token"


def test_the_pace_does_not_change_the_choice() -> None:
    placement = linear(1, 6, 4, 3)
    ids = torch.from_numpy(np.random.default_rng(3).integers(6, size=500))
    at_once = table_of(placement, 2).choose(0, ids)
    slowly = table_of(placement, 2)
    assert torch.equal(at_once, torch.cat([slowly.choose(0, part) for part in ids.split(7)]))


def test_new_shares_go_on_where_the_old_ones_were() -> None:
    placement = linear(1, 6, 4, 3)
    table = table_of(placement)
    count = np.zeros(12, dtype=int)
    for _ in range(500):
        table = table.with_shares(placement.even_shares()).with_epoch(4)
        count[int(table.choose(0, torch.tensor([1])))] += 1
    assert abs(count[list(placement.replicas(0, 1))] - 250).max() <= 3
    with pytest.raises(PlacementError):
        table.with_shares(np.zeros((1, 12)))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_local_first_keeps_the_shares_of_the_whole_group(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = linear(2, 6, 4, 3)
    shares = placement.even_shares() * rng.uniform(0.05, 1, size=placement.p2l.shape)
    sums = np.stack([np.bincount(placement.p2l[i], weights=shares[i], minlength=6) for i in range(2)])
    shares /= np.take_along_axis(sums, placement.p2l, axis=1)
    own = np.stack([source_shares(placement, shares, rank) for rank in range(4)])
    assert np.allclose(own.mean(axis=0), shares)
    for rank in range(4):
        mine = slice(3 * rank, 3 * rank + 3)
        assert (own[rank][:, mine] >= np.minimum(1, shares[:, mine] * 4) - 1e-9).all(), "its own replica first"
        table_of(placement, rank, shares, local_first=True).choose(0, torch.arange(6))


def test_a_table_names_ready_cells_of_the_right_expert_only() -> None:
    digests = all_digests(2, 3)
    pool = CellPool(manifest(), 6)
    cells = [[pool.hold(layer, e, bundle(layer, e), digests[layer][e]) for e in (0, 1)] for layer in range(2)]
    good = np.array(cells, dtype=np.int32)
    check_cells(build_table(TWO, 0, good), pool)
    with pytest.raises(TableError, match="needs expert"):
        check_cells(build_table(TWO, 0, good[:, ::-1]), pool)
    with pytest.raises(TableError, match="no cell 99"):
        check_cells(build_table(TWO, 0, good + 99), pool)
    staging = pool.allocate(0, 1)
    unready = good.copy()
    unready[0, 1] = staging
    with pytest.raises(TableError, match="STAGING"):
        check_cells(build_table(TWO, 0, unready), pool)
    pool.retire(int(good[0, 0]))
    with pytest.raises(TableError, match="RETIRED"):
        check_cells(build_table(TWO, 0, good), pool)
    with pytest.raises(TableError, match="do not match"):
        build_table(TWO, 0, np.array([[0, -1], [2, 3]]))
    with pytest.raises(TableError, match="shape"):
        build_table(TWO, 0, good[:1])


def test_padding_repeats_a_slot_of_the_same_expert() -> None:
    table = table_of(TWO, 1)
    assert table.max_replicas == 2
    assert table.slots_of(0).tolist() == [[0, 2], [1, 1], [3, 3]]
    assert table.digest64 == TWO.digest64
    assert table.digest == TWO.digest


def test_tables_of_a_group_serve_every_token() -> None:
    group = RealGroup(3, 2, 6, 3, 2)
    for _ in range(20):
        group.step(tokens=5)
    assert (group.checked, group.wrong) == (600, 0)
    group.close()
