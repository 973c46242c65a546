"""What every policy must do, whatever its method."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.solver import Answer, Problem, policies, solve, validate
from controller.solver.measure import copies_of, held
from eplane.errors import AnswerError, ProblemError

NAMES = sorted(policies())
STEADY = [name for name in NAMES if name not in ("swift", "omni", "omni-swap")]


def load(seed: int, layers: int = 3, experts: int = 12, windows: int = 8) -> np.ndarray:
    rng = np.random.default_rng(seed)
    base = np.exp(rng.normal(0, 1, (layers, experts))) * 500
    return rng.poisson(base * np.exp(rng.normal(0, 0.2, (windows, layers, experts)))).astype(np.float64)


SHAPES: dict[str, dict[str, Any]] = {
    "even": {"ranks": 4, "slots_per_rank": 4, "nodes": 2},
    "no spare": {"ranks": 4, "slots_per_rank": 3},
    "one slot": {"ranks": 16, "slots_per_rank": 1, "nodes": 4},
    "uneven slots": {"ranks": 5, "slots_per_rank": [5, 3, 2, 2, 4], "node_of_rank": [0, 0, 1, 1, 2]},
    "slots by layer": {"ranks": 4, "slots_per_rank": [[4, 4, 4, 4], [3, 3, 3, 3], [5, 4, 3, 3]]},
    "single rank": {"ranks": 1, "slots_per_rank": 12},
    "more slots than can be used": {"ranks": 2, "slots_per_rank": 20},
    "drained": {"ranks": 4, "slots_per_rank": 5, "drained": [2]},
    "capacity zero": {"ranks": 4, "slots_per_rank": 5, "capacity": [1, 1, 0, 0.5]},
    "pinned": {
        "ranks": 4,
        "slots_per_rank": 4,
        "pinned": [{"expert": 5, "rank": 3}, {"layer": 1, "expert": 0, "rank": 3}],
    },
    "min replicas": {"ranks": 4, "slots_per_rank": 6, "min_replicas": 2, "spread": 2, "nodes": 2},
    "max replicas": {"ranks": 4, "slots_per_rank": 4, "max_replicas": 1},
    "spread": {"ranks": 6, "slots_per_rank": 3, "nodes": 3, "spread": True},
    "groups at home": {"ranks": 4, "slots_per_rank": 4, "nodes": 2, "groups": 4, "strategy": "hierarchical"},
    "budget": {"ranks": 4, "slots_per_rank": 5, "slot_budget": 4},
    "fixed slots": {"ranks": 4, "slots_per_rank": 4, "fixed_slots": True},
}


def problem(shape: str, policy: str, seed: int = 0) -> Problem:
    return Problem.from_dict({"loads": load(seed), "policy": policy, **SHAPES[shape]})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_meet_every_goal_cold_and_warm(name: str, shape: str) -> None:
    cold = solve(problem(shape, name))
    assert cold.moves == 0, "a cold start moves nothing"
    warm_problem = problem(shape, name, seed=1).with_prior(cold.placement)
    warm = solve(warm_problem)
    for answer in (cold, warm):
        assert answer.policy == name
        assert answer.decisions
        assert (copies_of(answer.placement, 12) >= 1).all()
        assert (held(answer.placement, warm_problem.ranks, 12) <= 1).all()
        assert np.isfinite(answer.balancedness).all()
        assert (answer.balancedness <= answer.bound + 1e-9).all(), "no placement beats the proved bound"
        assert np.allclose(
            answer.rank_load.sum(axis=1), answer.rank_load.sum(axis=1)[0] * 0 + answer.rank_load.sum(axis=1)
        )
    fresh = held(warm.placement, warm_problem.ranks, 12) > held(cold.placement, warm_problem.ranks, 12)
    assert warm.moves == fresh.sum() == warm.moves_of_layer.sum()
    assert warm.bytes_moved == warm.moves * warm_problem.bundle_bytes


@pytest.mark.parametrize("shape", ["even", "uneven slots", "one slot", "groups at home"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_problem_gives_the_same_answer(name: str, shape: str) -> None:
    first, second = solve(problem(shape, name)), solve(problem(shape, name))
    assert (first.placement == second.placement).all()
    assert (first.shares == second.shares).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", STEADY)
def test_solving_again_from_the_answer_moves_nothing(name: str, shape: str) -> None:
    start = problem(shape, name)
    cold = solve(start)
    assert solve(start.with_prior(cold.placement)).moves == 0
    warm = solve(problem(shape, name, seed=2).with_prior(cold.placement))
    assert solve(problem(shape, name, seed=2).with_prior(warm.placement)).moves == 0


@pytest.mark.parametrize("name", NAMES)
def test_zero_load_and_one_hot_expert(name: str) -> None:
    zero = solve(Problem.of(np.zeros((2, 6)), 3, 3, policy=name))
    assert zero.balancedness.tolist() == [1.0, 1.0]
    one = np.zeros((1, 6))
    one[0, 4] = 900
    hot = solve(Problem.of(one, 3, 3, policy=name))
    assert np.isfinite(hot.rank_load).all()
    if name not in ("static",):
        assert hot.rank_load.max() == pytest.approx(300), "one expert hotter than a rank is shared by all ranks"


@pytest.mark.parametrize("name", NAMES)
def test_a_prior_with_faults_is_mended(name: str) -> None:
    """Two copies on a rank and an expert without any, as an engine may report after losing a rank."""
    prior = [[0, 0, 1, 1, 2, 3, 4, 4, 2]]
    answer = solve(Problem.of([[9, 8, 7, 6, 5, 4]], 3, 3, prior=prior, policy=name))
    assert (copies_of(answer.placement, 6) >= 1).all()
    assert answer.moves >= 1


def test_static_moves_only_what_a_goal_asks_for() -> None:
    start = problem("even", "static")
    cold = solve(start)
    assert solve(problem("even", "static", seed=9).with_prior(cold.placement)).moves == 0
    prior = solve(Problem.from_dict({"loads": load(0), "policy": "static", "ranks": 4, "slots_per_rank": 5})).placement
    drained = Problem.from_dict({"loads": load(0), "policy": "static", **SHAPES["drained"]}).with_prior(prior)
    answer = solve(drained)
    assert (answer.placement.reshape(3, 4, 5)[:, 2] == -1).all(), "a drained rank holds nothing"
    only = held(prior, 4, 12)[:, 2].astype(bool) & (held(prior, 4, 12).sum(axis=1) == 1)
    assert answer.moves == only.sum(), "only the experts that lived there alone must move"


def test_eplb_gives_its_published_example() -> None:
    load = [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
    answer = solve(Problem.of(load, 8, 2, nodes=2, groups=4, policy="eplb"))
    assert answer.placement.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert answer.strategy == "hierarchical"
    assert solve(Problem.of(load, 8, 2, nodes=2, groups=3, policy="eplb")).strategy == "global"


def test_eplb_fills_single_slots_in_order() -> None:
    answer = solve(Problem.of([[9, 4, 7, 1]], 6, 1, policy="eplb"))
    assert answer.placement.tolist() == [[0, 1, 2, 3, 0, 2]]


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ProblemError, match="policy: is 'best'"):
        solve(problem("even", "best"))


def broken(change: str) -> tuple[Problem, Answer]:
    p = problem("even", "eplane")
    answer = solve(p)
    table, shares = answer.placement.copy(), answer.shares.copy()
    if change == "lost":
        table[table == 3] = -1
        shares[table == -1] = 0
    elif change == "twice":
        table[0, 1] = table[0, 0]
    elif change == "range":
        table[0, 0] = 12
    elif change == "shape":
        table = table[:, :-1]
    elif change == "sum":
        shares[0, 0] *= 0.5
    elif change == "negative":
        shares[0, 0] = -0.1
    elif change == "nan":
        shares[0, 0] = np.nan
    rest = {f: getattr(answer, f) for f in Answer.__dataclass_fields__ if f not in ("placement", "shares")}
    return p, Answer(placement=table, shares=shares, **rest)


@pytest.mark.parametrize("change", ["lost", "twice", "range", "shape", "sum", "negative", "nan"])
def test_a_broken_answer_does_not_leave(change: str) -> None:
    p, answer = broken(change)
    with pytest.raises(AnswerError):
        validate(p, answer)


@pytest.mark.parametrize(
    ("goal", "change"),
    [
        ("drained", {"drained": [0]}),
        ("pinned", {"pinned": [[0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 3, 0]]}),
        ("min_replicas", {"min_replicas": [2, 2] + [1] * 10}),
        ("max_replicas", {"max_replicas": 1}),
        ("slot_budget", {"slot_budget": 0}),
        ("groups", {"nodes": 2, "groups": 2, "strategy": "hierarchical"}),
        ("spread", {"node_of_rank": [0, 0, 0, 1], "spread": 2}),
    ],
)
def test_each_goal_has_its_guard(goal: str, change: dict[str, Any]) -> None:
    """The linear start breaks each of these goals; validate must see it."""
    raw = {"load": load(0)[0][:1], "ranks": 4, "slots_per_rank": 4}
    prior = [[0, 1, 2, 4, 3, 4, 5, 0, 6, 7, 8, 3, 9, 10, 11, 6]]
    plain = Problem.from_dict({**raw, "policy": "static", "prior": prior})
    answer = solve(plain)
    assert answer.placement.tolist() == prior
    strict = Problem.from_dict({**raw, "nodes": 1, **change} if "node_of_rank" not in change else {**raw, **change})
    with pytest.raises(AnswerError):
        validate(strict, answer)
    validate(strict, solve(strict))


def test_fixed_slots_has_its_guard() -> None:
    p = Problem.of([[1, 1, 1, 1]], 2, 2, prior=[[0, 1, 2, 3]], fixed_slots=True, policy="static")
    moved = solve(Problem.of([[1, 1, 1, 1]], 2, 2, prior=[[1, 0, 2, 3]], policy="static"))
    with pytest.raises(AnswerError, match="changed its place"):
        validate(p, moved)


def test_the_json_form_is_plain_data() -> None:
    import json

    answer = solve(Problem.from_dict({"loads": load(0), "ranks": 4, "slots_per_rank": 4, "hardware": "demo"}))
    raw = json.loads(json.dumps(answer.to_dict()))
    assert {"placement", "shares", "rank_load", "balancedness", "bound", "moves", "bytes_moved"} <= raw.keys()
    assert {"cross_node_share", "predicted_step_us", "policy", "strategy", "decisions", "seconds"} <= raw.keys()
    assert len(raw["decisions"]) == 3
