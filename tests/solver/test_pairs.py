"""Two places a rank: the proof, copies and pairs under a limit, and what the policy makes of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.solver import Problem, solve
from controller.solver.compiled import pairs
from controller.solver.measure import balance, rank_loads
from controller.solver.problem import EMPTY, Floats, Ints
from controller.solver.proof import least_pairs

SLACK = 1 + 1e-9


def optimum(load: Floats, ranks: int) -> float:
    """The least slowest pair over all choices of copies, evenly split: sorted, the i-th smallest goes with the i-th largest."""
    places, best = 2 * ranks, np.inf
    for copies in itertools.product(range(1, ranks + 1), repeat=len(load)):
        if sum(copies) <= places:
            best = min(best, float(_slowest(load, copies, places)))
    return best


def _slowest(load: Floats, copies: tuple[int, ...], places: int) -> float:
    sizes = np.sort(np.repeat(load / copies, copies))
    sizes = np.concatenate([np.zeros(places - sizes.size), sizes])
    return float((sizes + sizes[::-1]).max())


loads = st.lists(st.integers(0, 50), min_size=3, max_size=6).map(lambda x: np.asarray(x, dtype=np.float64))


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(2, 4))
def test_what_is_proved_no_placement_beats(load: Floats, ranks: int) -> None:
    if len(load) > 2 * ranks or load.sum() == 0:
        return
    best = optimum(load, ranks)
    most = np.full(len(load), ranks)
    proved = least_pairs(load, most, 2 * ranks, float(load.sum() / ranks) * 0.999, best * 1.5)
    assert proved <= best * (1 + 1e-9)


def test_the_proof_knows_that_large_copies_need_small_partners() -> None:
    """Three experts are too large for each other and there is one small one: a perfect split is out of reach, and proved so."""
    load = np.array([10.0, 10.0, 10.0, 4.0, 4.0, 1.0])
    best, mean = optimum(load, 3), float(load.sum() / 3)
    proved = least_pairs(load, np.full(6, 3), 6, mean, best * 1.2)
    assert 1.02 * mean < proved <= best


def test_shares_that_lean_may_beat_what_even_ones_can_not() -> None:
    """Sizes of copies are known only where they are even: the tight bound is not for weighted shares."""
    load = np.array([[[12.0, 6.0, 5.0]]])
    even = Problem.of(load, 2, 2, forecast=False, tight_bound=True)
    leaning = Problem.of(load, 2, 2, forecast=False, tight_bound=True, shares="weighted")
    answer = solve(leaning)
    loads = rank_loads(load[0], answer.placement, answer.shares, 2)
    assert (balance(loads, leaning.capacity, leaning.drained) <= answer.bound + 1e-9).all()
    assert (solve(even).bound <= answer.bound + 1e-9).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_tight_bound_is_tighter_and_still_a_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.zipf(1.6, (1, 2, 40)).clip(1, 400).astype(np.float64) * 100
    loose, tight = (solve(Problem.of(load, 25, 2, forecast=False, tight_bound=t)) for t in (False, True))
    assert np.array_equal(loose.placement, tight.placement)
    assert (tight.bound <= loose.bound + 1e-12).all()
    assert (tight.balancedness <= tight.bound + 1e-9).all()
    assert (tight.balancedness / tight.bound).mean() > 0.97


@settings(max_examples=60, deadline=None)
@given(loads, st.integers(2, 4), st.floats(1.0, 1.6))
def test_copies_that_are_found_can_be_paired_under_the_limit(load: Floats, ranks: int, above: float) -> None:
    if len(load) > 2 * ranks or load.sum() == 0:
        return
    limit = optimum(load, ranks) * above
    low, high = np.ones(len(load), dtype=np.int64), np.full(len(load), ranks)
    copies = low.copy()
    left = pairs.settle(load, low, high, limit * SLACK, copies, 2 * ranks)
    assert copies.sum() <= 2 * ranks
    assert copies.min() >= 1
    assert (left > 0) == (_slowest(load, tuple(copies), 2 * ranks) > limit * SLACK * (1 + 1e-9))


def test_pairs_that_hold_are_kept_and_the_others_made_anew() -> None:
    load = np.array([8.0, 7.0, 6.0, 5.0, 3.0, 1.0])
    table = np.array([[0, 1], [2, 5], [3, 4]], dtype=np.int32)
    copies = np.ones(6, dtype=np.int64)
    out: Ints = table.copy()
    assert pairs.pair_up(np.full(3, 2), load, copies, 11.0, out, False)
    rows = [set(row.tolist()) for row in out]
    assert all(load[list(row)].sum() <= 11.0 for row in rows)
    assert sorted(out.ravel().tolist()) == list(range(6))
    # Under 15 every pair holds, so nothing moves.
    same: Ints = table.copy()
    assert pairs.pair_up(np.full(3, 2), load, copies, 15.0, same, False)
    assert np.array_equal(same, table)
    impossible: Ints = table.copy()
    assert not pairs.pair_up(np.full(3, 2), load, copies, 9.0, impossible, False)


def test_a_rank_without_slots_gets_none() -> None:
    usable = np.array([2, 0, 2])
    table = np.full((3, 2), EMPTY, dtype=np.int32)
    assert pairs.pair_up(usable, np.array([4.0, 3, 2, 1]), np.ones(4, dtype=np.int64), 6.0, table, True)
    assert (table[1] == EMPTY).all()


def _drifted(seed: int) -> tuple[Problem, Problem]:
    rng = np.random.default_rng(seed)
    base = rng.lognormal(0, 1, (1, 3, 48))
    walk = np.exp(np.cumsum(rng.normal(0, 0.12, (32, 3, 48)), axis=0))
    load = rng.poisson(base * walk * 400).astype(np.float64)
    cold = Problem.of(load[:16], 28, 2, window=8)
    return cold, Problem.of(load, 28, 2, window=8).with_prior(solve(cold).placement)


@pytest.mark.parametrize("seed", range(3))
def test_a_cap_on_moves_holds_where_pairs_are_made_anew(seed: int) -> None:
    _, warm = _drifted(seed)
    free = solve(warm)
    assert free.moves_of_layer.max() > 4
    capped = solve(Problem.of(warm.load, 28, 2, window=8, max_moves=4).with_prior(warm.prior))
    assert capped.moves_of_layer.max() <= 4


def test_making_pairs_anew_beats_single_changes() -> None:
    from controller.solver import pairing
    from controller.solver.methods.eplane import prepare

    gains = []
    for seed in range(3):
        _, warm = _drifted(seed)
        search, _, _ = prepare(warm)
        assert warm.prior is not None
        search.start(warm.prior.reshape(search.tables.shape))
        search.run()
        for layer in range(warm.layers):
            before = search.price_of(layer)
            if pairing.fit(search, layer):
                assert search.price_of(layer) < before
            gains.append(before - search.price_of(layer))
    assert sum(gain > 0 for gain in gains) >= 2


def test_pairing_is_for_ranks_alike_and_free_experts() -> None:
    from controller.solver import pairing
    from controller.solver.methods.eplane import prepare

    load = np.random.default_rng(0).poisson(50, (8, 1, 6)).astype(np.float64)

    def one(**fields: object) -> bool:
        slots = fields.pop("slots", 2)
        return pairing.paired(prepare(Problem.of(load, 4, slots, **fields))[0], 0)

    assert one()
    assert not one(slots=3)
    assert not one(slots=[2, 2, 1, 2])
    assert not one(capacity=[1.0, 1.0, 0.5, 1.0])
    assert not one(pinned=[[0, 1, 2]])
    assert not one(slot_budget=1)
    assert not one(spread=2, nodes=2, min_replicas=1)
