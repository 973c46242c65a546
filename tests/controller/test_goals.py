"""Goals and the gate: each rule says no to what breaks it, in a sentence, and yes to the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controller.costs import hardware_named
from controller.decide import must_move
from controller.gate import Estimate, Split, confirmed, estimate, travel_s
from controller.goals import ALL, HARD, Case, judge
from controller.limits import Spending, Spent, spent
from controller.planner import plan_waves
from controller.settings import GroupSettings
from eplane.placement import Placement
from eplane.plan import Ruling, WavePlan
from eplane.topology import ModelShape, World

BASE = Placement(np.array([[0, 1, 0, 2, 0, 3, 1, 2]]), 4, 4)
TARGET = Placement(np.array([[0, 1, 1, 2, 0, 3, 1, 2]]), 4, 4)
WORLD = World("g", "a" * 16, ("n0", "n0", "n1", "n1"), ModelShape("m", 1, 4, 1, 10**6), 2, 4)
WORTH = Estimate(True, 0.2, 0.5, 0.7, 12.0, 0.1, "worth it")


def case(target: Placement = TARGET, base: Placement = BASE, **fields: Any) -> Case:
    settings = fields.pop("settings", GroupSettings())
    made = Case(WORLD, base, target, plan_waves(base, target, WORLD), settings, WORTH, Spent())
    return replace(made, **fields)


def said(found: Case) -> dict[str, Ruling]:
    return {d.goal: d.ruling for d in judge(found, ALL).decisions}


def test_a_good_change_has_every_goal_with_it() -> None:
    verdict = judge(case(), ALL)
    assert verdict.ruling is Ruling.YES
    assert all(d.sentence for d in verdict.decisions)
    assert len(verdict.decisions) == len(ALL)


@pytest.mark.parametrize(
    ("broken", "goal", "sentence"),
    [
        (case(settings=GroupSettings(drained=("n1",))), "drained", "rank 2 of the drained node n1"),
        (case(settings=GroupSettings(pinned=((0, 3, 0),))), "pinned", "expert 3 is not on rank 0"),
        (case(settings=GroupSettings(pinned=((9, 3, 0),))), "pinned", "names what this world does not have"),
        (case(settings=GroupSettings(min_replicas=2)), "replicas", "expert 3 has 1 replicas, 2 are wanted"),
        (case(settings=GroupSettings(spread=2), target=BASE.apply(TARGET.delta(TARGET))), "", ""),
        (case(settings=GroupSettings(spare_min=2)), "capacity", "free cells, 2 must stay"),
        (case(waves=()), "coverage", "not to the target"),
    ],
)
def test_hard_goals_refuse_what_breaks_them(broken: Case, goal: str, sentence: str) -> None:
    verdict = judge(broken, HARD)
    if not goal:
        assert verdict.ruling is Ruling.YES
        return
    assert verdict.ruling is Ruling.NO
    assert verdict.refused_by == goal
    assert sentence in verdict.sentence


def test_replicas_of_one_expert_on_one_node_break_the_spread() -> None:
    close = Placement(np.array([[0, 1, 0, 2, 1, 3, 1, 2]]), 4, 4)
    verdict = judge(case(target=close, settings=GroupSettings(spread=2)), HARD)
    assert verdict.refused_by == "replicas"
    assert "expert 0 lie on 1 nodes only" in verdict.sentence


def test_waves_that_lose_an_expert_are_refused() -> None:
    good = plan_waves(BASE, TARGET, WORLD)[0]
    bad = WavePlan(1, (replace(good.changes[0], expert=1, slot=5),), (), BASE.digest, "0" * 16, 0)
    assert said(case(waves=(bad,)))["coverage"] is Ruling.NO
    assert said(case(waves=(bad,)))["capacity"] is Ruling.NO


@pytest.mark.parametrize(
    ("changed", "goal", "ruling"),
    [
        ({"estimate": replace(WORTH, act=False, sentence="no")}, "gain", Ruling.NO),
        ({"estimate": replace(WORTH, act=False), "forced": True}, "gain", Ruling.YES),
        ({"spent": Spent(since_last_s=1.0)}, "cooldown", Ruling.THROTTLE),
        ({"spent": Spent(since_last_s=5.0)}, "cooldown", Ruling.YES),
        ({"settings": GroupSettings(moves_per_hour=0)}, "moves_per_hour", Ruling.NO),
        ({"settings": GroupSettings(moves_per_hour=10), "spent": Spent(moves=10)}, "moves_per_hour", Ruling.THROTTLE),
        ({"settings": GroupSettings(moves_per_hour=10), "spent": Spent(moves=9)}, "moves_per_hour", Ruling.YES),
        ({"settings": GroupSettings(bytes_per_hour=10**6), "spent": Spent(bytes=1)}, "bytes_per_hour", Ruling.THROTTLE),
    ],
)
def test_soft_goals_weigh(changed: dict[str, Any], goal: str, ruling: Ruling) -> None:
    assert said(case(**changed))[goal] is ruling


def test_a_change_is_forced_only_when_the_target_mends_what_the_present_breaks() -> None:
    pin = GroupSettings(pinned=((0, 1, 1),))
    assert must_move(case(settings=pin))
    assert not must_move(case(settings=GroupSettings(pinned=((0, 3, 0),))))
    assert not must_move(case())


def test_the_last_hour_counts_and_the_future_is_now() -> None:
    log = [Spending(0.0, 5, 50), Spending(3000.0, 1, 10), Spending(9000.0, 2, 20)]
    found = spent(log, None, 4000.0)
    assert (found.moves, found.bytes) == (3, 30)
    assert found.since_last_s == 0.0
    assert spent([], None, 1.0).since_last_s is None
    assert spent([], 10.0, 14.0).since_last_s == 4.0


def judged(load: list[float], **values: Any) -> Estimate:
    before, after = Split(BASE, BASE.even_shares()), Split(TARGET, TARGET.even_shares())
    waves = plan_waves(BASE, TARGET, WORLD)
    tokens = values.pop("step_tokens", None)
    return estimate(WORLD, np.array([load]), before, after, waves, GroupSettings().patched(values), tokens)


def test_the_gate_acts_only_when_the_gain_exceeds_cost_and_hysteresis() -> None:
    # Expert 1 is hot: its third replica takes load off ranks 0 and 3.
    hot = [10.0, 90.0, 10.0, 10.0]
    assert judged(hot).act
    assert 0.1 < judged(hot).part < 0.5
    assert not judged(hot, min_gain=0.9).act
    dear = judged(hot, bytes_per_s=1000.0, interference=1.0)
    assert not dear.act
    assert "disturbance" in dear.sentence
    assert judged(hot, bytes_per_s=1000.0, interference=1.0, horizon_s=100_000.0).act
    assert not judged([90.0, 10.0, 10.0, 10.0], min_gain=0.0).act
    assert not judged([0.0, 0.0, 0.0, 0.0], min_gain=0.0).act
    assert "device of its own" in judged(hot).sentence
    assert "device of its own" not in judged(hot, hardware="cpu").sentence


def test_where_reading_weights_takes_the_time_balance_pays_nothing() -> None:
    # A few tokens an expert on real hardware: an expert costs its weights, whatever its tokens.
    found = judged([1.0, 3.0, 1.0, 1.0], hardware="atlas800i-a2", min_gain=0.01, step_tokens=6.0)
    busy = judged([1.0, 3.0, 1.0, 1.0], hardware="atlas800i-a2", min_gain=0.01, step_tokens=60_000.0)
    assert busy.act
    assert found.balancedness_after > found.balancedness_before
    assert not found.act


def test_a_promise_is_confirmed_by_most_of_it() -> None:
    settings = GroupSettings(min_gain=0.05)
    assert confirmed(replace(WORTH, part=0.2), replace(WORTH, part=0.15), settings)
    assert not confirmed(replace(WORTH, part=0.2), replace(WORTH, part=0.05), settings)
    assert not confirmed(replace(WORTH, part=0.06), replace(WORTH, part=0.02), settings)


def test_the_rate_limit_makes_a_move_slower() -> None:
    waves = plan_waves(BASE, TARGET, WORLD)
    free = travel_s(WORLD, waves, hardware_named("cpu"), None)
    assert free == pytest.approx(10**6 / hardware_named("cpu").far_s)
    assert travel_s(WORLD, waves, hardware_named("cpu"), 10.0**5) == pytest.approx(10.0)
