"""What answers say is what they do; what a policy can not do it says; odd priors that the repair must cope with."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.solver import Problem, solve

MENDED = "what is placed breaks a hard goal and is mended first"


def answer(**raw: Any):  # type: ignore[no-untyped-def]
    return solve(Problem.from_dict(raw))


def told(decision: str) -> set[tuple[int, int]]:
    """(expert, rank) pairs that a sentence says a rank receives."""
    goes = re.findall(r"expert (\d+) goes from rank \d+ to rank (\d+)", decision)
    gets = re.findall(r"expert (\d+) gets a \w+ copy on rank (\d+)", decision)
    return {(int(e), int(r)) for e, r in goes + gets}


def received(prior: list[int], placement: np.ndarray, per_rank: int) -> set[tuple[int, int]]:
    before = {(e, s // per_rank) for s, e in enumerate(prior) if e >= 0}
    return {(int(e), s // per_rank) for s, e in enumerate(placement) if e >= 0} - before


@pytest.mark.parametrize(
    "raw",
    [
        {"ranks": 2, "load": [[500, 333, 250, 1000]], "prior": [[1, 2, 3, 0]], "pinned": [{"expert": 3, "rank": 0}]},
        {"ranks": 4, "load": [[5] * 5], "prior": [[0, 1, 2, 3, 4, 0, -1, -1]], "drained": [2], "min_tokens": 1000},
        {"ranks": 4, "load": [[50, 40, 30, 20, 10]], "prior": [[0, 1, 2, 3, 4, 0, -1, -1]], "drained": [0]},
    ],
)
def test_a_mended_prior_is_told_and_so_is_what_really_moved(raw: dict[str, Any]) -> None:
    found = answer(slots_per_rank=2, **raw)
    assert MENDED in found.decisions[0]
    assert told(found.decisions[0]) == received(raw["prior"][0], found.placement[0], 2)
    moves = f"{found.moves} move" + ("s" if found.moves != 1 else "")
    assert found.decisions[0].endswith(moves)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_sentences_name_what_ranks_receive(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cold = Problem.of(rng.poisson(60, (1, 8)), 4, 3)
    placed = solve(cold)
    moved = solve(Problem.of(rng.lognormal(4, 1, (1, 8)), 4, 3, move_weight=0.0).with_prior(placed.placement))
    assert not any(MENDED in sentence for sentence in moved.decisions)
    for layer, sentence in enumerate(moved.decisions):
        if "goes from" in sentence or "gets a" in sentence:
            really = received(placed.placement[layer].tolist(), moved.placement[layer], 3)
            assert told(sentence) <= really
            assert len(told(sentence)) == min(3, len(really))


def test_copies_keep_their_places_under_the_plain_greedy_too() -> None:
    raw = {"ranks": 3, "slots_per_rank": 2, "load": [[1, 1, 10000]], "fixed_slots": True, "policy": "eplb"}
    found = answer(**raw, prior=[[0, 1, 2, 0, 2, 1]])
    stay = [(s, e) for s, e in enumerate([0, 1, 2, 0, 2, 1]) if e in found.placement[0, s // 2 * 2 : s // 2 * 2 + 2]]
    assert all(found.placement[0, s] == e for s, e in stay)


def test_copies_that_spread_forbids_do_not_keep_others_out() -> None:
    found = answer(ranks=4, slots_per_rank=2, load=[[1, 1, 1]], spread=2, drained=[1], prior=[[2, 0, 1, 0, 0, 2, 2, 0]])
    assert sorted(set(found.placement[0].tolist()) - {-1}) == [0, 1, 2]


def test_a_policy_says_which_wishes_it_does_not_know() -> None:
    raw = {"ranks": 4, "slots_per_rank": 2, "load": [[9, 8, 7, 6, 5]], "prior": [[0, 1, 2, 3, 4, 0, 1, 2]]}
    assert (
        "eplb does not know max_moves, min_tokens" in answer(**raw, max_moves=0, min_tokens=1, policy="eplb").decisions
    )
    assert not any("does not know" in d for d in answer(**raw, policy="eplb").decisions)
    assert not any("does not know" in d for d in answer(**raw, max_moves=0, policy="eplane").decisions)
    assert not any("does not know" in d for d in answer(**raw, max_moves=0, policy="static").decisions)


def test_flash_moves_nothing_a_second_time_whatever_it_starts_from() -> None:
    raw = {"ranks": 4, "slots_per_rank": 2, "nodes": 2, "drained": [2], "load": [[7, 7, 7]], "policy": "flash"}
    first = answer(**raw, prior=[[1, -1, 0, -1, -1, -1, -1, 2]])
    assert answer(**raw, prior=first.placement.tolist()).moves == 0


def test_weighted_shares_may_beat_pairs_of_even_ones_but_no_bound() -> None:
    found = answer(ranks=2, slots_per_rank=2, load=[[3, 6, 100]], shares="weighted", forecast=False, tight_bound=True)
    assert (found.balancedness <= found.bound + 1e-9).all()
    assert found.balancedness[0] > 0.98
