"""The control cycle: every verdict, adoption, confirmation and quiet, limits across leaders, and the desk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from controller.adoption import SETTLED_S
from controller.decide import problem_of
from controller.facts import gather
from controller.history import prune
from controller.solver import Problem
from controller.solving import decode as decode_problem
from controller.solving import encode as encode_problem
from controller.verdict import VerdictKind
from eplane.errors import Conflict, Infeasible, Invalid, NotFound, ProblemError, RefusedByGoal, SolverFailed
from eplane.keys import AckKind
from eplane.migration import MigrationState
from eplane.placement import Placement
from eplane.plan import PlanKind, PlanState
from eplane.records import HistoryKind, Mode
from eplane.store.base import Delete, DeletePrefix, Exists, Missing, Put
from eplane.topology import Capabilities
from tests.controller.conftest import Rig
from tests.controller.rig import (
    CELLS,
    EXPERTS,
    KEYS,
    LAYERS,
    RANKS,
    SLOTS,
    Nodes,
    Seated,
    mode,
    settings,
    start_placement,
    tilted,
)
from tests.controller.test_driver import finish

BASE = {"policy": "eplb", "confirm": False, "cooldown_s": 0, "min_window_tokens": 10}


async def loaded(rig: Rig, hot: int = 0, **values: object) -> Seated:
    """A leader of an adopted world with four windows of a tilted load."""
    await settings(rig.store, **{**BASE, **values})
    leader = await rig.adopted()
    await rig.nodes.report(leader.desk, tilted(hot), 4)
    return leader


async def migrated(rig: Rig, **values: object) -> Seated:
    leader = await loaded(rig, **values)
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    assert await finish(rig, leader) is MigrationState.DONE
    return leader


async def test_a_world_is_adopted_as_it_is_and_never_pushed_at(rig: Rig) -> None:
    leader = await rig.lead()
    assert (await leader.cycle()).kind is VerdictKind.NO_WORLD
    replies = await rig.nodes.report(leader.desk, tilted(), 2)
    assert all(
        "not the life" in r["reason"] or "no world" in r["reason"] for reply in replies for r in reply["refused"]
    )
    await leader.turns()
    pointer, world = leader.group.state.epoch(), leader.group.state.world()
    assert pointer is not None
    assert world is not None
    assert (pointer.epoch, pointer.digest) == (1, start_placement().digest)
    assert world.world.cells == CELLS
    assert leader.group.state.histories()[1].made_by is HistoryKind.ADOPTION
    assert leader.group.state.active() is None
    assert (await leader.cycle()).kind is VerdictKind.NO_LOAD


async def test_a_table_that_no_one_knows_is_asked_for(rig: Rig) -> None:
    table = start_placement().p2l.copy()
    table[0, [0, 1]] = table[0, [1, 0]]
    strange = Placement(table, RANKS, EXPERTS)
    rig.nodes = Nodes(rig.store, rig.clock, strange)
    leader = await rig.lead()
    bodies = [rig.nodes.body(node) for node in rig.nodes.names]
    replies = [await leader.desk.ingest({**body, "placement": None}) for body in bodies]
    assert replies[-1]["want_describe"]
    await leader.turns()
    assert leader.lead.trouble is not None
    assert "has not been reported yet" in leader.lead.trouble
    wrong = {**bodies[0]["placement"], "p2l": start_placement().p2l.tolist()}
    assert "the table is" in (await leader.desk.ingest({**bodies[0], "placement": wrong}))["refused"][0]["reason"]
    await leader.desk.ingest(bodies[0])
    await leader.turns()
    assert leader.group.state.placement().digest == strange.digest


async def test_ranks_that_disagree_are_left_alone(rig: Rig) -> None:
    leader = await rig.lead()
    other = start_placement().p2l.copy()
    other[0, [0, 1]] = other[0, [1, 0]]
    found = Placement(other, RANKS, EXPERTS)
    rig.nodes.tables[found.digest] = found
    rig.nodes.ranks[3].digest = found.digest
    await rig.nodes.report(leader.desk)
    await leader.turns()
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.NO_WORLD
    assert "ranks disagree: rank 0 serves" in verdict.sentence
    assert leader.group.state.epoch() is None


async def test_half_a_world_is_waited_for(rig: Rig) -> None:
    leader = await rig.lead()
    await leader.desk.ingest(rig.nodes.body("n0"))
    await leader.turns()
    assert (await leader.cycle()).sentence.endswith("ranks [2, 3] have not reported yet")


async def test_a_late_word_of_the_old_world_does_not_bring_it_back(rig: Rig) -> None:
    leader = await rig.adopted()
    old = rig.nodes
    rig.nodes = Nodes(rig.store, rig.clock, start_placement(), world="c" * 16)
    await rig.nodes.report(leader.desk)
    await leader.turns()
    for node in old.names:
        await leader.desk.ingest(old.body(node))
    await leader.turns()
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert (pointer.world, pointer.epoch) == ("c" * 16, 2)


async def test_after_a_wiped_store_the_living_world_is_adopted_with_the_epochs_going_on(rig: Rig) -> None:
    await migrated(rig)
    served = rig.nodes.ranks[0].digest
    highest = max(rank.epoch or 0 for rank in rig.nodes.ranks)
    await rig.store.transact([Exists(KEYS.epoch)], [DeletePrefix(KEYS.prefix)])
    fresh = await rig.lead("c1")
    await rig.nodes.appear()
    await rig.nodes.report(fresh.desk)
    await fresh.turns()
    pointer = fresh.group.state.epoch()
    assert pointer is not None
    assert (pointer.digest, pointer.epoch) == (served, highest + 1)


async def test_a_store_that_was_set_back_follows_what_all_ranks_serve(rig: Rig) -> None:
    leader = await rig.adopted()
    table = start_placement().p2l.copy()
    table[0, [0, 1]] = table[0, [1, 0]]
    ahead = Placement(table, RANKS, EXPERTS)
    rig.nodes.tables[ahead.digest] = ahead
    for rank in rig.nodes.ranks:
        rank.digest, rank.epoch = ahead.digest, 9
    await rig.nodes.report(leader.desk)
    await leader.turns()
    first = leader.group.state.epoch()
    assert first is not None
    assert first.epoch == 1
    rig.clock.advance(SETTLED_S + 1)
    await rig.nodes.report(leader.desk)
    await leader.turns()
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert (pointer.digest, pointer.epoch) == (ahead.digest, 10)


async def test_descriptions_from_the_middle_of_a_migration_are_no_disagreement(rig: Rig) -> None:
    leader = await loaded(rig)
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    await rig.nodes.act((AckKind.VERIFIED,))
    fresh = await rig.lead("c1")
    await fresh.desk.ingest(rig.nodes.body("n0"))
    await fresh.turns()
    await rig.nodes.act()
    await fresh.desk.ingest(rig.nodes.body("n1"))
    assert await finish(rig, fresh) is MigrationState.DONE
    assert fresh.lead.trouble is None
    rig.clock.advance(SETTLED_S + 1)
    for node in rig.nodes.names:
        await fresh.desk.ingest(rig.nodes.body(node, describe=False))
    await fresh.turns()
    assert fresh.lead.trouble is None


async def test_ranks_of_the_adopted_world_that_come_apart_are_left_alone(rig: Rig) -> None:
    leader = await rig.adopted()
    await leader.turns()
    rig.nodes.ranks[3].digest = "1" * 16
    rig.nodes.tables["1" * 16] = rig.nodes.placement
    rig.clock.advance(SETTLED_S + 1)
    await rig.nodes.report(leader.desk)
    await leader.turns()
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.DISAGREE
    assert "rank 3 serves 1111" in verdict.sentence


async def test_nothing_is_started_while_a_node_has_no_agent(rig: Rig) -> None:
    leader = await loaded(rig)
    await rig.store.transact([Exists(KEYS.agent("n1"))], [Delete(KEYS.agent("n1"))])
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.ABSENT
    assert "on n1" in verdict.sentence
    await rig.nodes.appear()
    assert (await leader.cycle()).kind is VerdictKind.STARTED


async def test_records_of_agents_that_can_not_be_read_stop_nothing(rig: Rig) -> None:
    leader = await loaded(rig)
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    (record,) = leader.group.state.migrations()
    key = KEYS.ack(record.id, 1, AckKind.VERIFIED, "n7")
    await rig.store.transact([Missing(key)], [Put(key, b"{")])
    await rig.store.transact([Missing(KEYS.agent("n7"))], [Put(KEYS.agent("n7"), b"[]")])
    assert await finish(rig, leader) is MigrationState.DONE


async def test_settings_that_can_not_be_read_stop_the_decisions_until_they_are_mended(rig: Rig) -> None:
    leader = await loaded(rig)
    found = await rig.store.get(KEYS.settings)
    assert found is not None
    await rig.store.transact([Exists(KEYS.settings)], [Put(KEYS.settings, b'{"v": 9}')])
    assert (await leader.cycle()).kind is VerdictKind.BROKEN_RECORD
    await leader.desk.set_settings({"policy": "static"}, "ops", "mend")
    assert (await leader.cycle()).kind is VerdictKind.STATIC


async def test_static_moves_nothing_and_says_so(rig: Rig) -> None:
    leader = await loaded(rig, policy="static")
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.STATIC
    assert "nothing moves" in verdict.sentence
    assert (await rig.nodes.report(leader.desk))[0]["shares"] is None
    assert await leader.desk.plans() == []


@pytest.mark.parametrize(("value", "kind"), [(Mode.OFF, VerdictKind.OFF), (Mode.OBSERVE, VerdictKind.OBSERVING)])
async def test_modes_that_only_look(rig: Rig, value: Mode, kind: VerdictKind) -> None:
    leader = await loaded(rig)
    await mode(rig.store, value)
    assert (await leader.cycle()).kind is kind
    assert leader.solver.asked == 0


async def test_propose_stores_one_plan_and_waits_for_a_person(rig: Rig) -> None:
    await mode(rig.store, Mode.PROPOSE)
    leader = await loaded(rig)
    assert (await leader.cycle()).kind is VerdictKind.PROPOSED
    again = await leader.cycle()
    assert again.kind is VerdictKind.PROPOSED
    assert "waits for a person" in again.sentence
    (plan,) = leader.group.state.plans()
    assert leader.group.state.active() is None
    started = await leader.desk.execute(plan.id, 1, "ops", "looks right")
    assert started["state"] == "RUNNING"
    with pytest.raises(Conflict, match="is EXECUTING"):
        await leader.desk.execute(plan.id, 1, "ops", "twice")
    assert await finish(rig, leader) is MigrationState.DONE


async def test_a_proposal_that_no_longer_pays_is_set_aside(rig: Rig) -> None:
    await mode(rig.store, Mode.PROPOSE)
    leader = await loaded(rig, window=4)
    await leader.cycle()
    level = np.full((LAYERS, EXPERTS), 400.0)
    await rig.nodes.report(leader.desk, level, 6)
    verdict = await leader.cycle()
    assert verdict.kind in (VerdictKind.LEVEL, VerdictKind.NOT_WORTH_IT)
    assert [p.state for p in leader.group.state.plans()] == [PlanState.STALE]


async def test_a_change_is_confirmed_on_traffic_that_came_after_it(rig: Rig) -> None:
    leader = await loaded(rig, confirm=True)
    assert (await leader.cycle()).kind is VerdictKind.CONFIRMING
    assert (await leader.cycle()).kind is VerdictKind.CONFIRMING
    assert leader.solver.asked == 1
    await rig.nodes.report(leader.desk, tilted(), 2)
    assert (await leader.cycle()).kind is VerdictKind.STARTED


async def test_a_change_that_later_traffic_does_not_confirm_is_dropped(rig: Rig) -> None:
    leader = await loaded(rig, confirm=True)
    assert (await leader.cycle()).kind is VerdictKind.CONFIRMING
    await rig.nodes.report(leader.desk, np.full((LAYERS, EXPERTS), 400.0), 2)
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.NOT_WORTH_IT
    assert "would have gained" in verdict.sentence
    assert leader.group.state.migrations() == ()


async def test_a_change_of_an_earlier_world_does_not_wait_for_steps_that_never_come(rig: Rig) -> None:
    leader = await loaded(rig, confirm=True)
    assert (await leader.cycle()).kind is VerdictKind.CONFIRMING
    rig.nodes = Nodes(rig.store, rig.clock, start_placement(), world="c" * 16)
    await rig.nodes.appear()
    await rig.nodes.report(leader.desk)
    await leader.turns()
    await rig.nodes.report(leader.desk, tilted(), 2)
    assert (await leader.cycle()).kind is VerdictKind.CONFIRMING
    assert leader.solver.asked == 2
    await rig.nodes.report(leader.desk, tilted(), 2)
    assert (await leader.cycle()).kind is VerdictKind.STARTED


async def test_stable_traffic_starts_nothing_more(rig: Rig) -> None:
    leader = await migrated(rig, min_gain=0.05)
    rng = np.random.default_rng(3)
    for _ in range(12):
        rig.clock.advance(5)
        noisy = rng.poisson(tilted()).astype(float)
        await rig.nodes.report(leader.desk, noisy, 2)
        verdict = await leader.cycle()
        assert verdict.kind in (VerdictKind.LEVEL, VerdictKind.NOT_WORTH_IT), verdict.sentence
    assert len(leader.group.state.migrations()) == 1


async def test_without_hysteresis_noise_would_move_experts(rig: Rig) -> None:
    leader = await migrated(rig, min_gain=0.05)
    await settings(rig.store, **{**BASE, "min_gain": 0.0, "interference": 0.0, "window": 1})
    rng = np.random.default_rng(3)
    kinds = set()
    for _ in range(12):
        await rig.nodes.report(leader.desk, rng.poisson(tilted() / 50).astype(float), 2)
        kinds.add((await leader.cycle()).kind)
    assert VerdictKind.STARTED in kinds


def gained_as_predicted(leader: Seated) -> float:
    """What the last migration measurably gained, which is about what was predicted."""
    pointer = leader.group.state.epoch()
    assert pointer is not None
    record = leader.group.state.histories()[pointer.epoch]
    assert record.measured_gain_s is not None
    assert record.predicted_gain_s is not None
    assert record.measured_gain_s == pytest.approx(record.predicted_gain_s, rel=0.1)
    return record.measured_gain_s


async def test_what_a_migration_truly_gained_is_filled_in(rig: Rig) -> None:
    leader = await migrated(rig)
    await rig.nodes.report(leader.desk, tilted(), 6)
    await leader.cycle()
    measured = gained_as_predicted(leader)
    (line,) = await leader.desk.migrations()
    assert (await leader.desk.migration(line["id"]))["measured_gain_s"] == measured


async def test_what_a_migration_gained_counts_nodes_as_the_prediction_did(rig: Rig) -> None:
    """128 sampled tuples of the ranks say that experts 0 and 1 fire together, and 2 and 3."""
    rig.nodes.samples = True
    gains: list[float] = []
    for weight in (0.0, 2.0):
        await settings(rig.store, **{**BASE, "cross_node_weight": weight, "min_gain": 0, "policy": "eplb"})
        leader = await rig.lead(f"c{weight:g}")
        await rig.nodes.report(leader.desk)
        await leader.turns()
        await rig.nodes.report(leader.desk, tilted(4 * len(gains)), 16)
        assert (await leader.cycle()).kind is VerdictKind.STARTED
        assert await finish(rig, leader) is MigrationState.DONE
        await rig.nodes.report(leader.desk, tilted(4 * len(gains)), 16)
        await leader.cycle()
        gains.append(gained_as_predicted(leader))


async def test_limits_hold_across_a_change_of_leader(rig: Rig) -> None:
    leader = await migrated(rig)
    moved = sum(sum(m.moves.values()) for m in leader.group.state.moves())
    await settings(rig.store, **{**BASE, "moves_per_hour": moved + 1})
    fresh = await rig.lead("c1")
    await rig.nodes.report(fresh.desk, tilted(hot=4), 4)
    verdict = await fresh.cycle()
    assert verdict.kind is VerdictKind.THROTTLED
    assert f"{moved} bundles moved in the last hour" in verdict.sentence
    plan = await fresh.desk.propose("eplb", "ops", "now")
    with pytest.raises(RefusedByGoal, match="moves_per_hour"):
        await fresh.desk.execute(plan["id"], None, "ops", "")
    rig.clock.advance(3601)
    assert (await fresh.cycle()).kind is VerdictKind.STARTED


async def test_a_cooldown_is_kept_by_the_next_leader(rig: Rig) -> None:
    await migrated(rig, cooldown_s=60)
    fresh = await rig.lead("c1")
    await rig.nodes.report(fresh.desk, tilted(hot=4), 4)
    assert (await fresh.cycle()).kind is VerdictKind.THROTTLED
    rig.clock.advance(61)
    assert (await fresh.cycle()).kind is VerdictKind.STARTED


async def test_a_drained_node_is_emptied_whatever_it_gains(rig: Rig) -> None:
    await settings(rig.store, **{**BASE, "drained": ["n1"]})
    leader = await rig.adopted()
    await rig.nodes.report(leader.desk, tilted(), 4)
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.INFEASIBLE
    assert "drained" in verdict.sentence
    rig.nodes = Nodes(rig.store, rig.clock, wide(), world="c" * 16, cells=24)
    await rig.nodes.appear()
    await rig.nodes.report(leader.desk)
    await leader.turns()
    await rig.nodes.report(leader.desk, tilted(), 4)
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    assert await finish(rig, leader) is MigrationState.DONE
    assert leader.group.state.plans()[-1].kind is PlanKind.DRAIN
    assert (leader.group.state.placement().by_rank()[:, 2:] == -1).all()


def wide() -> Placement:
    """Four ranks of six slots, half of them empty: one node could hold everything."""
    table = np.full((LAYERS, RANKS, 6), -1)
    table[:, :, :SLOTS] = start_placement().by_rank()
    return Placement(table.reshape(LAYERS, -1), RANKS, EXPERTS)


async def test_a_solver_that_fails_changes_nothing_and_is_asked_again(rig: Rig) -> None:
    leader = await loaded(rig)
    for error in (SolverFailed("it ended"), Infeasible("spread", "too few nodes")):
        leader.solver.fails = error
        verdict = await leader.cycle()
        assert verdict.kind in (VerdictKind.FAILED, VerdictKind.INFEASIBLE)
        assert str(error) in verdict.sentence
    leader.solver.fails = None
    assert (await leader.cycle()).kind is VerdictKind.STARTED


async def test_a_stale_plan_is_refused_and_marked(rig: Rig) -> None:
    leader = await loaded(rig)
    plan = await leader.desk.propose(None, "ops", "try")
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    with pytest.raises(Conflict, match="is active"):
        await leader.desk.execute(plan["id"], 1, "ops", "")
    assert await finish(rig, leader) is MigrationState.DONE
    with pytest.raises(Conflict, match="is stale"):
        await leader.desk.execute(plan["id"], 1, "ops", "")
    assert (await leader.desk.plan(plan["id"]))["state"] == "STALE"
    with pytest.raises(NotFound):
        await leader.desk.execute("nothing", 1, "ops", "")


async def test_the_epoch_a_person_saw_must_be_the_live_one(rig: Rig) -> None:
    leader = await loaded(rig)
    plan = await leader.desk.propose(None, "ops", "try")
    with pytest.raises(Conflict, match="epoch 7 was expected"):
        await leader.desk.execute(plan["id"], 7, "ops", "")
    await leader.desk.pause("ops", "wait")
    with pytest.raises(Conflict, match="paused by ops"):
        await leader.desk.execute(plan["id"], 1, "ops", "")
    await leader.desk.resume("ops", "")
    discarded = await leader.desk.discard(plan["id"], "ops", "no")
    assert discarded["state"] == "DISCARDED"
    with pytest.raises(Conflict, match="DISCARDED"):
        await leader.desk.execute(plan["id"], 1, "ops", "")


async def test_moves_that_gain_nothing_are_not_offered_unless_asked_for(rig: Rig) -> None:
    leader = await rig.adopted()
    await settings(rig.store, **BASE)
    level = np.full((LAYERS, EXPERTS), 400.0)
    level[:, 0] += 1
    await rig.nodes.report(leader.desk, level, 4)
    told = await leader.desk.propose("eplb", "ops", "try")
    assert isinstance(told, str)
    assert told.startswith("eplb finds nothing to gain: ")
    assert leader.group.state.plans() == ()
    plan = await leader.desk.propose("eplb", "ops", "try", {"anyway": True})
    assert plan["state"] == "PROPOSED"
    with pytest.raises(Invalid, match=r"options\.anyway: must be true or false"):
        await leader.desk.propose("eplb", "ops", "try", {"anyway": 1})


async def test_a_rollback_is_a_plan_like_any_other(rig: Rig) -> None:
    leader = await migrated(rig)
    plan = await leader.desk.rollback(1, "ops", "undo")
    assert plan["kind"] == "rollback"
    assert leader.group.state.active() is None
    await leader.desk.execute(plan["id"], None, "ops", "")
    assert await finish(rig, leader) is MigrationState.DONE
    assert leader.group.state.placement().digest == start_placement().digest
    assert "already" in await leader.desk.rollback(1, "ops", "again")
    with pytest.raises(Conflict, match="not in the past"):
        await leader.desk.rollback(99, "ops", "")


async def test_settings_change_while_it_runs_and_bad_ones_name_their_field(rig: Rig) -> None:
    leader = await loaded(rig)
    shown = await leader.desk.set_settings({"min_gain": 0.99}, "ops", "quiet")
    assert shown["min_gain"] == 0.99
    assert (await leader.cycle()).kind is VerdictKind.NOT_WORTH_IT
    for patch, field in (({"min_gain": 2}, "min_gain"), ({"nonsense": 1}, "nonsense"), ({"policy": "best"}, "policy")):
        with pytest.raises(Invalid) as error:
            await leader.desk.set_settings(patch, "ops", "")
        assert error.value.field == field
    with pytest.raises(Invalid):
        await leader.desk.set_mode("turbo", "ops", "")
    with pytest.raises(Invalid, match=r"options\.drained"):
        await leader.desk.propose(None, "ops", "", {"drained": [0]})


async def test_a_mode_that_starts_nothing_says_what_still_runs(rig: Rig) -> None:
    leader = await loaded(rig)
    assert await leader.desk.set_mode("propose", "ops", "") == {"mode": "propose"}
    await leader.desk.set_mode("auto", "ops", "")
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    (record,) = leader.group.state.migrations()
    told = await leader.desk.set_mode("off", "ops", "")
    assert told["mode"] == "off"
    assert told["note"] == (
        f"migration {record.id} is running; it ends by itself; abort it with: eplane migration abort {record.id} -g g"
    )
    assert await leader.desk.set_mode("auto", "ops", "") == {"mode": "auto"}
    await leader.desk.set_mode("off", "ops", "")
    assert await finish(rig, leader) is MigrationState.DONE


async def test_cells_that_a_rank_can_not_free_are_an_anomaly(rig: Rig) -> None:
    leader = await loaded(rig)
    assert "cells_wait" not in {a["kind"] for a in await leader.desk.anomalies()}
    body = rig.nodes.body("n0")
    body["statuses"][1]["waits"] = "2 cells of wave 1 are still read by other ranks (layer 0, expert 3)"
    await leader.desk.ingest(body)
    (found,) = [a for a in await leader.desk.anomalies() if a["kind"] == "cells_wait"]
    assert found["sentence"] == "rank 1: 2 cells of wave 1 are still read by other ranks (layer 0, expert 3)"


async def test_a_verdict_says_which_balancedness_was_measured_and_which_is_predicted(rig: Rig) -> None:
    leader = await loaded(rig, min_gain=0.99)
    told = (await leader.cycle()).sentence
    measured, predicted = told.split("; ", 1)
    assert measured.startswith("measured balancedness 0.")
    assert ": predicted balancedness 0." in predicted
    assert told.count("balancedness") == 2


async def test_settings_that_no_placement_can_meet_are_refused_at_once(rig: Rig) -> None:
    """12 slots for 8 experts on 4 ranks of 2 nodes. Without a world nothing is known yet, and all is taken."""
    alone = await rig.lead()
    assert (await alone.desk.set_settings({"min_replicas": 5}, "ops", ""))["min_replicas"] == 5
    leader = await rig.adopted("c1")
    # What became impossible with the world is mended one by one: only what a change touches is judged.
    await leader.desk.set_settings({"min_gain": 0.5}, "ops", "")
    await leader.desk.set_settings({"min_replicas": 1}, "ops", "")
    for patch, goal, says in (
        ({"min_replicas": 5}, "min_replicas", "4 ranks can hold one"),
        ({"min_replicas": 2}, "min_replicas", "wants 16 copies, has 12 slots"),
        ({"drained": ["n1"]}, "drained", "6 slots for 8 experts"),
        ({"pinned": [[0, e, 0] for e in range(4)]}, "pinned", "4 experts are pinned to rank 0, which has 3 slots"),
    ):
        with pytest.raises(Infeasible, match=says) as error:
            await leader.desk.set_settings(patch, "ops", "")
        assert error.value.goal == goal
    with pytest.raises(ProblemError, match="drained: names every rank"):
        await leader.desk.set_settings({"drained": ["n0", "n1"]}, "ops", "")
    shown = await leader.desk.config()
    assert (shown["min_replicas"], shown["drained"], shown["pinned"]) == (1, [], [])
    assert (await leader.desk.set_settings({"pinned": [[0, 7, 0]], "spread": 2}, "ops", ""))["spread"] == 2


async def test_settings_that_name_what_is_not_there_are_an_anomaly(rig: Rig) -> None:
    leader = await loaded(rig)
    assert [item for item in await leader.desk.anomalies() if item["kind"] == "setting"] == []
    await leader.desk.set_settings({"drained": ["n7"], "pinned": [[0, 0, 0], [0, 0, RANKS]]}, "ops", "typo")
    told = [item["sentence"] for item in await leader.desk.anomalies() if item["kind"] == "setting"]
    assert told == [
        "drained names n7, which is no node of this world: n0, n1",
        f"the pin [0, 0, {RANKS}] names what this world does not have",
    ]


async def test_a_recording_has_all_windows_that_are_kept_piece_by_piece(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = await loaded(rig)
    await rig.nodes.report(leader.desk, tilted(2), 20)
    monkeypatch.setattr("controller.views.RECORDED_AT_ONCE", 10 * LAYERS * EXPERTS)
    loads, since, world, rounds = [], -1, None, 0
    while (found := await leader.desk.recording(since, world)) is not None:
        loads.extend(found["load"].tolist())
        since, world, rounds = int(found["last_step"][-1]), str(found["world"][-1]), rounds + 1
    assert rounds == 3
    assert loads == [seen.window.total.tolist() for seen in leader.group.book.newest(64)]
    assert len(loads) == 24
    assert len(await leader.desk.windows()) == 16


async def test_bad_reports_are_refused_by_themselves(rig: Rig) -> None:
    leader = await rig.adopted()
    good = rig.nodes.body("n0", tilted(), 2)
    for body in ({}, {"report": 7}, {**good, "report": {**good["report"], "group": "other"}}):
        with pytest.raises(Invalid):
            await leader.desk.ingest(body)
    broken = {**good, "describe": [{"world": 3}, *good["describe"]], "statuses": ["x"]}
    reply = await leader.desk.ingest(broken)
    assert reply["accepted"] == 4
    assert len(reply["refused"]) == 2
    assert (await leader.desk.ingest(good))["accepted"] == 0
    assert b'eplane_subwindows_refused_total{cause="duplicate",group="g"} 4.0' in leader.group.metrics.text()


async def test_sampled_routings_come_to_the_solver_where_all_ranks_sample(rig: Rig) -> None:
    rig.nodes.samples = True
    leader = await loaded(rig, window=3)
    load, windows = await leader.desk.load(), await leader.desk.windows()
    assert [w["sampled"] for w in windows] == [w["sampled"] for w in load["recent"]] == [2 * RANKS] * 4
    assert load["sampled"] == 4 * 2 * RANKS
    assert load["refused"].get("sample", 0) == 0
    facts = gather(leader.group.state, leader.group.book, 0.0)
    assert facts is not None
    raw = encode_problem(problem_of(facts, "eplb"))
    head = int.from_bytes(raw[:4], "big")
    problem = Problem.from_dict(decode_problem(raw[8 : 8 + head], raw[8 + head :]))
    assert problem.routing_sample is not None
    assert [np.unique(layer, axis=0).tolist() for layer in problem.routing_sample] == [[[0, 1]], [[2, 3]]]
    assert len(problem.routing_sample[0]) == 3 * 2 * RANKS, "the load window's tuples, no others"
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    few = replace(facts, world=replace(facts.world, capabilities=Capabilities()))
    assert "routing_sample" not in problem_of(few, "eplb"), "some ranks' tokens are not those of all"


async def test_without_samples_the_solver_is_asked_as_before(rig: Rig) -> None:
    leader = await loaded(rig)
    facts = gather(leader.group.state, leader.group.book, 0.0)
    assert facts is not None
    assert "routing_sample" not in problem_of(facts, "eplb")
    assert (await leader.desk.load())["sampled"] == 0


@pytest.mark.parametrize("noise", [7, {}, [None], [{"rank": 0}], "x"])
async def test_samples_that_are_none_are_refused_by_themselves(rig: Rig, noise: object) -> None:
    leader = await loaded(rig)
    reply = await leader.desk.ingest({**rig.nodes.body("n0", tilted(), 1), "samples": noise})
    assert reply["accepted"] == 2
    assert ["samples" in r["reason"] for r in reply["refused"]] == [True]
    assert (await leader.desk.load())["refused"]["sample"] == 1


async def test_shares_ride_back_on_replies_when_they_level_the_load(rig: Rig) -> None:
    leader = await loaded(rig, min_gain=0.99)

    async def split(p2l, ranks, load, timeout_s):  # type: ignore[no-untyped-def]
        shares = Placement(p2l, ranks, EXPERTS).even_shares()
        for layer in range(LAYERS):
            where = np.flatnonzero(p2l[layer] == 0)
            shares[layer, where] = 0.0
            shares[layer, where[-2:]] = 0.2, 0.8
        return shares

    leader.solver.shares = split  # type: ignore[method-assign]
    await leader.cycle()
    reply = (await rig.nodes.report(leader.desk))[0]
    assert reply["shares"]["digest"] == start_placement().digest
    assert 0.8 in reply["shares"]["shares"][0]
    assert (await rig.nodes.report(leader.desk))[0]["shares"] is None
    rig.clock.advance(6)
    assert (await rig.nodes.report(leader.desk))[0]["shares"] is not None


async def test_everything_can_be_shown(rig: Rig) -> None:
    leader = await migrated(rig)
    await rig.nodes.report(leader.desk, tilted(), 4)
    desk = leader.desk
    status = await desk.status()
    assert status["agents"] == "2/2"
    assert status["leader"]["url"] == "http://c0"
    shown = await desk.load()
    assert np.array(shown["rank_load"]).shape == (LAYERS, RANKS)
    assert (await desk.placement())["epoch"] == status["epoch"]
    assert (await desk.placement(1))["digest"] == start_placement().digest
    assert [h["epoch"] for h in await desk.history(2)] == [status["epoch"], status["epoch"] - 1]
    assert {g["goal"] for g in await desk.goals()} >= {"coverage", "capacity", "gain", "moves_per_hour"}
    told = await desk.explain(0, 0)
    assert told["ranks"]
    assert "replicas" in told["sentence"]
    with pytest.raises(NotFound):
        await desk.explain(9, 0)
    assert (await desk.config())["policy"] == "eplb"
    assert [n["node"] for n in await desk.nodes()] == ["n0", "n1"]
    assert all("sentence" in item for item in await desk.anomalies())


async def test_history_is_bounded_and_what_is_kept_can_be_rebuilt(rig: Rig) -> None:
    leader = await loaded(rig, max_moves_per_wave=2)
    for turn in range(10):
        rig.clock.advance(4000)
        await rig.nodes.report(leader.desk, tilted(hot=4 * (turn % 2)), 20)
        verdict = await leader.cycle()
        if verdict.kind is VerdictKind.STARTED:
            assert await finish(rig, leader) is MigrationState.DONE
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert pointer.epoch > 34
    assert await prune(leader.group.state, leader.lead.term, rig.clock, 2) > 0
    kept = sorted(leader.group.state.histories())
    assert 2 <= len(kept) < 34
    fresh = await rig.lead("c1")
    for epoch in kept:
        fresh.group.state.placement(epoch)
    assert len(fresh.group.state.migrations()) <= 2
    await rig.nodes.report(fresh.desk, tilted(), 20)
    assert (await fresh.cycle()).kind is not VerdictKind.BROKEN_RECORD


async def test_after_a_shift_only_the_new_kind_of_traffic_is_judged(rig: Rig) -> None:
    leader = await loaded(rig)
    await rig.nodes.report(leader.desk, tilted(), 30)
    await rig.nodes.report(leader.desk, tilted(hot=4), 4)
    facts = gather(leader.group.state, leader.group.book, rig.clock.now())
    assert facts is not None
    assert len(facts.seen) <= 5
    assert facts.load[0].argmax() == 4
