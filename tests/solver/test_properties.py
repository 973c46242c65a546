"""Random shapes, loads, goals and priors: an answer is legal, or the problem is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.solver import Problem, solve
from controller.solver.measure import balance, copies_of, held, rank_loads
from controller.solver.shares import level, multiplicities
from eplane.errors import Infeasible, ProblemError

KINDS = ("zeros", "equal", "hot", "huge", "zipf", "noise")


def loads(kind: str, rng: np.random.Generator, shape: tuple[int, int, int]) -> np.ndarray:
    if kind == "zeros":
        return np.zeros(shape)
    if kind == "equal":
        return np.full(shape, 7.0)
    if kind == "hot":
        out = np.zeros(shape)
        out[..., 0] = 1000
        return out
    if kind == "huge":
        return rng.random(shape) * 1e17
    if kind == "zipf":
        return np.floor(1e4 / np.arange(1, shape[2] + 1) ** 1.2) * np.ones(shape)
    return rng.integers(0, 50, shape).astype(np.float64)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, experts, layers = draw(st.integers(1, 7)), draw(st.integers(1, 14)), draw(st.integers(1, 2))
    per_rank = -(-experts // ranks) + draw(st.integers(0, 3))
    nodes = draw(st.integers(1, ranks))
    shape = (draw(st.integers(1, 5)), layers, experts)
    raw: dict[str, Any] = {
        "loads": loads(draw(st.sampled_from(KINDS)), rng, shape),
        "ranks": ranks,
        "slots_per_rank": draw(st.sampled_from([per_rank, (per_rank + rng.integers(-1, 2, ranks)).clip(1).tolist()])),
        "node_of_rank": (np.arange(ranks) * nodes // ranks).tolist(),
        "shares": draw(st.sampled_from(["equal", "weighted"])),
        "move_weight": draw(st.sampled_from([None, 0.0, 0.01])),
    }
    if draw(st.booleans()):
        raw["prior"] = rng.integers(-1, experts, (layers, ranks * int(np.max(raw["slots_per_rank"]))))
    if draw(st.booleans()):
        raw["drained"] = [int(rng.integers(ranks))]
    if draw(st.booleans()):
        raw["capacity"] = rng.choice([0.25, 0.5, 1.0], ranks).tolist()
    if draw(st.booleans()):
        raw["pinned"] = [{"expert": int(rng.integers(experts)), "rank": int(rng.integers(ranks))}]
    if draw(st.booleans()):
        raw["min_replicas"] = rng.integers(1, 3, experts).tolist()
    if draw(st.booleans()):
        raw["max_replicas"] = int(rng.integers(1, 4))
    if draw(st.booleans()):
        raw["spread"] = int(rng.integers(1, 4))
    if draw(st.booleans()):
        raw["slot_budget"] = int(rng.integers(0, experts * layers + 1))
    if draw(st.booleans()):
        raw["max_moves"] = int(rng.integers(0, 5))
    if draw(st.booleans()):
        raw["fixed_slots"] = True
    if experts % 2 == 0 and draw(st.booleans()):
        raw |= {"groups": 2, "strategy": "hierarchical"}
    return raw


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_any_problem_gets_a_legal_answer_or_a_named_refusal(raw: dict[str, Any]) -> None:
    try:
        problem = Problem.from_dict(raw)
        answer = solve(problem)
    except (ProblemError, Infeasible):
        return
    # solve() has validated the answer; what follows is what its numbers mean.
    assert answer.placement.shape == (problem.layers, problem.slots)
    assert np.isfinite(answer.rank_load).all()
    assert (answer.balancedness <= answer.bound * (1 + 1e-9)).all()
    assert np.allclose(answer.rank_load.sum(axis=1), problem.observed().sum(axis=1))
    assert 0 <= answer.cross_node_share <= 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(2, 12))
def test_solving_again_moves_nothing(seed: int, ranks: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    history = rng.poisson(rng.lognormal(4, 1, (1, 2, experts)) * np.exp(rng.normal(0, 0.3, (6, 2, experts))))
    problem = Problem.of(history, ranks, -(-experts // ranks) + 2, window=3)
    first = solve(problem)
    assert solve(problem.with_prior(first.placement)).moves == 0
    other = rng.permuted(np.tile(np.arange(experts), (2, 1)), axis=1)
    prior = np.full((2, problem.slots), -1)
    prior[:, :experts] = other
    second = solve(problem.with_prior(prior))
    assert solve(problem.with_prior(second.placement)).moves == 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(2, 10))
def test_water_filled_shares_never_lose_and_sum_to_one(seed: int, ranks: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    load = rng.lognormal(3, 1.5, (1, experts))
    problem = Problem.of(
        np.stack([load, load]), ranks, -(-experts // ranks) + 1, capacity=rng.choice([0.5, 1.0], ranks).tolist()
    )
    answer = solve(problem)
    exact = level(answer.placement, load, problem.capacity)
    even, best = (
        balance(rank_loads(load, answer.placement, s, ranks), problem.capacity, problem.drained)[0]
        for s in (answer.shares, exact)
    )
    assert best >= even - 1e-6
    sums = np.bincount(answer.placement[answer.placement >= 0], weights=exact[answer.placement >= 0], minlength=experts)
    assert np.allclose(sums, 1)
    tables = multiplicities(answer.placement, exact, experts, entries=16)
    counts = copies_of(answer.placement, experts)[0]
    for expert, row in enumerate(tables[0]):
        assert (answer.placement[0, row] == expert).all()
        assert len(row) == 16
        assert np.unique(row).size <= counts[expert]


def test_moves_stay_under_the_cap() -> None:
    rng = np.random.default_rng(5)
    first = solve(Problem.of(rng.lognormal(3, 1, (4, 32)), 8, 5))
    later = Problem.of(rng.lognormal(3, 1, (4, 32)), 8, 5, max_moves=3, prior=first.placement)
    capped = solve(later)
    assert 0 < int(capped.moves_of_layer.max()) <= 3
    assert int(held(capped.placement, 8, 32).max()) == 1
    free = solve(Problem.of(later.load, 8, 5, prior=first.placement))
    assert free.moves > capped.moves, "the cap binds here"


def test_more_time_is_never_worse_and_no_time_is_still_legal() -> None:
    rng = np.random.default_rng(6)
    first = solve(Problem.of(rng.lognormal(3, 1, (6, 64)), 8, 10))
    shifted = rng.lognormal(3, 1, (6, 64))
    none = solve(Problem.of(shifted, 8, 10, prior=first.placement, budget_ms=0.0))
    full = solve(Problem.of(shifted, 8, 10, prior=first.placement, budget_ms=60_000.0))
    assert none.moves == 0
    assert any("time ran out" in sentence for sentence in none.decisions)
    assert full.balancedness.mean() > none.balancedness.mean()
