"""Migrations from the first record to the last, on a memory store: every order of events ends by itself, safely."""

from __future__ import annotations

from controller.verdict import VerdictKind
from eplane.migration import MigrationState
from eplane.records import HistoryKind
from tests.controller.conftest import Rig
from tests.controller.rig import ended, settings, tilted


async def start(rig: Rig, name: str = "c0", **values: object):  # type: ignore[no-untyped-def]
    if values:
        await settings(rig.store, policy="eplb", confirm=False, cooldown_s=0, min_window_tokens=10, **values)
    leader = await rig.adopted(name)
    await rig.nodes.report(leader.desk, tilted(), 4)
    verdict = await leader.cycle()
    assert verdict.kind is VerdictKind.STARTED, verdict.sentence
    return leader


async def test_a_tilt_is_levelled_in_waves_and_every_epoch_has_its_record(rig: Rig) -> None:
    leader = await start(rig, max_moves_per_wave=2)
    before = leader.group.state.placement(1)
    for _ in range(40):
        await rig.nodes.act()
        await leader.turns()
        if leader.group.state.active() is None:
            break
    assert ended(leader) == [MigrationState.DONE]
    (record,) = leader.group.state.migrations()
    plan = leader.group.state.plan(record.plan)
    assert len(plan.waves) > 1
    pointer = leader.group.state.epoch()
    assert pointer is not None
    assert pointer.epoch == 1 + len(plan.waves)
    histories = leader.group.state.histories()
    assert sorted(histories) == list(range(1, pointer.epoch + 1))
    assert [histories[e].made_by for e in sorted(histories)] == [HistoryKind.ADOPTION] + [HistoryKind.WAVE] * len(plan.waves)
    assert leader.group.state.placement().digest == plan.target_digest
    assert plan.applied_to(before)[-1].digest == plan.target_digest
    assert all(rank.digest == plan.target_digest for rank in rig.nodes.ranks)
    await rig.nodes.report(leader.desk, tilted(), 8)
    shown = await leader.desk.status()
    promised = plan.predicted
    assert promised.balancedness_after > promised.balancedness_before + 0.1
    assert shown["balancedness"]["now"] > promised.balancedness_after - 0.02
