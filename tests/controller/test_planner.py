"""The planner: any target is reached in waves that are safe one by one and fit the room there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planner import Room, choose_sources, held_cells, incoming, keep_slots, plan_waves, transfer_seconds
from eplane.errors import PlanImpossible
from eplane.placement import EMPTY, Placement, linear
from eplane.plan import WavePlan
from eplane.topology import ModelShape, World


def world_of(placement: Placement, spare: int, nodes: int = 1) -> World:
    node_of_rank = tuple(f"n{r * nodes // placement.ranks}" for r in range(placement.ranks))
    shape = ModelShape("m", placement.layers, placement.experts, 1, 1000)
    cells = placement.layers * placement.slots + spare
    return World("g", "a" * 16, node_of_rank, shape, placement.slots, cells)


def random_placement(rng: np.random.Generator, layers: int, experts: int, ranks: int, slots: int) -> Placement:
    """Every expert once, then random copies and random gaps, no expert twice on a rank."""
    table = np.full((layers, ranks, slots), EMPTY, dtype=np.int32)
    for layer in range(layers):
        seats = rng.permutation(ranks * slots)[:experts]
        table[layer].reshape(-1)[seats] = rng.permutation(experts)
        for rank, place in np.argwhere(table[layer] == EMPTY).tolist():
            lacking = sorted(set(range(experts)) - set(table[layer, rank].tolist()))
            if lacking and rng.random() < 0.8:
                table[layer, rank, place] = int(rng.choice(lacking))
    return Placement(table.reshape(layers, -1), ranks, experts)


@st.composite
def journeys(draw: st.DrawFn) -> tuple[Placement, Placement, int, int, int]:
    """Two placements of one world, spare cells a rank, reserve, most moves a wave."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layers, ranks, slots = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    experts = draw(st.integers(1, ranks * slots))
    base = random_placement(rng, layers, experts, ranks, slots)
    target = random_placement(rng, layers, experts, ranks, slots)
    reserve = draw(st.integers(0, 2))
    return base, target, reserve + draw(st.integers(1, 6)), reserve, draw(st.integers(1, 12))


def check(base: Placement, waves: tuple[WavePlan, ...], world: World, room: Room) -> Placement:
    """Follow the waves and check what must hold of each. Returns where they lead."""
    present, before, free_before = base, None, None
    for number, wave in enumerate(waves, start=1):
        assert wave.number == number
        free = world.cells - held_cells(present) - room.spare_min
        following = wave.applied_to(present)
        need = incoming(present, following)
        assert (need <= free).all()
        assert wave.bytes == len(wave.loads) * world.shape.bundle_bytes == int(need.sum()) * world.shape.bundle_bytes
        if wave.overlaps:
            assert before is not None
            assert free_before is not None
            assert wave.fits_beside(before, base.slots, free_before.tolist())
        for load in wave.loads:
            assert load.expert in present.by_rank()[load.layer, load.source_rank]
            assert load.source_rank != load.slot // base.slots
        assert (world.cells - held_cells(following) >= room.spare_min).all()
        present, before, free_before = following, wave, free
    return present


@given(journeys())
@settings(max_examples=150, deadline=None)
def test_any_target_is_reached_by_valid_placements_within_the_room(
    journey: tuple[Placement, Placement, int, int, int],
) -> None:
    base, target, spare, reserve, moves = journey
    world, room = world_of(base, spare, nodes=2), Room(reserve, moves)
    waves = plan_waves(base, target, world, room)
    assert check(base, waves, world, room).digest == target.digest
    assert sum(len(w.loads) for w in waves) == len(base.moves(target))


@given(journeys())
@settings(max_examples=60, deadline=None)
def test_keeping_slots_changes_no_rank_and_moves_no_bundle_within_one(
    journey: tuple[Placement, Placement, int, int, int],
) -> None:
    base, target, *_ = journey
    kept = keep_slots(base, target)
    assert (np.sort(kept.by_rank(), axis=2) == np.sort(target.by_rank(), axis=2)).all()
    assert base.moves(kept) == base.moves(target)
    for change in base.delta(kept):
        rank = change.slot // base.slots
        old = base.p2l[change.layer, change.slot]
        assert old == EMPTY or old not in kept.by_rank()[change.layer, rank]


def test_nothing_to_do_is_no_wave() -> None:
    base = linear(2, 8, 4, 3)
    assert plan_waves(base, base, world_of(base, 1)) == ()


def test_a_cycle_over_all_ranks_goes_in_one_wave_with_one_cell_each() -> None:
    base = Placement(np.arange(6).reshape(1, 6), 6, 6)
    target = Placement(np.roll(np.arange(6), 1).reshape(1, 6), 6, 6)
    waves = plan_waves(base, target, world_of(base, 1), Room(0, 2))
    assert [len(w.loads) for w in waves] == [6]


def test_small_waves_hold_to_the_cap_where_they_can_be_cut() -> None:
    base = Placement(np.array([[0, 1, 2, 0, 1, 3]] * 4), 2, 4)
    target = Placement(np.array([[0, 2, 3, 0, 1, 2]] * 4), 2, 4)
    waves = plan_waves(base, target, world_of(base, 8), Room(0, 2))
    assert all(len(w.loads) <= 2 for w in waves)
    assert len(waves) == 4


def test_without_a_free_cell_it_says_what_to_do() -> None:
    base = Placement(np.array([[0, 1]]), 2, 2)
    target = Placement(np.array([[1, 0]]), 2, 2)
    with pytest.raises(PlanImpossible, match=r"ranks \[0, 1\] have no cell.*spare cells"):
        plan_waves(base, target, world_of(base, 0))
    with pytest.raises(PlanImpossible, match="1 kept free"):
        plan_waves(base, target, world_of(base, 1), Room(spare_min=1))


def test_another_world_is_refused() -> None:
    base = linear(2, 8, 4, 3)
    with pytest.raises(PlanImpossible, match="another world"):
        plan_waves(base, linear(3, 8, 4, 3), world_of(base, 4))


def test_order_inside_a_rank_costs_no_bytes() -> None:
    base = Placement(np.array([[0, 1, 2, 3]]), 2, 4)
    target = Placement(np.array([[1, 0, 3, 2]]), 2, 4)
    (wave,) = plan_waves(base, target, world_of(base, 0))
    assert wave.loads == ()
    assert wave.bytes == 0
    assert len(wave.changes) == 4


def test_sources_are_near_first_and_then_spread() -> None:
    # Expert 0 lives on ranks 0 (node n0) and 2 (node n1); ranks 1 and 3 want it in two layers each.
    row = [0, 1, 2, 3, 0, 4, 5, 6]
    base = Placement(np.array([row, row]), 4, 7)
    target_row = [2, 1, 0, 3, 5, 4, 0, 6]
    target = Placement(np.array([target_row, target_row]), 4, 7)
    sources = {
        (load.layer, load.expert, load.slot // 2): load.source_rank
        for load in choose_sources(base, target, ("n0", "n0", "n1", "n1"))
    }
    assert sources[(0, 0, 1)] == sources[(1, 0, 1)] == 0
    assert sources[(0, 0, 3)] == sources[(1, 0, 3)] == 2
    everywhere = {load.source_rank for load in choose_sources(base, target, ("n0",) * 4) if load.expert == 0}
    assert everywhere == {0, 2}


def test_the_busiest_rank_sets_the_seconds_of_a_wave() -> None:
    base = Placement(np.array([[0, 1, 2, 3]] * 3), 2, 4)
    target = Placement(np.array([[0, 2, 1, 3]] * 3), 2, 4)
    (wave,) = plan_waves(base, target, world_of(base, 3))
    assert len(wave.loads) == 6
    assert transfer_seconds(wave, 2, 1000, 1500.0) == pytest.approx(2.0)


def test_waves_overlap_only_where_the_free_cells_hold_both() -> None:
    base = Placement(np.array([[0, 1, 2, 3]] * 4), 2, 4)
    target = Placement(np.array([[0, 2, 1, 3]] * 4), 2, 4)
    tight = plan_waves(base, target, world_of(base, 2), Room())
    assert [w.overlaps for w in tight] == [False, False]
    wide = plan_waves(base, target, world_of(base, 4), Room(max_moves=4))
    assert [w.overlaps for w in wide] == [False, True]
