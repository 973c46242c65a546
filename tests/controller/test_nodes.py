"""Nodes that a token touches: the setting reaches solver, gate, sentence and replay; and how many steps a horizon has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controller import gate
from controller.decide import problem_of
from controller.facts import Facts, facts_of, gather
from controller.gate import Estimate, Split, estimate
from controller.limits import Spent
from controller.observe import Seen
from controller.planner import plan_waves
from controller.replay import Replay
from controller.scene import Scene
from controller.settings import GroupSettings
from controller.simulate import SimulationSettings, simulate
from controller.solver import Problem, coactivation
from controller.verdict import VerdictKind
from eplane.errors import SettingsError
from eplane.load import LoadWindow
from eplane.placement import Placement
from eplane.records import EpochPointer
from eplane.routing import TokenSample
from eplane.topology import Capabilities, ModelShape, World
from tests.controller.conftest import Rig
from tests.controller.rig import tilted
from tests.controller.test_replay import replayed

# Experts 0 and 1 fire together, 2 and 3, and so on. APART has every pair on two nodes, TOGETHER on one rank.
APART = Placement(np.array([[0, 2, 4, 6, 1, 3, 5, 7]]), 4, 8)
TOGETHER = Placement(np.array([[0, 1, 2, 3, 4, 5, 6, 7]]), 4, 8)
PAIRS = np.repeat(np.arange(8).reshape(1, 4, 2), 32, axis=1)
LOAD = np.array([[110.0, 110.0, 90.0, 90.0, 100.0, 100.0, 100.0, 100.0]])
CAN = Capabilities(weighted_shares=True, free_slot_order=True, routing_sample=True)
WORLD = World("g", "a" * 16, ("n0", "n0", "n1", "n1"), ModelShape("m", 1, 8, 2, 10**6), 2, 6, CAN)


def judged(load: Any = LOAD, routings: Any = PAIRS, **values: Any) -> Estimate:
    before, after = (Split(p, p.even_shares()) for p in (APART, TOGETHER))
    settings = GroupSettings().patched({"hardware": "h800", **values})
    return estimate(WORLD, load, before, after, plan_waves(APART, TOGETHER, WORLD), settings, 10**6, routings)


def test_a_plan_that_gives_up_balance_for_nodes_is_weighed_by_the_setting() -> None:
    plain, priced = judged(), judged(cross_node_weight=0.3)
    assert not plain.act
    assert "nodes touched" not in plain.sentence
    assert priced.act
    assert priced.part > 0.05
    assert priced.gain_s == pytest.approx(60 * priced.part)
    assert "predicted balancedness 1.000 to 0.909" in priced.sentence
    assert "nodes touched a token 2.00 to 1.00 in it, weighed as" in priced.sentence
    assert "by cross_node_weight 0.3" in priced.sentence
    assert not judged(cross_node_weight=0.0).act
    assert judged(cross_node_weight=0.6).part - priced.part == pytest.approx(priced.part - plain.part)


@pytest.mark.parametrize("hardware", ["demo", "h800", "h800-prefill"])
def test_a_unit_of_the_weight_is_worth_a_unit_of_balance(hardware: str) -> None:
    """TOGETHER has max / mean 1.1 for one node less: at a weight of 0.1 neither is better, whatever the hardware says."""
    even = judged(hardware=hardware, cross_node_weight=0.1)
    assert even.part == pytest.approx(0.0, abs=1e-9)
    assert judged(hardware=hardware, cross_node_weight=0.11).part > 0


def test_nodes_in_the_predicted_time_of_the_hardware_are_told() -> None:
    own = judged(np.full((1, 8), 100.0), hardware="h800-prefill")
    assert own.part > 0.01
    assert "nodes touched a token 2.00 to 1.00 in it" in own.sentence
    assert "cross_node_weight" not in own.sentence


def test_too_few_tuples_or_none_weigh_nothing() -> None:
    assert gate.LEAST_TUPLES == coactivation.LEAST_TUPLES
    for routings in (None, PAIRS[:, : gate.LEAST_TUPLES - 1]):
        few = judged(routings=routings, cross_node_weight=0.3)
        assert few.part == judged().part
        assert "nodes touched" not in few.sentence


def window(first: int, last: int, at: float | None, sample: TokenSample | None = None) -> Seen:
    counted = LoadWindow("a" * 16, APART.digest, first, last, LOAD, LOAD * 0, True, (0, 1, 2, 3))
    return Seen(counted, APART.rank_load(LOAD, APART.even_shares()), sample, at)


def facts(*seen: Seen, **values: Any) -> Facts:
    pointer = EpochPointer(1, APART.digest, "a" * 16, 1, "")
    return facts_of(GroupSettings().patched(values), WORLD, pointer, APART, seen, Spent())


def test_the_settings_reach_the_solvers_problem() -> None:
    assert "cross_node_weight" not in problem_of(facts(), "eplane")
    assert problem_of(facts(), "eplane")["node_slack"] == 0.05
    problem = Problem.from_dict(problem_of(facts(cross_node_weight=0, node_slack=0.2), "eplane"))
    assert (problem.cross_node_weight, problem.node_slack) == (0.0, 0.2)


@pytest.mark.parametrize("wrong", [{"cross_node_weight": -0.1}, {"cross_node_weight": "nan"}, {"node_slack": None}])
def test_what_is_no_weight_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        GroupSettings().patched(wrong)


async def test_a_change_of_the_weight_is_seen_by_the_next_decision(rig: Rig) -> None:
    leader = await rig.adopted()
    await leader.desk.set_settings({"cross_node_weight": 0.7, "node_slack": 0.1}, "test")
    found = gather(leader.group.state, leader.group.book, rig.clock.now())
    assert found is not None
    problem = problem_of(found, "eplane")
    assert (problem["cross_node_weight"], problem["node_slack"]) == (0.7, 0.1)
    await leader.desk.set_settings({"cross_node_weight": None}, "test")
    assert (await leader.desk.config())["cross_node_weight"] is None


def test_a_replay_moves_for_nodes_where_the_settings_price_them() -> None:
    """The sample comes with each entry, or stands for the whole trace."""
    base = {"confirm": False, "min_window_tokens": 10, "solver_budget_ms": 20_000, "cooldown_s": 0}
    sample = TokenSample(256, PAIRS.transpose(1, 0, 2))
    for weight, told, kind in ((0.5, None, "started"), (0.5, PAIRS, "started"), (0.0, PAIRS, "level")):
        settings = GroupSettings().patched({**base, "cross_node_weight": weight})
        replay = Replay(WORLD, settings, APART, 1.0, routings=told)
        for _ in range(4):
            replay.observe(LOAD * 10, 32, sample if told is None else None)
        cycle = replay.cycle()
        assert cycle.kind is VerdictKind(kind), cycle.sentence
        if kind == "started":
            assert "by cross_node_weight 0.5" in cycle.sentence


def test_a_simulation_is_told_routings_and_weight_as_fields() -> None:
    trace = np.repeat(LOAD[None] * 10, 8, axis=0)
    moves = {}
    for weight in (0.0, 0.5):
        fields = {"nodes": 2, "routing_sample": PAIRS.tolist(), "cross_node_weight": weight, "bundle_bytes": 10**6}
        group = {"confirm": False, "cooldown_s": 0, "min_window_tokens": 10, "solver_budget_ms": 20_000}
        asked = SimulationSettings(
            4, 2, 2, hardware="h800", fields=fields, prior=APART.p2l.tolist(), group=group, entry_s=1.0
        )
        assert Scene.of(asked, 1, 8).group.cross_node_weight == weight
        moves[weight] = sum(w.moves for w in simulate(trace, asked).windows)
    assert moves[0.0] == 0
    assert moves[0.5] > 0


def test_the_rate_of_steps_comes_from_when_the_windows_came() -> None:
    """A new leader hears the last windows at once; those are where the clock starts, not what it measures."""
    burst = [window(at * 32, (at + 1) * 32, 50.0) for at in range(10)]
    assert facts().steps_a_second is None
    assert facts(*burst).steps_a_second is None
    assert facts(*burst, window(320, 352, 50.5)).steps_a_second is None, "half a second is too short to tell"
    later = [window(320 + at * 32, 352 + at * 32, 50.0 + 2 * (at + 1)) for at in range(5)]
    assert facts(*burst, *later).steps_a_second == pytest.approx(16.0)
    assert facts(*(replace(seen, at=None) for seen in later)).steps_a_second is None


def test_the_solver_may_count_on_the_steps_that_the_horizon_has() -> None:
    seen = [window(at * 32, (at + 1) * 32, float(at)) for at in range(8)]
    assert problem_of(facts(*seen, horizon_s=60), "eplane")["horizon_steps"] == 32 * 60
    slow = [replace(s, at=4.0 * at) for at, s in enumerate(seen)]
    assert problem_of(facts(*slow, horizon_s=60), "eplane")["horizon_steps"] == 8 * 60
    assert "horizon_steps" not in problem_of(facts(*seen[:1]), "eplane"), "the solver has a default"


async def test_controller_and_replay_count_the_same_steps(rig: Rig) -> None:
    leader = await rig.adopted()
    replay = replayed(entry_s=2.0)
    for _ in range(4):
        rig.clock.advance(2.0)
        await rig.nodes.report(leader.desk, tilted(), 1)
        replay.observe(tilted(), 32)
    found = gather(leader.group.state, leader.group.book, rig.clock.now())
    assert found is not None
    assert found.steps_a_second == replay.facts().steps_a_second == pytest.approx(16.0)
