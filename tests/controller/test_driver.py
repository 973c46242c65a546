"""Migrations from the first record to the last, on a memory store: every order of events ends by itself, safely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from controller import adoption, driver, making
from controller.verdict import VerdictKind
from eplane.crash import POINTS
from eplane.errors import Conflict, LeaseLost, NotLeader, OutcomeUnknown
from eplane.keys import AckKind
from eplane.migration import MigrationState, WaveState
from eplane.plan import PlanState
from eplane.records import HistoryKind
from eplane.store.base import CreateRevision, Missing, ModRevision, Put
from eplane.store.memory import Fault, MemoryStore
from tests.controller.conftest import Rig
from tests.controller.rig import KEYS, Nodes, Seated, ended, settings, start_placement, tilted


async def start(rig: Rig, **values: object) -> Seated:
    """A leader that has just begun a migration."""
    if values:
        await settings(rig.store, policy="eplb", confirm=False, cooldown_s=0, min_window_tokens=10, **values)
    leader = await rig.adopted()
    await rig.nodes.report(leader.desk, tilted(), 4)
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.STARTED, verdict.sentence
    return leader


async def finish(rig: Rig, leader: Seated, rounds: int = 60) -> MigrationState:
    """Nodes act and the leader takes turns until no migration is active; how it ended."""
    for _ in range(rounds):
        await leader.turns()
        if leader.group.state.active() is None:
            break
        await rig.nodes.act()
    assert leader.group.state.active() is None, leader.lead.round
    check_history(leader)
    return ended(leader)[-1]


def check_history(leader: Seated) -> None:
    """Invariant 5: epochs grow by one, each with one record; every epoch's placement can be rebuilt; the pointer is the last."""
    histories, pointer = leader.group.state.histories(), leader.group.state.epoch()
    assert pointer is not None
    assert sorted(histories) == list(range(1, pointer.epoch + 1))
    for epoch in histories:
        assert leader.group.state.placement(epoch).digest == histories[epoch].digest
    assert histories[pointer.epoch].digest == pointer.digest


def waves(leader: Seated) -> list[WaveState]:
    """States of the active migration's waves, as stored."""
    active = leader.group.state.active()
    assert active is not None
    return [w.state for w in leader.group.state.journey(active.migration).stored.waves]


async def test_a_tilt_is_levelled_in_waves_and_every_epoch_has_its_record(rig: Rig) -> None:
    leader = await start(rig, max_moves_per_wave=2)
    before = leader.group.state.placement(1)
    assert await finish(rig, leader) is MigrationState.DONE
    (record,) = leader.group.state.migrations()
    plan = leader.group.state.plan(record.plan)
    assert len(plan.waves) > 1
    assert plan.state is PlanState.DONE
    histories = leader.group.state.histories()
    kinds = [histories[e].made_by for e in sorted(histories)]
    assert kinds == [HistoryKind.ADOPTION] + [HistoryKind.WAVE] * len(plan.waves)
    assert plan.applied_to(before)[-1].digest == plan.target_digest == leader.group.state.placement().digest
    assert all(rank.digest == plan.target_digest for rank in rig.nodes.ranks)
    await rig.nodes.report(leader.desk, tilted(), 8)
    shown = await leader.desk.status()
    promised = plan.predicted
    assert promised.balancedness_after > promised.balancedness_before + 0.1
    assert shown["balancedness"]["now"] > promised.balancedness_after - 0.02


async def test_one_cutover_waits_for_the_switched_acks_of_the_last(rig: Rig) -> None:
    leader = await start(rig, max_moves_per_wave=2)
    await rig.nodes.act()
    await leader.turns()
    assert waves(leader)[0] is WaveState.SWITCHING
    for _ in range(4):
        await rig.nodes.act((AckKind.VERIFIED,))
        await leader.turns()
    assert WaveState.SWITCHING not in waves(leader)[1:]
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert pointer.epoch == 2
    assert await finish(rig, leader) is MigrationState.DONE


async def test_nothing_is_staged_again_before_the_clean_acks(rig: Rig) -> None:
    leader = await start(rig, max_moves_per_wave=10**6)
    rig.nodes.cells = 8
    await rig.nodes.act((AckKind.VERIFIED,))
    await leader.turns()
    for _ in range(3):
        await rig.nodes.act((AckKind.SWITCHED,))
        await leader.turns()
    assert leader.group.state.active() is not None
    assert waves(leader)[0] is WaveState.SWITCHING
    assert await finish(rig, leader) is MigrationState.DONE


async def test_a_new_leader_after_every_write_still_brings_it_to_its_end(rig: Rig) -> None:
    leader = await start(rig, max_moves_per_wave=2)
    for number in range(60):
        leader = await rig.lead(f"c{number + 1}")
        await rig.nodes.report(leader.desk)
        await leader.turn()
        if leader.group.state.active() is None:
            break
        await rig.nodes.act()
    assert ended(leader) == [MigrationState.DONE]
    check_history(leader)


class Crashed(Exception):
    """The leader ended here."""


def crash_at(monkeypatch: pytest.MonkeyPatch, point: str, nth: int = 1) -> Callable[[], bool]:
    """Have the nth pass of a crash point end the leader; whether it was reached."""
    passed = 0

    def here(name: str) -> None:
        nonlocal passed
        if name == point:
            passed += 1
            if passed == nth:
                raise Crashed(point)

    for module in (adoption, driver, making):
        monkeypatch.setattr(module, "crash_point", here)
    return lambda: passed >= nth


async def live_through(rig: Rig, leader: Seated, abort: bool) -> Seated:
    """Adopt, decide, migrate, optionally abort; a leader that crashes is followed by another, which goes on."""
    asked = False
    for number in range(80):
        try:
            await rig.nodes.report(leader.desk)
            await leader.turns()
            if not leader.group.state.migrations():
                await rig.nodes.report(leader.desk, tilted(), 4)
                await leader.cycle()
            elif abort and not asked and leader.group.state.active() is not None:
                asked = True
                (record,) = leader.group.state.migrations()
                await leader.desk.abort(record.id, "test", "enough")
            if ended(leader) and leader.group.state.active() is None:
                return leader
            await rig.nodes.act()
        except Crashed:
            leader = await rig.lead(f"c{number + 1}")
            asked = False
    raise AssertionError("it does not end")


OFTEN = ("controller.stage", "controller.cutover")
PASSES = [
    (p, n) for p in sorted(POINTS) if p.startswith("controller.") for n in (1, 2) if n == 1 or p.startswith(OFTEN)
]


@pytest.mark.parametrize(("point", "nth"), PASSES)
async def test_a_leader_that_ends_at_any_point_is_followed_by_one_that_finishes(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, point: str, nth: int
) -> None:
    await settings(rig.store, policy="eplb", confirm=False, cooldown_s=0, min_window_tokens=10, max_moves_per_wave=2)
    reached = crash_at(monkeypatch, point, nth)
    abort = point.startswith("controller.abort")
    leader = await live_through(rig, await rig.lead(), abort)
    assert reached()
    check_history(leader)
    allowed = {MigrationState.DONE, MigrationState.STOPPED, MigrationState.ABORTED} if abort else {MigrationState.DONE}
    assert set(ended(leader)) <= allowed
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert all(rank.digest == pointer.digest for rank in rig.nodes.ranks)


async def verified(rig: Rig, **values: object) -> Seated:
    """A leader whose first wave is verified in the store, and not cut over yet."""
    leader = await start(rig, **values)
    await rig.nodes.act()
    await leader.turn()
    assert waves(leader)[0] is WaveState.VERIFIED
    return leader


@pytest.mark.parametrize("abort_first", [True, False])
async def test_abort_and_cutover_exclude_each_other(rig: Rig, abort_first: bool) -> None:
    leader = await verified(rig)
    (record,) = leader.group.state.migrations()
    abort, cut = leader.desk.abort(record.id, "test", "stop"), leader.lead.turn()
    both = await asyncio.gather(*((abort, cut) if abort_first else (cut, abort)), return_exceptions=True)
    assert not any(isinstance(answer, Exception) for answer in both)
    outcome = await finish(rig, leader)
    pointer = leader.group.state.epoch()
    assert pointer is not None
    # The wave that was cut over first goes forward; only the one after it is aborted.
    assert outcome is (MigrationState.ABORTED if abort_first else MigrationState.STOPPED)
    assert pointer.epoch == (1 if abort_first else 2)
    assert {rank.digest for rank in rig.nodes.ranks} == {pointer.digest}


async def test_what_is_cut_over_to_its_last_wave_can_not_be_aborted(rig: Rig) -> None:
    rig.nodes.cells = 60
    leader = await verified(rig)
    (record,) = leader.group.state.migrations()
    cut, aborted = await asyncio.gather(
        leader.lead.turn(), leader.desk.abort(record.id, "test", "stop"), return_exceptions=True
    )
    assert cut is True
    assert isinstance(aborted, Conflict)
    assert await finish(rig, leader) is MigrationState.DONE


class Blind(MemoryStore):
    """A store that forgets to look at one compare: shows what that guard is for."""

    blind_to: str = ""
    kind: type = ModRevision

    async def transact(self, compares, ops):  # type: ignore[no-untyped-def]
        seen = [c for c in compares if not (c.key.startswith(self.blind_to) and isinstance(c, self.kind))]
        return await super().transact(seen, ops)


def blind(leader: Seated, key: str, kind: type) -> None:
    store = leader.group.store
    assert isinstance(store, MemoryStore)
    store.__class__ = Blind
    store.blind_to, store.kind = key, kind  # type: ignore[attr-defined]


async def test_without_the_compare_on_the_wave_both_would_win(rig: Rig) -> None:
    leader = await verified(rig)
    blind(leader, KEYS.migrations, ModRevision)
    (record,) = leader.group.state.migrations()
    await asyncio.gather(leader.desk.abort(record.id, "test", "stop"), leader.lead.turn(), return_exceptions=True)
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert leader.group.state.migrations()[0].state is MigrationState.STOPPING
    assert pointer.epoch == 2


async def test_an_abort_between_waves_leaves_a_valid_placement_and_says_stopped(rig: Rig) -> None:
    leader = await start(rig, max_moves_per_wave=2)
    await rig.nodes.act()
    await leader.turns()
    (record,) = leader.group.state.migrations()
    await leader.desk.abort(record.id, "ops", "enough")
    assert await finish(rig, leader) is MigrationState.STOPPED
    shown = await leader.desk.migration(record.id)
    assert shown["live"] == 1
    assert shown["reason"] == "ops: enough"
    with pytest.raises(Conflict, match="ended already"):
        await leader.desk.abort(record.id, "ops", "again")


async def test_an_aborted_migration_waits_for_the_clean_acks_before_the_next(rig: Rig) -> None:
    leader = await start(rig)
    rig.nodes.silent = {"n1"}
    await rig.nodes.act()
    (record,) = leader.group.state.migrations()
    await leader.desk.abort(record.id, "ops", "enough")
    await rig.nodes.act()
    await leader.turns()
    assert leader.group.state.active() is not None
    assert (await leader.cycle()).kind is VerdictKind.MIGRATING
    rig.nodes.silent = set()
    assert await finish(rig, leader) is MigrationState.ABORTED


async def test_a_replaced_leader_writes_nothing(rig: Rig) -> None:
    old = await verified(rig)
    new = await rig.lead("c1")
    before = await rig.store.list(KEYS.prefix)
    with pytest.raises(LeaseLost):
        await old.turn()
    with pytest.raises(NotLeader, match="http://c1"):
        await old.desk.set_mode("off", "ops", "")
    assert (await rig.store.list(KEYS.prefix)).items == before.items
    await rig.nodes.report(new.desk)
    assert await finish(rig, new) is MigrationState.DONE


async def test_without_the_fence_a_replaced_leader_would_cut_over(rig: Rig) -> None:
    old = await verified(rig)
    await rig.lead("c1")
    blind(old, KEYS.leader, CreateRevision)
    assert await old.turn()
    pointer = old.group.state.epoch()
    assert pointer is not None
    assert pointer.epoch == 2


async def test_a_cutover_whose_reply_is_lost_is_recognised(rig: Rig) -> None:
    leader = await verified(rig)
    store = leader.group.store
    assert isinstance(store, MemoryStore)
    lost = dict.fromkeys(range(store.sent + 2, store.sent + 30), Fault.LOSE_REQUEST)
    store.faults.transactions = {store.sent + 1: Fault.LOSE_REPLY, **lost}
    assert await leader.turn()
    store.faults.transactions = {}
    assert waves(leader)[0] is WaveState.SWITCHING
    assert sorted(leader.group.state.histories()) == [1, 2]
    assert await finish(rig, leader) is MigrationState.DONE


async def test_a_cutover_that_never_arrived_is_tried_again(rig: Rig) -> None:
    leader = await verified(rig)
    store = leader.group.store
    assert isinstance(store, MemoryStore)
    store.faults.transactions = dict.fromkeys(range(store.sent + 1, store.sent + 30), Fault.LOSE_REQUEST)
    assert not await leader.turn()
    assert waves(leader)[0] is WaveState.VERIFIED
    store.faults.transactions = {}
    assert await finish(rig, leader) is MigrationState.DONE


async def test_a_held_back_cutover_that_arrives_after_the_next_leader_changes_nothing(rig: Rig) -> None:
    old = await verified(rig)
    store = old.group.store
    assert isinstance(store, MemoryStore)
    store.faults.transactions = dict.fromkeys(range(store.sent + 1, store.sent + 30), Fault.HOLD)
    assert not await old.turn()
    new = await rig.lead("c1")
    await rig.nodes.report(new.desk)
    (record,) = new.group.state.migrations()
    await new.desk.abort(record.id, "ops", "stop")
    assert not any(answer.succeeded for answer in rig.store.release_held())
    assert await finish(rig, new) is MigrationState.ABORTED
    pointer = new.group.state.epoch()
    assert pointer is not None
    assert pointer.epoch == 1


async def test_pause_means_pause_and_resume_goes_on(rig: Rig) -> None:
    leader = await verified(rig)
    await leader.desk.pause("ops", "incident")
    for _ in range(3):
        assert not await leader.turn()
        await rig.nodes.act()
    assert waves(leader)[0] is WaveState.VERIFIED
    assert leader.lead.round is not None
    assert "paused by ops" in leader.lead.round.sentence
    await settings(rig.store, policy="eplb", stage_timeout_s=5)
    rig.clock.advance(600)
    await leader.turns()
    assert waves(leader)[0] is WaveState.VERIFIED
    await leader.desk.resume("ops", "")
    assert await finish(rig, leader) is MigrationState.DONE


async def test_a_pause_that_comes_first_wins_over_the_cutover(rig: Rig) -> None:
    leader = await verified(rig)
    other = await asyncio.gather(leader.desk.pause("ops", "now"), leader.lead.turn())
    assert other[0] == {"paused": True}
    assert waves(leader)[0] is WaveState.VERIFIED


async def test_without_the_compare_on_pause_it_would_be_cut_over(rig: Rig) -> None:
    leader = await verified(rig)
    blind(leader, KEYS.pause, Missing)
    await asyncio.gather(leader.desk.pause("ops", "now"), leader.lead.turn())
    assert waves(leader)[0] is WaveState.SWITCHING


async def reach(rig: Rig, leader: Seated, state: WaveState) -> None:
    """Bring the first wave of a migration that was just begun to `state`."""
    if state is WaveState.ABORTED:
        rig.nodes.silent = {"n1"}
        (record,) = leader.group.state.migrations()
        await leader.desk.abort(record.id, "ops", "stop")
        return
    if state is not WaveState.STAGING:
        await rig.nodes.act()
        await leader.turn()
    if state is WaveState.SWITCHING:
        await leader.turn()


@pytest.mark.parametrize("new_leader", [False, True])
@pytest.mark.parametrize("state", [WaveState.STAGING, WaveState.VERIFIED, WaveState.SWITCHING, WaveState.ABORTED])
async def test_a_lost_world_ends_the_migration_and_the_next_is_adopted(
    rig: Rig, state: WaveState, new_leader: bool
) -> None:
    leader = await start(rig)
    await reach(rig, leader, state)
    assert waves(leader)[0] is state
    before = leader.group.state.epoch()
    assert before is not None
    if new_leader:
        leader = await rig.lead("c1")
    rig.nodes = Nodes(rig.store, rig.clock, start_placement(), world="c" * 16)
    await rig.nodes.appear()
    await rig.nodes.report(leader.desk)
    await leader.turns()
    assert ended(leader) == [MigrationState.ABORTED]
    assert "world lost" in leader.group.state.migrations()[0].reason
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert (pointer.world, pointer.digest, pointer.epoch) == ("c" * 16, start_placement().digest, before.epoch + 1)
    check_history(leader)
    rig.clock.advance(1)
    await rig.nodes.report(leader.desk, tilted(), 4)
    assert (await leader.cycle()).kind is VerdictKind.STARTED
    assert await finish(rig, leader) is MigrationState.DONE


async def test_a_node_that_can_not_stage_ends_the_migration(rig: Rig) -> None:
    leader = await start(rig)
    rig.nodes.failing = {"n1": "rank 2: no memory"}
    assert await finish(rig, leader) is MigrationState.ABORTED
    assert "no memory" in leader.group.state.migrations()[0].reason
    rig.nodes.failing = {}
    assert {rank.digest for rank in rig.nodes.ranks} == {start_placement().digest}


async def test_staging_that_takes_too_long_is_aborted(rig: Rig) -> None:
    leader = await start(rig, stage_timeout_s=10)
    rig.nodes.silent = {"n1"}
    await rig.nodes.act()
    await leader.turns()
    rig.clock.advance(11)
    await leader.turns()
    assert waves(leader)[0] is WaveState.ABORTED
    assert "waiting for n1" in leader.group.state.migrations()[0].reason
    rig.nodes.silent = set()
    assert await finish(rig, leader) is MigrationState.ABORTED


async def test_after_the_cutover_a_missing_agent_stalls_it_and_its_return_ends_it(rig: Rig) -> None:
    leader = await start(rig, stall_s=10)
    await rig.nodes.act((AckKind.VERIFIED,))
    await leader.turns()
    rig.nodes.silent = {"n1"}
    await rig.nodes.act()
    await leader.turns()
    rig.clock.advance(11)
    await leader.turns()
    assert leader.lead.round is not None
    assert leader.lead.round.stalled[0].nodes == ("n1",)
    assert (await leader.desk.anomalies())[0]["kind"] == "stalled"
    rig.nodes.silent = set()
    assert await finish(rig, leader) is MigrationState.DONE


async def test_ranks_that_are_slow_to_switch_are_not_taken_for_drift(rig: Rig) -> None:
    leader = await start(rig)
    await rig.nodes.act((AckKind.VERIFIED,))
    await leader.turns()
    assert waves(leader)[0] is WaveState.SWITCHING
    rig.clock.advance(adoption.SETTLED_S + 1)
    await rig.nodes.report(leader.desk)
    await leader.turns()
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert pointer.epoch == 2
    assert leader.lead.trouble is None
    assert await finish(rig, leader) is MigrationState.DONE


async def test_ranks_that_serve_what_can_not_be_make_it_dead_until_a_new_world_comes(rig: Rig) -> None:
    leader = await start(rig)
    await rig.nodes.act()
    await leader.turns()
    rig.nodes.ranks[2].digest = "1" * 16
    rig.nodes.tables["1" * 16] = rig.nodes.placement
    await rig.nodes.report(leader.desk)
    await leader.turns()
    assert leader.lead.round is not None
    assert leader.lead.round.migration is not None
    assert leader.lead.round.migration.state is MigrationState.RUNNING
    rig.clock.advance(driver.SETTLED_S + 1)
    await leader.desk.ingest(rig.nodes.body("n1", describe=False))
    await leader.turns()
    assert leader.group.state.migrations()[0].state is MigrationState.DEAD
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.DEAD
    assert "rank 2 serves placement 1111" in verdict.sentence
    rig.nodes = Nodes(rig.store, rig.clock, start_placement(), world="d" * 16)
    await rig.nodes.report(leader.desk)
    await leader.turns()
    assert ended(leader) == [MigrationState.ABORTED]


async def test_a_store_that_does_not_answer_stops_the_work_and_not_the_leader(rig: Rig) -> None:
    leader = await verified(rig)
    store = leader.group.store
    assert isinstance(store, MemoryStore)
    store.faults.unavailable = True
    assert not await leader.turn()
    with pytest.raises(OutcomeUnknown):
        await leader.desk.set_mode("off", "ops", "")
    store.faults.unavailable = False
    store.wake_watches()
    assert await finish(rig, leader) is MigrationState.DONE


@pytest.mark.parametrize("key", [KEYS.world, KEYS.epoch, KEYS.active])
@pytest.mark.parametrize("guarded", [True, False])
async def test_a_change_that_the_leader_has_not_seen_yet_stops_its_cutover(rig: Rig, key: str, guarded: bool) -> None:
    leader = await verified(rig)
    if not guarded:
        blind(leader, key, ModRevision)
    found = await rig.store.get(key)
    assert found is not None
    await rig.store.transact([ModRevision(key, found.mod_revision)], [Put(key, found.value)])
    await leader.lead.turn()
    assert waves(leader)[0] is (WaveState.VERIFIED if guarded else WaveState.SWITCHING)


@pytest.mark.parametrize("guarded", [True, False])
async def test_two_plans_at_once_begin_one_migration(rig: Rig, guarded: bool) -> None:
    leader = await rig.adopted()
    await rig.nodes.report(leader.desk, tilted(), 4)
    plans = [await leader.desk.propose("eplb", "ops", "one"), await leader.desk.propose("eplb", "ops", "two")]
    if not guarded:
        blind(leader, KEYS.active, Missing)
    begun = await asyncio.gather(
        *(leader.desk.execute(plan["id"], 1, "ops", "") for plan in plans), return_exceptions=True
    )
    refused = [answer for answer in begun if isinstance(answer, Conflict)]
    assert len(refused) == (1 if guarded else 0)
    assert len(leader.group.state.migrations()) == (1 if guarded else 2)


async def test_a_new_leader_marks_open_waves_with_its_own_epoch(rig: Rig) -> None:
    leader = await start(rig)
    fresh = await rig.lead("c1")
    await fresh.turns()
    (record,) = fresh.group.state.migrations()
    stored = fresh.group.state.journey(record.id).waves[1]
    assert stored.leader == fresh.lead.term.epoch
    assert stored.leader.revision > leader.lead.term.epoch.revision
