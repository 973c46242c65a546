"""Reading a problem: every refusal names its field, every impossible goal its name."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from controller.solver import Problem, least_redundant, solve
from controller.solver.problem import ShareMode
from eplane.errors import Infeasible, ProblemError

GOOD: dict[str, Any] = {"load": [[4, 3, 2, 1], [1, 2, 3, 4]], "ranks": 2, "slots_per_rank": 3}


def test_a_plain_problem_is_read() -> None:
    p = Problem.from_dict({**GOOD, "nodes": 2, "shares": "weighted", "prior": [[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 2]]})
    assert (p.layers, p.experts, p.slots, p.nodes, p.per_rank) == (2, 4, 6, 2, 3)
    assert p.shares is ShareMode.WEIGHTED
    assert p.load.shape == (1, 2, 4)
    with pytest.raises(ValueError, match="read-only"):
        p.load[0] = 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"load": None}, "load"),
        ({"load": [[1, 2], [3]]}, "load"),
        ({"load": [1, 2, 3]}, "load"),
        ({"load": []}, "load"),
        ({"load": [[1, -2, 3, 4]]}, "load"),
        ({"load": [[1, float("nan"), 3, 4]]}, "load"),
        ({"load": [[1, "x", 3, 4]]}, "load"),
        ({"load": [[1, True, 3, 4]]}, "load"),
        ({"load": [[1, None, 3, 4]]}, "load"),
        ({"load": [[1, 10**400, 3, 4]]}, "load"),
        ({"load": [[1, 2, 3, 4], np.array([True, False, True, True])]}, "load"),
        ({"loads": [[[1]]]}, "loads"),
        ({"experts": 5}, "experts"),
        ({"ranks": 0}, "ranks"),
        ({"ranks": 2.5}, "ranks"),
        ({"ranks": True}, "ranks"),
        ({"ranks": None}, "ranks"),
        ({"slots_per_rank": 0}, "slots_per_rank"),
        ({"slots_per_rank": [3]}, "slots_per_rank"),
        ({"slots_per_rank": [[3, 3]]}, "slots_per_rank"),
        ({"slots_per_rank": [3, 2.5]}, "slots_per_rank"),
        ({"slots_per_rank": -1}, "slots_per_rank"),
        ({"slots_per_rank": None}, "slots_per_rank"),
        ({"slots_per_rank": float("inf")}, "slots_per_rank"),
        ({"slots_per_rank": float("nan")}, "slots_per_rank"),
        ({"max_replicas": float("inf")}, "max_replicas"),
        ({"node_of_rank": [0, float("inf")]}, "node_of_rank"),
        ({"nodes": 3}, "nodes"),
        ({"node_of_rank": [0]}, "node_of_rank"),
        ({"node_of_rank": [0, -1]}, "node_of_rank"),
        ({"node_of_rank": [0, 1], "nodes": 1}, "nodes"),
        ({"groups": 3}, "groups"),
        ({"drained": [2]}, "drained"),
        ({"drained": [0, 1]}, "drained"),
        ({"drained": "all"}, "drained"),
        ({"capacity": [1]}, "capacity"),
        ({"capacity": [1, -1]}, "capacity"),
        ({"capacity": 0}, "capacity"),
        ({"capacity": 1e40}, "capacity"),
        ({"capacity": [1e-320, 1]}, "capacity"),
        ({"capacity": [1, float("inf")]}, "capacity"),
        ({"capacity": [1, float("nan")]}, "capacity"),
        ({"capacity": [1, True]}, "capacity"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"min_replicas": [1, 2]}, "min_replicas"),
        ({"min_replicas": 2, "max_replicas": 1}, "min_replicas"),
        ({"prior": [[0, 1, 2, 3, 0, 9], [0, 1, 2, 3, 0, 1]]}, "prior"),
        ({"prior": [[0, 1, 2, 3, 0, 1]]}, "prior"),
        ({"prior": [[0, 1], [0, 1]]}, "prior[0]"),
        ({"prior": [[[0, 1, 2]], [[0, 1, 2]]]}, "prior[0]"),
        ({"prior": [[[0, 1, 2], 3]] * 2}, "prior[0]"),
        ({"prior": [[0, [1, 2, 3]]] * 2}, "prior[0]"),
        ({"prior": [[[0, 1, 2], None]] * 2}, "prior[0]"),
        ({"prior": [[[0, 1, 2], [[3, 0], [1, 2]]]] * 2}, "prior[0]"),
        ({"prior": [[[0, 1, 2], [3, 0, 1, 2]]] * 2}, "prior[0]"),
        ({"prior": [[0, 1, 2, 3, True, 1]] * 2}, "prior[0]"),
        ({"prior": [[0, 1, 2, 3, 1e30, 1]] * 2}, "prior"),
        ({"prior": [[0, 1, 2, 3, float("nan"), 1]] * 2}, "prior"),
        ({"prior": [[0, 1, 2, 3, 0.5, 1]] * 2}, "prior"),
        ({"prior": np.full((2, 6), 1e30)}, "prior"),
        ({"in_flight": [{"layer": 0}]}, "in_flight"),
        ({"pinned": [{"expert": 4, "rank": 0}]}, "pinned[0].expert"),
        ({"pinned": [{"expert": 1, "rank": 2}]}, "pinned[0].rank"),
        ({"pinned": [7]}, "pinned[0]"),
        ({"spread": 0}, "spread"),
        ({"spread": 3_000_000_000}, "spread"),
        ({"bundle_bytes": 1e300}, "bundle_bytes"),
        ({"move_weight": 10**400}, "move_weight"),
        ({"shares": "some"}, "shares"),
        ({"policy": 3}, "policy"),
        ({"strategy": "best"}, "strategy"),
        ({"rank_cost": "joules"}, "rank_cost"),
        ({"move_weight": -1}, "move_weight"),
        ({"move_weight": "high"}, "move_weight"),
        ({"max_moves": -1}, "max_moves"),
        ({"fixed_slots": "yes"}, "fixed_slots"),
        ({"window": 2}, "window"),
        ({"horizon_steps": 0}, "horizon_steps"),
        ({"slots": 9}, "slots"),
        ({"x" * 3000: 9}, "x" * 60),
        ({"policy": "x" * 3000}, "policy"),
        ({"capacity": [[1, 1]]}, "capacity"),
    ],
)
def test_a_refusal_names_its_field(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ProblemError) as caught:
        Problem.from_dict({**GOOD, **change})
    assert caught.value.field == field
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith(field)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"load": [[1]], "ranks": 8193}, "ranks: is 8193, must be 1 to 8192"),
        ({"load": None, "experts": 1_000_000}, "experts: is 1000000, must be 1 to 65536"),
        ({"load": None, "experts": 2, "layers": 1_000_000}, "layers: is 1000000, must be 1 to 16384"),
        ({"load": np.zeros((16385, 1))}, "load: has 16385 layers; at most 16384 can be solved"),
        ({"load": np.zeros((1, 65537))}, "load: has 65537 experts; at most 65536 can be solved"),
        (
            {"load": None, "experts": 60_000, "layers": 10_000},
            "experts: makes 10000 layers x 60000 experts, 600000000 in all; at most 4194304 can be solved",
        ),
        (
            {"load": None, "experts": 60_000, "ranks": 8192, "slots_per_rank": 16},
            "ranks: makes 1 layer x 8192 ranks x 60000 experts, 491520000 in all; at most 134217728 can be solved",
        ),
        (
            {"load": None, "experts": 8, "layers": 1000, "ranks": 2, "slots_per_rank": 10_000},
            "slots_per_rank: makes 1000 layers x 2 ranks x 10000 slots, 20000000 in all; at most 16777216 can be solved",
        ),
        ({"slots_per_rank": 1_000_000_000}, "slots_per_rank: has 1000000000 slots for a rank; at most 65536"),
        ({"slots_per_rank": 1e300}, "slots_per_rank: has 1e+300 slots for a rank; at most 65536"),
    ],
)
def test_what_is_too_large_is_refused_before_anything_is_made_for_it(change: dict[str, Any], says: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProblemError) as caught:
            Problem.from_dict({**GOOD, **change})
        assert tracemalloc.get_traced_memory()[1] < 50_000_000
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize(("layers", "ranks"), [(64, 1024), (94, 2048)])
def test_the_largest_models_are_within_the_limits(layers: int, ranks: int) -> None:
    p = Problem.from_dict({"load": None, "experts": 512, "layers": layers, "ranks": ranks, "slots_per_rank": 8})
    assert p.slots == ranks * 8


def test_speeds_at_the_ends_of_their_range_are_solved() -> None:
    p = Problem.of([[9, 4, 4, 2, 2, 1]], 4, 2, capacity=[1e-3, 1, 1e3, 0], prior=[0, 1, 2, 3, 4, 5, 0, 1])
    answer = solve(p)
    assert answer.balancedness[0] > 0
    assert p.drained.tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slots_per_rank": [3]}, "has 1 entry for 2 ranks"),
        ({"min_replicas": [1]}, "has 1 entry for 4 experts"),
        ({"ranks": 1, "nodes": 2}, "is 2, more than the 1 rank"),
        ({"prior": [[[0, 1, 2]]] * 2}, "has 1 rank, 2 needed"),
        ({"prior": [[0]] * 2}, "has 1 slot, 6 needed"),
        ({"load": [1, 2]}, "has 1 dimension; [layers][experts] or [windows][layers][experts] is needed"),
        ({"ranks": 1, "slots_per_rank": 1}, "layer 0 has 1 slot for 4 experts"),
        ({"drained": [1], "slots_per_rank": 4, "min_replicas": 2}, "2 copies of an expert, 1 rank can hold one"),
    ],
)
def test_one_is_told_as_one(change: dict[str, Any], says: str) -> None:
    with pytest.raises((ProblemError, Infeasible)) as caught:
        Problem.from_dict({**GOOD, **change})
    assert str(caught.value).endswith(says)


def test_one_expert_that_must_move_is_told_as_one() -> None:
    p = Problem.of([[1, 1, 1, 1]], 2, 3, prior=[0, 1, 2, 0, 1, 2], policy="static")
    assert solve(p).decisions == ("layer 0: 1 expert moves, a hard goal asks for it",)


@pytest.mark.parametrize(
    ("change", "goal"),
    [
        ({"slots_per_rank": 1}, "capacity"),
        ({"drained": [1]}, "drained"),
        ({"capacity": [1, 0]}, "drained"),
        ({"min_replicas": 3}, "min_replicas"),
        ({"min_replicas": 2}, "min_replicas"),
        ({"slot_budget": 0, "min_replicas": [2, 1, 1, 1]}, "slot_budget"),
        ({"spread": 2, "min_replicas": [2, 1, 1, 1]}, "spread"),
        ({"pinned": [[0, 0, 1], [0, 1, 1], [0, 2, 1], [0, 3, 1]]}, "pinned"),
        ({"pinned": [[0, 0, 1], [0, 0, 0]], "max_replicas": 1}, "max_replicas"),
        ({"slots_per_rank": [4, 2], "drained": [1], "pinned": [[0, 0, 1]]}, "pinned"),
    ],
)
def test_an_impossible_goal_is_named(change: dict[str, Any], goal: str) -> None:
    with pytest.raises(Infeasible) as caught:
        Problem.from_dict({**GOOD, **change})
    assert caught.value.goal == goal
    assert caught.value.exit_code == 3


def test_more_nodes_than_ranks_names_both() -> None:
    with pytest.raises(ProblemError, match=r"nodes: is 4.*2 ranks"):
        Problem.of([[1, 2, 3, 4, 5, 6]], 2, 4, nodes=4)


def test_a_prior_may_be_ragged_or_nested_or_one_list_for_all_layers() -> None:
    load = [[1, 1, 1, 1, 1]] * 2
    ragged = Problem.of(load, 2, [3, 2], prior=[[0, 1, 2, 3, 4]] * 2)
    nested = Problem.of(load, 2, [3, 2], prior=[[[0, 1, 2], [3, 4]]] * 2)
    single = Problem.of(load, 2, [3, 2], prior=[0, 1, 2, 3, 4])
    padded = Problem.of(load, 2, [3, 2], prior=[[0, 1, 2, 3, 4, -1]] * 2)
    for problem in (ragged, nested, single, padded):
        assert problem.prior is not None
        assert problem.prior.tolist() == [[0, 1, 2, 3, 4, -1]] * 2


def test_moves_in_flight_count_as_done() -> None:
    p = Problem.of(
        [[1, 1, 1]],
        2,
        3,
        prior=[[0, 1, 2, -1, -1, -1]],
        in_flight=[{"layer": 0, "expert": 2, "from_rank": 0, "to_rank": 1}],
    )
    assert p.prior is not None
    assert p.prior.tolist() == [[0, 1, -1, 2, -1, -1]]


def test_no_load_needs_the_number_of_experts() -> None:
    p = Problem.from_dict({"load": None, "experts": 8, "layers": 2, "ranks": 4, "slots_per_rank": 3})
    assert p.load.shape == (1, 2, 8)
    assert not p.load.any()


def test_node_names_need_not_be_dense() -> None:
    p = Problem.of([[1, 2, 3]], 3, 1, node_of_rank=[7, 7, 9])
    assert p.node_of_rank.tolist() == [0, 0, 1]


@pytest.mark.parametrize(
    ("experts", "ranks", "spare"), [(255, 4, 1), (96, 5, 4), (60, 7, 3), (12, 12, 0), (5, 9, 4), (100, 16, 12)]
)
def test_fewest_redundant_slots_for_equal_ranks(experts: int, ranks: int, spare: int) -> None:
    assert least_redundant(experts, ranks) == spare
    assert (experts + spare) % ranks == 0


def test_array_and_list_give_the_same_problem() -> None:
    load = np.arange(24.0).reshape(3, 2, 4)
    assert (
        Problem.of(load, 2, 3).load == Problem.from_dict({"loads": load.tolist(), "ranks": 2, "slots_per_rank": 3}).load
    ).all()
