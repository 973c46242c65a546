"""Ranks that differ in speed: a replayed controller gains what the slow rank loses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.decide import Decider
from controller.facts import facts_of
from controller.gate import Estimate, Split, estimate
from controller.limits import Spent
from controller.observe import Seen
from controller.planner import plan_waves
from controller.replay import InlineSolver, Replay
from controller.settings import GroupSettings
from controller.verdict import VerdictKind
from eplane.load import LoadWindow
from eplane.placement import Placement
from eplane.records import EpochPointer
from eplane.topology import Capabilities, ModelShape, World

CAN = Capabilities(weighted_shares=True, free_slot_order=True)
WORLD = World("g", "a" * 16, ("n0",) * 4, ModelShape("m", 1, 8, 2, 10**6), 2, 6, CAN)
# All ranks have 200 tokens; with 6 and 1 exchanged the last has 100 and the first 300.
LOAD = np.array([[150.0, 50.0] * 4])
LEVEL = Placement(np.array([[0, 1, 2, 3, 4, 5, 6, 7]]), 4, 8)
LEANING = Placement(np.array([[0, 6, 2, 3, 4, 5, 1, 7]]), 4, 8)
SPEEDS = np.array([1.0, 1.0, 1.0, 0.5])


def judged(speeds: Any) -> Estimate:
    before, after = (Split(p, p.even_shares()) for p in (LEVEL, LEANING))
    settings = GroupSettings().patched({"hardware": "demo"})
    return estimate(WORLD, LOAD, before, after, plan_waves(LEVEL, LEANING, WORLD), settings, 10**6, None, speeds)


def test_the_gate_weighs_the_time_of_the_slowest_rank() -> None:
    alike, slow = judged(None), judged(SPEEDS)
    # Links take their part of a step too, whatever the speed of a rank.
    assert alike.part == pytest.approx(-0.5, abs=0.02)
    assert not alike.act
    assert alike.balancedness_before == pytest.approx(1.0)
    assert alike.balancedness_after == pytest.approx(200 / 300)
    assert slow.part == pytest.approx(1 - 300 / 400, abs=0.02)
    assert slow.act
    assert slow.balancedness_before == pytest.approx(800 / 3.5 / 400)
    assert slow.balancedness_after == pytest.approx(800 / 3.5 / 300)


def test_a_change_for_a_slow_rank_is_confirmed_and_begun() -> None:
    for confirm, kinds in ((False, ["started"]), (True, ["confirming", "started"])):
        settings = GroupSettings().patched(
            {"confirm": confirm, "min_window_tokens": 10, "solver_budget_ms": 20_000, "hardware": "demo"}
        )
        solver = InlineSolver({"capacity": SPEEDS.tolist()}, SPEEDS)
        replay = Replay(WORLD, settings, LEVEL, 1.0, solver=solver, speeds=SPEEDS)
        for kind in kinds:
            for _ in range(8):
                replay.observe(LOAD * 10, 32)
            cycle = replay.cycle()
            assert cycle.kind is VerdictKind(kind), cycle.sentence


async def test_a_split_is_worth_what_it_does_for_the_slowest_rank() -> None:
    world = World("g", "a" * 16, ("n0", "n0"), ModelShape("m", 1, 3, 2, 10**6), 2, 6, CAN)
    placed, load, speeds = Placement(np.array([[0, 1, 0, 2]]), 2, 3), np.array([[100.0, 50.0, 50.0]]), SPEEDS[2:]
    window = LoadWindow("a" * 16, placed.digest, 0, 32, load, load * 0, True, (0, 1))
    seen = Seen(window, placed.rank_load(load, placed.even_shares()))
    pointer = EpochPointer(1, placed.digest, "a" * 16, 1, "")
    facts = facts_of(GroupSettings(), world, pointer, placed, (seen,), Spent(), speeds=speeds)
    assert facts.balancedness == pytest.approx(200 / 1.5 / 200)
    split = await Decider(InlineSolver(None, speeds)).resplit(facts, placed.even_shares())
    assert split is not None
    assert split[0, 0] == pytest.approx(5 / 6, abs=1e-3)
