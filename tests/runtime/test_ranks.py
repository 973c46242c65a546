"""Several ranks: the same logits as one rank and as plain `transformers`, whatever the placement; counts are true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from eplane.placement import Placement
from runtime.attention import Span
from runtime.checkpoint import model_dir
from tests.runtime.checkpoints import EXPERTS, KINDS, LAYERS, plain_logits
from tests.runtime.local import local_rank, random_placement
from tests.runtime.rankworker import Case, Outcome, run_world

Get = Callable[[str], Path]
COUNT = 70
CUTS = [16, 50, 51, 52, 70, 70]  # The last step has no tokens anywhere: a tick.
CASES_A_KIND = 3
SHIPPED_EXPERTS, SHIPPED_LAYERS = 32, 8


def _tokens(rank: int) -> list[int]:
    """Rank 1 has nothing to do and only joins."""
    return [] if rank == 1 else [int(t) for t in np.random.default_rng(rank).integers(0, 256, COUNT)]


def _cases(checkpoint: Get, ranks: int, slots: int) -> list[Case]:
    tokens = [_tokens(rank) for rank in range(ranks)]
    cases = []
    for number, kind in enumerate(KINDS):
        folder = str(checkpoint(kind))
        first = 10 * number
        cases += [
            Case(folder, first, slots, tokens, CUTS),
            Case(folder, first + 1, slots + 1, tokens, CUTS, fused_bytes=0),
            Case(folder, first + 2, slots, tokens, CUTS, deterministic=False),
        ]
    shipped = str(model_dir("tiny"))
    return [*cases, Case(shipped, 90, SHIPPED_EXPERTS // ranks + 2, tokens, CUTS)]


@pytest.fixture(scope="module", params=[(2, 5), (4, 3)], ids=["2-ranks", "4-ranks"])
def world(request: pytest.FixtureRequest, checkpoint: Get) -> tuple[list[Case], list[list[Outcome]]]:
    ranks, slots = request.param
    cases = _cases(checkpoint, ranks, slots)
    broken = Case(cases[0].folder, 0, slots, cases[0].tokens, CUTS, seed_of_last_rank=77)
    return [*cases, broken], run_world(ranks, [*cases, broken])


World = tuple[list[Case], list[list[Outcome]]]


def _logits(outcome: Outcome) -> torch.Tensor:
    return torch.frombuffer(bytearray(outcome.logits), dtype=torch.float32).view(COUNT, -1)


def _placement(case: Case, ranks: int, layers: int, experts: int) -> Placement:
    return random_placement(case.seed, layers, experts, ranks, case.slots)


def test_logits_equal_plain_transformers_and_bits_equal_one_rank(world: World, checkpoint: Get) -> None:
    cases, outcomes = world
    for folder in (*map(checkpoint, KINDS), model_dir("tiny")):
        shipped = folder == model_dir("tiny")
        alone = local_rank(folder, 99, slots=SHIPPED_EXPERTS if shipped else EXPERTS)
        for rank in (r for r, tokens in enumerate(cases[0].tokens) if tokens):
            tokens = cases[0].tokens[rank]
            plain = plain_logits(folder, tokens)
            exact = alone.logits(rank, [(tokens, Span(0, COUNT, (1, 2)))])
            seen = 0
            for case, row in zip(cases[:-1], outcomes[:-1], strict=True):
                if case.folder == str(folder):
                    assert row[rank].error == ""
                    assert float((_logits(row[rank]) - plain).abs().max()) < 1e-4
                    assert torch.equal(_logits(row[rank]), exact) or not case.deterministic
                    seen += 1
            assert seen == (1 if shipped else CASES_A_KIND)


def test_what_arrived_at_the_slots_is_what_was_routed_to_their_experts(world: World) -> None:
    cases, outcomes = world
    for case, row in zip(cases[:-1], outcomes[:-1], strict=True):
        routed = np.array([o.routed for o in row]).sum(axis=0)
        placement = _placement(case, len(row), *routed.shape)
        arrived = np.concatenate([np.array(o.arrived) for o in row], axis=2)  # [2, L, P]
        per_expert = np.zeros_like(routed)
        layer, slot = np.nonzero(placement.p2l >= 0)
        np.add.at(per_expert, (layer, placement.p2l[layer, slot]), arrived.sum(axis=0)[layer, slot])
        assert (per_expert == routed).all()
        assert (arrived.sum(axis=0)[placement.p2l < 0] == 0).all()
        busy = sum(bool(t) for t in case.tokens)
        top_k = 4 if routed.shape[1] == SHIPPED_EXPERTS else 2
        assert arrived[0].sum() == CUTS[0] * busy * top_k * routed.shape[0]  # The first step is prompt,
        assert arrived[1].sum() == (COUNT - CUTS[0]) * busy * top_k * routed.shape[0]  # the others decode.


def test_a_tick_is_one_exchange_and_small_steps_spare_one_a_layer(world: World) -> None:
    cases, outcomes = world
    for case, row in zip(cases[:-1], outcomes[:-1], strict=True):
        layers = len(row[0].routed)
        assert layers in (LAYERS, LAYERS - 1, SHIPPED_LAYERS)
        a_step = 3 * layers if case.fused_bytes == 0 else 3 + 2 * (layers - 1)
        for outcome in row:
            assert outcome.exchanges == [a_step] * (len(CUTS) - 1) + [1]


def test_a_rank_with_another_placement_ends_the_world_before_any_row_is_used(world: World) -> None:
    _, outcomes = world
    for outcome in outcomes[-1]:
        assert "serves placement" in outcome.error
        assert outcome.logits == b""
        assert np.array(outcome.arrived).sum() == 0
