"""Nodes touched per token: lowered on tokens that the search has not seen, within the slack, under every hard goal."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controller.costs import crossing_part, hardware_named, layer_s, node_price
from controller.gate import Split, estimate
from controller.planner import plan_waves
from controller.settings import GroupSettings
from controller.solver import Answer, Problem, coactivation, solve
from controller.solver.coactivation import LEAST_TUPLES, SURE, solve_near
from controller.solver.compiled import nodes as kernel
from controller.solver.compiled.state import objective
from controller.solver.measure import even_shares, rank_loads
from controller.solver.methods.eplane import EPlanePolicy, prepare
from controller.solver.touched import counts_nodes, fitted, nodes_per_token, touched
from controller.solving import answer_of, decode, encode, read_answer
from eplane.errors import Infeasible, ProblemError
from eplane.placement import Placement
from eplane.topology import ModelShape, World
from tests.solver.test_properties import problems

EXPERTS, RANKS, PLACES, NODES, TOP = 48, 4, 12, 4, 5


def tokens(seed: int, count: int, strength: float = 3.0, experts: int = EXPERTS, top: int = TOP) -> np.ndarray:
    """[count, top] experts of tokens that each have one of six topics, whose experts fire together."""
    model, rng = np.random.default_rng(5), np.random.default_rng(seed)
    likes = model.normal(0, 0.3, experts) + strength * model.normal(0, 1, (6, experts))
    scores = likes[rng.integers(0, 6, count)] + rng.gumbel(size=(count, experts))
    return np.argsort(-scores, axis=1)[:, :top].astype(np.int32)


def problem(sample: Any, strength: float = 3.0, **fields: Any) -> Problem:
    load = np.bincount(tokens(1, 20_000, strength).ravel(), minlength=EXPERTS)[None].astype(float)
    defaults: dict[str, Any] = {"nodes": NODES, "routing_sample": None if sample is None else [sample]}
    return Problem.from_dict({"load": load, "ranks": RANKS, "slots_per_rank": PLACES, **defaults, **fields})


def nodes_of(asked: Problem, answer: Answer, seed: int = 99, strength: float = 3.0) -> float:
    """Nodes touched by fresh tokens."""
    return float(touched(asked, tokens(seed, 5000, strength), answer.placement[0], answer.shares[0]).mean())


def peak(asked: Problem, answer: Answer) -> float:
    return float(rank_loads(asked.observed(), answer.placement, answer.shares, asked.ranks).max())


def same(one: Answer, other: Answer) -> bool:
    return {**one.to_dict(), "seconds": 0} == {**other.to_dict(), "seconds": 0}


def test_from_nothing_unseen_tokens_touch_fewer_nodes_within_the_slack() -> None:
    asked = problem(tokens(2, 1024))
    alone = solve(replace(asked, routing_sample=None))
    near = solve(asked)
    assert nodes_of(asked, near) < 0.85 * nodes_of(asked, alone)
    assert peak(asked, near) <= peak(asked, alone) * (1 + asked.node_slack) * 1.001
    assert near.nodes_per_token is not None
    assert near.nodes_per_token[0] is None
    assert near.nodes_per_token[1] == pytest.approx(nodes_of(asked, near), abs=0.1), "as promised"
    assert "experts that fire together" in near.decisions[0]


def test_near_a_prior_moves_are_priced_and_a_second_solve_moves_nothing() -> None:
    bare = problem(None)
    prior = solve(bare).placement
    asked = problem(tokens(2, 1024)).with_prior(prior)
    costly = replace(asked, move_weight=0.02)
    cheap, dear = solve(asked), solve(costly)
    assert cheap.nodes_per_token is not None
    assert cheap.nodes_per_token[0] is not None
    assert cheap.nodes_per_token[1] < 0.9 * cheap.nodes_per_token[0]
    assert nodes_of(asked, cheap) < 0.9 * nodes_of(asked, solve(bare.with_prior(prior)))
    assert dear.moves < cheap.moves
    assert solve(asked.with_prior(cheap.placement)).moves == 0
    assert solve(costly.with_prior(dear.placement)).moves == 0
    fresh = replace(asked, routing_sample=(tokens(3, 1024),)).with_prior(cheap.placement)
    assert solve(fresh).moves <= cheap.moves / 3, "another sample of the same tokens asks for little"


@pytest.mark.parametrize("slack", [0.0, 0.03])
def test_balance_is_given_up_only_within_the_slack(slack: float) -> None:
    asked = problem(tokens(2, 1024), node_slack=slack, cross_node_weight=100.0)
    alone = solve(replace(asked, routing_sample=None))
    assert peak(asked, solve(asked)) <= peak(asked, alone) * (1 + slack) * 1.001
    wide = solve(replace(asked, node_slack=0.5))
    assert peak(asked, wide) > peak(asked, alone) * (1 + slack), "the slack is what holds it"


def test_without_sample_or_nodes_nothing_changes() -> None:
    bare = problem(None)
    alone = EPlanePolicy().balanced(bare)
    assert same(solve(bare), alone)
    assert alone.nodes_per_token is None
    one = problem(tokens(2, 512), nodes=1)
    assert not counts_nodes(one)
    assert same(solve(one), solve(replace(one, routing_sample=None)))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"cross_node_weight": 0.0}, "cross_node_weight is 0"),
        ({"hardware": "cloudmatrix384"}, "to cloudmatrix384 they cost nothing"),
        ({"routing_sample": [tokens(2, LEAST_TUPLES - 1)]}, "no layer has 64 sampled tuples"),
        ({"strategy": "hierarchical", "groups": 4}, "bound to their nodes"),
    ],
)
def test_where_nodes_do_not_count_the_answer_says_why(fields: dict[str, Any], sentence: str) -> None:
    asked = problem(tokens(2, 512), **fields)
    answer = solve(asked)
    assert (answer.placement == solve(replace(asked, routing_sample=None)).placement).all()
    assert sentence in answer.decisions[-1]


@pytest.mark.parametrize("count", [LEAST_TUPLES, 256])
def test_the_luck_of_a_sample_moves_nothing(count: int) -> None:
    """Tokens whose experts have nothing to do with each other: what the sample shows is chance."""
    for seed in range(4):
        asked = problem(tokens(seed, count, 0.0), strength=0.0, cross_node_weight=1.0)
        prior = solve(replace(asked, routing_sample=None)).placement
        answer = solve(asked.with_prior(prior))
        assert answer.moves == 0
        assert "no exchange surely lowers that" in answer.decisions[0]


def test_other_policies_report_nodes_and_do_not_lower_them() -> None:
    asked = problem(tokens(2, 512), policy="eplb")
    answer = solve(asked)
    assert (answer.placement == solve(replace(asked, routing_sample=None)).placement).all()
    assert answer.nodes_per_token == (None, nodes_per_token(asked, answer.placement, answer.shares))


def test_layers_are_told_apart() -> None:
    """One layer with a sample, one with a short one, one with none, one too quiet to act on."""
    load = np.bincount(tokens(1, 20_000).ravel(), minlength=EXPERTS).astype(float)
    layers = [load, load, load, load / 1e4]
    sample = [tokens(2, 1024), tokens(2, 10), None, tokens(2, 1024)]
    asked = Problem.of([layers], RANKS, PLACES, nodes=NODES, routing_sample=sample, min_tokens=100)
    prior = solve(replace(asked, routing_sample=None)).placement
    answer = solve(asked.with_prior(prior))
    assert answer.moves_of_layer[0] > 0
    assert not answer.moves_of_layer[1:].any()
    assert "10 sampled tuples" in answer.decisions[1]
    assert "0 sampled tuples" in answer.decisions[2]
    assert "low confidence" in answer.decisions[3]


def test_goals_of_moving_hold() -> None:
    prior = solve(problem(None)).placement
    sample = tokens(2, 1024)
    assert solve(problem(sample, prior=prior, max_moves=6)).moves in range(1, 7)
    assert solve(problem(sample, prior=prior, min_improvement=0.2)).moves == 0


@st.composite
def sampled(draw: st.DrawFn) -> dict[str, Any]:
    raw = draw(problems())
    layers, experts = raw["loads"].shape[1:]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    top = int(rng.integers(1, min(experts, 5) + 1))
    count = draw(st.sampled_from([0, 70, 150]))
    raw["routing_sample"] = [(int(rng.integers(99)), count, 3.0, experts, top) for _ in range(layers)]
    raw["cross_node_weight"] = draw(st.sampled_from([None, 3.0]))
    raw["node_slack"] = draw(st.sampled_from([0.0, 0.05, 1.0]))
    raw["min_tokens"] = draw(st.sampled_from([0, 100]))
    return raw


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(sampled())
def test_every_hard_goal_holds_and_a_second_solve_moves_nothing(raw: dict[str, Any]) -> None:
    try:
        sample = [tokens(*about) for about in raw["routing_sample"]]
        asked = Problem.from_dict({**raw, "routing_sample": sample})
        answer = solve(asked)
    except (ProblemError, Infeasible):
        return
    # solve() has checked the hard goals of a placement; limits on moves are not among them.
    alone = solve(replace(asked, routing_sample=None))
    if asked.max_moves is not None and asked.prior is not None:
        assert (answer.moves_of_layer <= np.maximum(asked.max_moves, alone.moves_of_layer)).all()
    elif asked.prior is None or asked.slot_budget is None:
        steady = replace(asked, max_moves=None)
        if solve(replace(steady, routing_sample=None).with_prior(alone.placement)).moves == 0:
            assert solve(steady.with_prior(answer.placement)).moves == 0
    nodes = answer.nodes_per_token
    assert nodes is None or 0 <= nodes[1] <= asked.nodes


@st.composite
def busy(draw: st.DrawFn) -> dict[str, Any]:
    """Problems in which there is much to exchange, and goals that stand in the way."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ranks, experts, layers = draw(st.integers(3, 6)), draw(st.sampled_from([12, 18])), draw(st.integers(1, 2))
    per_rank = -(-experts // ranks) + draw(st.integers(1, 4))
    raw: dict[str, Any] = {
        "loads": rng.integers(50, 200, (3, layers, experts)).astype(float),
        "ranks": ranks,
        "slots_per_rank": per_rank,
        "node_of_rank": (np.arange(ranks) * draw(st.integers(2, 3)) // ranks).tolist(),
        "routing_sample": [(int(rng.integers(99)), 600, 4.0, experts, 3) for _ in range(layers)],
        "cross_node_weight": 3.0,
        "node_slack": draw(st.sampled_from([0.05, 0.3])),
        "move_weight": draw(st.sampled_from([None, 0.0])),
    }
    if draw(st.booleans()):
        raw["prior"] = np.stack(
            [rng.permutation(np.arange(ranks * per_rank) % (experts + 1)) - 1 for _ in range(layers)]
        )
    if draw(st.booleans()):
        raw["pinned"] = [{"expert": int(e), "rank": int(e) % ranks} for e in rng.permutation(experts)[:6]]
    goal = draw(
        st.sampled_from(["none", "spread", "slot_budget", "max_replicas", "max_moves", "fixed_slots", "drained"])
    )
    values = {"spread": 2, "slot_budget": layers * ranks // 2, "max_replicas": 2, "max_moves": 3, "fixed_slots": True}
    if goal in values:
        raw[goal] = values[goal]
    elif goal == "drained" and per_rank * (ranks - 1) >= experts:
        raw["drained"] = [int(rng.integers(ranks))]
    return raw


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(busy())
def test_goals_hold_where_there_is_much_to_exchange(raw: dict[str, Any]) -> None:
    test_every_hard_goal_holds_and_a_second_solve_moves_nothing.hypothesis.inner_test(raw)  # type: ignore[attr-defined]


def test_what_an_exchange_saves_is_what_it_saves() -> None:
    """Single exchanges, of experts that fire together as well, against measuring before and after."""
    asked = problem(tokens(2, 400), slots_per_rank=15)
    search, _, _ = prepare(asked)
    table = solve(replace(asked, routing_sample=None)).placement.reshape(RANKS, 15)
    search.begin(0, table)
    ids = tokens(2, 400)
    held = kernel.tokens_of(ids, EXPERTS, NODES, asked.slots)
    before = kernel.setup_tokens(search.state, held)
    rng = np.random.default_rng(0)
    together = 0
    for _ in range(200):
        one, other = rng.permutation(RANKS)[:2].tolist()
        k, j = rng.integers(0, 15, 2).tolist()
        a, b = int(table[one, k]), int(table[other, j])
        if a in table[other] or b in table[one]:
            continue
        changed = table.copy()
        changed[one, k], changed[other, j] = b, a
        flat = changed.reshape(1, -1)
        after = touched(asked, ids, flat[0], even_shares(flat, EXPERTS)[0])
        mean, _ = kernel.fewer(search.state, held, a, one, b, other)
        assert mean == pytest.approx(before - after.mean(), abs=1e-9)
        together += int(((ids == a).any(axis=1) & (ids == b).any(axis=1)).any())
    assert together > 10


def test_a_gain_counts_as_far_as_it_is_sure() -> None:
    asked = problem(tokens(2, 100, 1.0), 1.0)
    table = solve(replace(asked, routing_sample=None)).placement.reshape(RANKS, PLACES)
    taken = []
    for sure in (0.0, SURE, 4.0):
        search, _, _ = prepare(asked)
        rules = search.begin(0, table)
        held = kernel.tokens_of(tokens(2, 100, 1.0), EXPERTS, NODES, asked.slots)
        kernel.setup_tokens(search.state, held)
        goal = kernel.Goal(0.1, 2.0, sure)
        pick = np.zeros((3, 4), dtype=np.int64)
        taken.append(kernel.lower(search.state, rules, held, goal, 1 << 40, 1000, pick)[0])
    assert taken[0] > 2 * taken[1] > 0
    assert taken[2] == 0


def test_a_present_placement_beyond_the_slack_may_not_stay() -> None:
    """All experts of a topic on one rank: fewest nodes, worst balance. However dear nodes are, the slack decides."""
    asked = problem(tokens(2, 1024), node_slack=0.02, cross_node_weight=100.0)
    heavy = np.argsort(-asked.observed()[0]).astype(np.int32)[None]
    answer = solve(asked.with_prior(heavy))
    alone = solve(replace(asked, routing_sample=None).with_prior(heavy))
    assert peak(asked, answer) <= peak(asked, alone) * 1.02 * 1.001


def test_a_layer_keeps_no_slots_that_balance_gives_to_another() -> None:
    """Two redundant slots in all: they must leave the mild layer, whose present placement would be the better one."""
    mild, steep = np.full(12, 10.0), np.full(12, 100.0)
    mild[0], steep[:2] = 30.0, 9000.0
    prior = np.full((2, 4, 4), -1)
    prior[:, :, :3] = np.arange(12).reshape(4, 3)
    prior[0, 1:3, 3] = 0
    sample = [tokens(4, 400, 3.0, 12, 3)] * 2
    fields: dict[str, Any] = {"cross_node_weight": 1e-4, "move_weight": 0.0, "max_moves": 8, "slot_budget": 2}
    asked = Problem.of([[mild, steep]], 4, 4, nodes=2, prior=prior.reshape(2, -1), routing_sample=sample, **fields)
    assert ((solve(asked).placement >= 0).sum(axis=1) == [12, 14]).all()


def test_any_time_is_enough_and_more_is_not_worse() -> None:
    asked = problem(tokens(2, 1024), prior=solve(problem(None)).placement)
    full = solve(asked)
    none, much = solve(replace(asked, budget_ms=0.0)), solve(replace(asked, budget_ms=60_000.0))
    assert none.moves == 0
    assert "time ran out" in none.decisions[-1]
    assert (much.placement == full.placement).all()
    assert much.nodes_per_token is not None
    assert none.nodes_per_token is not None
    assert much.nodes_per_token[1] < none.nodes_per_token[1]


def test_time_may_end_between_any_two_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(tokens(2, 1024), prior=solve(problem(None)).placement, budget_ms=1e9)
    monkeypatch.setattr(coactivation, "STEPS_A_CALL", 1)
    values = []
    for checks in (0, 4, 8, 16, 10_000):
        left = iter([False] * checks)
        monkeypatch.setattr(coactivation, "over", lambda _, left=left: next(left, True))
        answer = solve(asked)
        assert answer.nodes_per_token is not None
        values.append(answer.nodes_per_token[1])
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 3, "each check ends it a little later"


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        ("x", "must be a list with the tuples of each layer"),
        (3, "must be a list with the tuples of each layer"),
        ([[], []], "2 layers given, 1 needed"),
        ([7], "layer 0 must be a list of tuples"),
        ([[[0, 1], 3]], "layer 0, row 1 must be a list of expert ids"),
        ([[[0, 1], [2]]], "layer 0, row 1 has 1 id, the rows before it 2; pad with -1"),
        ([[[0, 1], [2, "a"]]], "layer 0, row 1: 'a' is no expert id"),
        ([[[0, 1], [2, None]]], "layer 0, row 1: None is no expert id"),
        ([[[0, True]]], "layer 0, row 0: True is no expert id"),
        ([[[0, 1], [2, 48]]], "layer 0, row 1: id 48 out of range (0..47, -1 = none)"),
        ([[[0, -2]]], "layer 0, row 0: id -2 out of range"),
        ([[[0, 1.5]]], "layer 0, row 0: id 1.5 out of range"),
        ([[[0, float("nan")]]], "layer 0, row 0: id nan out of range"),
        ([[[0, 10**30]]], "layer 0 is no table"),
        ([np.zeros((2, 2, 2), dtype=np.int32)], "layer 0 is no table"),
        ([[[5, 3, 5]]], "layer 0, row 0: names expert 5 twice"),
    ],
)
def test_bad_samples_are_refused_by_name(sample: Any, reason: str) -> None:
    with pytest.raises(ProblemError) as refused:
        Problem.of(np.ones((1, EXPERTS)), RANKS, PLACES, routing_sample=sample)
    assert refused.value.field == "routing_sample"
    assert reason in str(refused.value)


def test_samples_in_every_form() -> None:
    def read(sample: Any) -> list[list[list[int]]]:
        asked = Problem.of(np.ones((2, EXPERTS)), RANKS, PLACES, routing_sample=sample)
        return [ids.tolist() for ids in asked.routing_sample or ()]

    assert read([[[0, 1], [2, -1]], None]) == [[[0, 1], [2, -1]], []]
    padded = np.array([[[0, 1], [2, -1]], [[-1, -1], [-1, -1]]], dtype=np.int32)
    assert read(padded) == [[[0, 1], [2, -1]], []], "rows of -1 alone are no tuples"
    assert read(None) == []
    for name, value in (("cross_node_weight", -1), ("node_slack", -0.1), ("node_slack", "x")):
        with pytest.raises(ProblemError) as refused:
            Problem.of(np.ones((1, EXPERTS)), RANKS, PLACES, **{name: value})
        assert refused.value.field == name


def test_expected_nodes_are_those_of_every_choice_of_replicas() -> None:
    """By hand: each expert of a token picks one of its copies by the shares; count the nodes of every combination."""
    rng = np.random.default_rng(3)
    asked = Problem.of(np.ones((1, 5)), 4, 3, node_of_rank=[0, 0, 1, 2], routing_sample=[[[0, 1, 2]]])
    placement = np.array([[0, 1, -1, 2, 0, 3, 4, 1, 0, 2, 3, 1]])
    shares = rng.random((1, 12)) * (placement >= 0)
    for expert in range(5):
        shares[placement == expert] /= shares[placement == expert].sum()
    node = asked.node_of_rank[asked.rank_of_slot()]
    for ids in ([0, 1, 2], [0, 3, -1], [4, -1, -1], [1, 2, 3]):
        experts = [e for e in ids if e >= 0]
        total = 0.0
        for slots in itertools.product(*(np.flatnonzero(placement[0] == e) for e in experts)):
            total += np.prod(shares[0][list(slots)]) * len({int(node[s]) for s in slots})
        found = touched(asked, np.array([ids]), placement[0], shares[0])
        assert found[0] == pytest.approx(total)


def test_small_cases_come_near_the_best_there_is() -> None:
    """All ways to lay 8 experts on 4 nodes of two places, with equal loads: nothing but nodes decides."""
    for seed in range(3):
        ids = tokens(seed, 2000, 3.0, 8, 3)
        asked = Problem.of(np.ones((1, 8)), 4, 2, nodes=4, routing_sample=[ids], cross_node_weight=10.0)
        answer = solve(asked)
        seen = replace(asked, routing_sample=(fitted(ids),))
        values = []
        for order in itertools.permutations(range(1, 8)):
            pairs = np.array([0, *order]).reshape(4, 2)
            if (pairs[:, 0] < pairs[:, 1]).all() and (np.diff(pairs[:, 0]) > 0).all():
                values.append(touched(seen, fitted(ids), pairs.ravel(), np.ones(8)).mean())
        assert len(values) == 105
        found = touched(seen, fitted(ids), answer.placement[0], answer.shares[0]).mean()
        assert min(values) - 1e-9 <= found
        spread = float(np.mean(values)) - min(values)
        assert found <= min(values) + 0.25 * spread


def test_what_is_kept_while_exchanging_is_what_a_fresh_start_finds() -> None:
    asked = problem(tokens(2, 600), slots_per_rank=15)
    search, _, _ = prepare(asked)
    table = solve(replace(asked, routing_sample=None)).placement.reshape(RANKS, 15)
    rules = search.begin(0, table)
    assert asked.routing_sample is not None
    state, held = search.state, kernel.tokens_of(asked.routing_sample[0], EXPERTS, NODES, asked.slots)
    before = kernel.setup_tokens(state, held)
    goal = kernel.Goal(0.1, kernel.slowest(state, rules, held) * 1.05, SURE)
    taken, _, settled = kernel.lower(state, rules, held, goal, 1 << 40, 1000, np.zeros((3, 4), dtype=np.int64))
    pull, part, value = held.pull.copy(), held.part.copy(), objective(state, rules)
    after = kernel.setup_tokens(state, held)
    assert taken > 5
    assert settled
    assert after < before
    assert np.allclose(pull, held.pull)
    assert np.allclose(part, held.part)
    search.begin(0, state.table.copy())
    assert objective(search.state, rules) == pytest.approx(value, rel=1e-4)
    flat = state.table.reshape(1, -1)
    ids = asked.routing_sample[0]
    assert after == pytest.approx(touched(asked, ids, flat[0], even_shares(flat, EXPERTS)[0]).mean())


def test_the_solvers_process_carries_samples_and_nodes() -> None:
    asked = {
        "load": np.bincount(tokens(1, 20_000).ravel(), minlength=EXPERTS)[None].astype(float),
        "ranks": RANKS,
        "nodes": NODES,
        "slots_per_rank": PLACES,
        "routing_sample": tokens(2, 256)[None],
    }
    frame = encode(answer_of(asked))
    head = int.from_bytes(frame[:4], "big")
    answer = read_answer(decode(frame[8 : 8 + head], frame[8 + head :]))
    assert answer.nodes_per_token == solve(Problem.from_dict(asked)).nodes_per_token
    assert solve_near(Problem.from_dict(asked), EPlanePolicy().balanced).nodes_per_token == answer.nodes_per_token


def test_hardware_that_sends_a_token_once_to_each_node_is_faster_with_fewer_nodes() -> None:
    asked = problem(tokens(2, 1024), hardware="h800-prefill")
    alone, near = solve(replace(asked, routing_sample=None)), solve(asked)
    times = {}
    for name in ("h800", "h800-prefill"):
        hardware = hardware_named(name)
        for answer in (alone, near):
            layer = layer_s(asked, asked.observed(), answer.placement, answer.shares, hardware)
            times[name, answer is near] = float(layer[0])
    assert times["h800-prefill", True] < 0.95 * times["h800-prefill", False]
    assert times["h800", True] >= times["h800", False], "where each copy travels by itself only balance counts"
    assert node_price(asked, hardware_named("h800")) == 0
    assert node_price(asked, hardware_named("h800-prefill")) > 0.1
    assert node_price(replace(asked, routing_sample=None), hardware_named("h800-prefill")) == 0


def test_tokens_on_as_many_nodes_as_experts_cost_what_single_copies_do() -> None:
    """One expert a node: nothing is handed on inside, so once a node is once a copy; without a sample nothing is known."""
    ids = np.tile(np.arange(4), (100, 1))
    asked = Problem.of(np.ones((1, 4)), 4, 1, nodes=4, routing_sample=[ids], hardware="h800-prefill")
    answer, hardware = solve(asked), hardware_named("h800-prefill")
    load, place, shares = asked.observed(), answer.placement, answer.shares
    plain = layer_s(replace(asked, routing_sample=None), load, place, shares, hardware)
    assert layer_s(asked, load, place, shares, hardware) == pytest.approx(plain)
    assert crossing_part(asked, place, shares, hardware) == pytest.approx([1.0])
    pairs = Problem.of(np.ones((1, 4)), 2, 2, nodes=2, routing_sample=[ids])
    assert crossing_part(pairs, np.array([[0, 1, 2, 3]]), np.ones((1, 4)), hardware) == pytest.approx([0.5])


def test_the_gate_counts_nodes_where_they_cost_time() -> None:
    """A change that balance alone would refuse pays by the nodes it saves, on the hardware where it does."""
    asked = problem(tokens(2, 1024), cross_node_weight=0.3)
    prior = solve(replace(asked, routing_sample=None))
    near = solve(asked.with_prior(prior.placement))
    world = World(
        "g", "a" * 16, tuple(f"n{n}" for n in asked.node_of_rank), ModelShape("m", 1, EXPERTS, TOP, 10**6), 12, 14
    )
    before = Split(Placement(prior.placement, RANKS, EXPERTS), prior.shares)
    after = Split(Placement(near.placement, RANKS, EXPERTS), near.shares)
    waves = plan_waves(before.placement, after.placement, world)
    found = {
        name: estimate(
            world, asked.observed(), before, after, waves, GroupSettings(hardware=name), None, tokens(7, 512)[None]
        )
        for name in ("h800", "h800-prefill")
    }
    assert found["h800-prefill"].act
    assert found["h800-prefill"].part > 0.05
    assert not found["h800"].act
