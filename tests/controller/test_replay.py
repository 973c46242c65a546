"""A replay decides as the controller does: the same sentences, the same plans, on the same load."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from controller.facts import gather
from controller.replay import Cycle, Replay
from controller.settings import GroupSettings
from controller.verdict import Verdict, VerdictKind
from eplane.migration import MigrationState
from eplane.placement import Placement, linear
from eplane.plan import Plan
from eplane.topology import ModelShape, World
from tests.controller.conftest import Rig
from tests.controller.rig import HereSolver, Seated, settings, start_placement, tilted
from tests.controller.test_driver import finish

STEPS = 32
# Time enough for the solver to end by itself: what a clock cuts short need not be cut at the same place twice.
BASE: dict[str, Any] = {"policy": "eplb", "confirm": False, "cooldown_s": 0, "min_window_tokens": 10}
BASE |= {"solver_budget_ms": 20_000}
DRIVEN: list[dict[str, Any]] = [
    {},
    {"confirm": True},
    {"min_gain": 0.99},
    {"cooldown_s": 1000},
    {"moves_per_hour": 5},
    {"moves_per_hour": 14},
    {"bytes_per_hour": 1},
    {"max_moves_per_wave": 2},
    {"policy": "static"},
    {"policy": "eplane"},
    {"min_replicas": 2, "policy": "eplane"},
    {"drained": ["n1"]},
    {"spare_min": 4},
    {"min_window_tokens": 10**9},
    {"horizon_s": 0.1, "interference": 1, "bytes_per_s": 1},
]


async def both(rig: Rig, leader: Seated, replay: Replay, hot: int, windows: int = 4) -> tuple[Verdict, Cycle]:
    """The same load for the ranks of the controller's world and for the replay, then one cycle of each."""
    had = leader.group.book.last_step
    await rig.nodes.report(leader.desk, tilted(hot), windows)
    for seen in leader.group.book.newest(64):
        if seen.window.first_step >= had:
            fell = replay.observe(seen.window.total, STEPS)
            assert np.abs(fell - seen.rank_load).max() <= 2, "a rank counts whole tokens"
    return await leader.cycle(), replay.cycle()


def same(verdict: Verdict, cycle: Cycle, leader: Seated) -> Plan | None:
    """Kind and sentence, and of a plan its waves, prediction and what every goal said."""
    assert cycle.kind is verdict.kind
    if cycle.found is None:
        assert cycle.sentence == verdict.sentence
        return None
    assert verdict.sentence.split("begins, ")[1] == cycle.sentence.split("begins, ")[1]
    plan = max(leader.group.state.plans(), key=lambda p: p.base_epoch)
    assert plan.waves == cycle.found.waves
    assert plan.decisions == cycle.found.verdict.decisions
    assert plan.predicted == cycle.found.estimate.prediction(cycle.found.waves)
    return plan


@pytest.mark.parametrize("values", DRIVEN, ids=[" ".join(f"{k}={v}" for k, v in d.items()) or "plain" for d in DRIVEN])
async def test_the_same_load_gives_the_same_decisions(rig: Rig, values: dict[str, Any]) -> None:
    await settings(rig.store, **{**BASE, **values})
    leader = await rig.adopted()
    record = leader.group.state.world()
    assert record is not None
    replay = Replay(
        record.world, GroupSettings().patched({**BASE, **values}), start_placement(), 0.001, 0, HereSolver()
    )
    for hot in (0, 0, 4, 4, 2):
        verdict, cycle = await both(rig, leader, replay, hot)
        if same(verdict, cycle, leader) is not None:
            assert await finish(rig, leader) is MigrationState.DONE
        facts = gather(leader.group.state, leader.group.book, rig.clock.now())
        assert facts is not None
        assert replay.live.placement.digest == facts.placement.digest
        mine = replay.facts().spent
        assert (mine.moves, mine.bytes) == (facts.spent.moves, facts.spent.bytes)


def small_world(cells: int = 10, **more: Any) -> World:
    return World("g", "a" * 16, ("n0", "n0", "n1", "n1"), ModelShape("m", 2, 8, 2, 10**6), 3, cells, **more)


def replayed(entry_s: float, delay: int | None = None, cells: int = 10, **values: Any) -> Replay:
    given = {**BASE, "hardware": "cpu", **values}
    return Replay(small_world(cells), GroupSettings().patched(given), start_placement(), entry_s, delay)


def begun(replay: Replay) -> Cycle:
    for _ in range(4):
        replay.observe(tilted(), STEPS)
    cycle = replay.cycle()
    assert cycle.kind is VerdictKind.STARTED
    return cycle


def test_every_wave_serves_and_is_a_valid_placement() -> None:
    """One spare cell a rank makes many waves; one goes live after the other, none before its bundles travelled."""
    replay = replayed(entry_s=0.001, cells=7, max_moves_per_wave=1)
    found = begun(replay).found
    assert found is not None
    assert len(found.waves) > 2
    at, seen = found.before.placement, [found.before.placement.digest]
    legal = [at.digest]
    for wave in found.waves:
        at = wave.applied_to(at)
        legal.append(Placement(at.p2l, at.ranks, at.experts).digest)
    assert at.digest == found.target.digest
    while replay.live.placement.digest != found.target.digest:
        assert replay.cycle().kind is VerdictKind.MIGRATING
        replay.observe(tilted(), STEPS)
        if replay.live.placement.digest != seen[-1]:
            seen.append(replay.live.placement.digest)
    assert seen == legal
    assert replay.cycle().kind is not VerdictKind.MIGRATING
    assert replay.facts().spent.moves == found.moves


def test_a_delay_is_spread_over_the_waves() -> None:
    replay = replayed(entry_s=1.0, delay=6, max_moves_per_wave=1)
    found = begun(replay).found
    assert found is not None
    went = []
    for entry in range(7):
        if replay.live.placement.digest == found.target.digest:
            break
        went.append(entry)
        replay.observe(tilted(), STEPS)
    assert went == list(range(6))
    assert replay.live.shares is found.after.shares


def test_the_links_and_the_rate_limit_set_the_time() -> None:
    """3 bundles of 1 MB at most come to one rank: at 1 MB/s they take seconds, over the links a few milliseconds."""
    fast, slow = begun(replayed(1.0)), begun(replayed(1.0, bytes_per_s=1e6, interference=0))
    assert fast.found is not None
    assert slow.found is not None
    assert slow.migration_s == pytest.approx(fast.migration_s * 1e9 / 1e6)
    assert slow.migration_s >= 1


def test_shares_are_split_anew_between_decisions_and_no_bytes_move() -> None:
    replay = replayed(1.0, min_gain=0.9)
    for _ in range(4):
        replay.observe(tilted(), STEPS)
    even = replay.live.shares
    before = replay.observe(tilted(), STEPS).max()
    replay.resplit()
    assert not np.array_equal(replay.live.shares, even)
    assert replay.observe(tilted(), STEPS).max() < before
    assert replay.facts().spent.moves == 0
    still = replayed(1.0, min_gain=0.9, shares=False)
    for _ in range(4):
        still.observe(tilted(), STEPS)
    still.resplit()
    assert np.array_equal(still.live.shares, even)


def test_an_empty_world_is_filled_by_the_policy() -> None:
    replay = replayed(1.0, policy="eplb")
    replay.observe(tilted(), STEPS)
    replay.place()
    assert replay.live.placement.digest != linear(2, 8, 4, 3).digest
    assert replay.facts().spent.moves == 0


def test_what_the_settings_make_impossible_is_the_cycles_sentence() -> None:
    replay = replayed(1.0, min_replicas=4)
    replay.observe(tilted(), STEPS)
    cycle = replay.cycle()
    assert cycle.kind is VerdictKind.INFEASIBLE
    assert "goal min_replicas cannot be met" in cycle.sentence
