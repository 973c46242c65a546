"""Whole controllers with their elections, timers and tasks: seats change hands, work goes on, nothing dies silently."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from controller.daemon import Controller
from controller.settings import ControllerSettings
from eplane.clock import SystemClock
from eplane.errors import NotFound, NotLeader, SettingsError, StoreError
from eplane.migration import MigrationState
from eplane.records import Mode
from eplane.store.base import Store
from eplane.store.etcd import EtcdStore
from eplane.store.memory import MemoryStore
from tests.controller.rig import GROUP, KEYS, HereSolver, Nodes, settings, start_placement, tilted
from tests.etcd_process import EtcdProcess

QUICK: dict[str, Any] = {
    "policy": "eplb",
    "confirm": False,
    "cooldown_s": 0,
    "min_window_tokens": 10,
    "interval_s": 0.05,
    "max_moves_per_wave": 2,
}


def controller(store: Store, name: str, **more: Any) -> Controller:
    given = {"url": f"http://{name}", "groups": (GROUP,), "controller_id": name, "lease_ttl_s": 1.0, "tick_s": 0.05}
    return Controller(store, ControllerSettings(**{**given, "default_mode": Mode.AUTO, **more}), solver=HereSolver())


@asynccontextmanager
async def running(*controllers: Controller) -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks = [asyncio.create_task(c.run()) for c in controllers]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(holds: Callable[[], object], what: str) -> None:
    """Poll; the test's own time-out ends it when it never comes."""
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


def leads(*controllers: Controller) -> Controller | None:
    return next((c for c in controllers if c.is_leader(GROUP)), None)


@asynccontextmanager
async def acting(nodes: Nodes, *controllers: Controller) -> AsyncIterator[None]:
    """Agents that report to whoever leads and carry out what the store says, until the block ends."""

    async def act() -> None:
        while True:
            with suppress(StoreError, NotLeader):
                await nodes.act()
                leader = leads(*controllers)
                if leader is not None:
                    await nodes.report(leader.desk(GROUP), tilted(), 2)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(act())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def outcomes(of: Controller) -> list[MigrationState]:
    return [m.state for m in of.desk(GROUP).group.state.migrations()]


async def test_a_seat_changes_hands_in_the_middle_of_a_migration_and_it_ends(request: pytest.FixtureRequest) -> None:
    store = MemoryStore()
    nodes = Nodes(store, SystemClock(), start_placement())
    await nodes.appear()
    await settings(store, **QUICK)
    one, two = (controller(store.connect(), name) for name in ("c0", "c1"))
    async with running(one, two) as tasks, acting(nodes, one, two):
        await until(lambda: leads(one, two), "a leader")
        first = leads(one, two)
        assert first is not None
        second = two if first is one else one
        await until(lambda: outcomes(first) == [MigrationState.RUNNING], "a migration")
        with pytest.raises(NotLeader, match=first.leader_url(GROUP) or "no url"):
            await second.desk(GROUP).pause("ops", "")
        tasks[0 if first is one else 1].cancel()
        await until(lambda: second.is_leader(GROUP), "the other one leading")
        await until(lambda: MigrationState.DONE in outcomes(second), "the end of the migration")
        assert second.leader_url(GROUP) == ("http://c1" if second is two else "http://c0")
        assert not first.is_leader(GROUP)
        shown = await second.desk(GROUP).status()
        assert shown["verdict"]["kind"] in {"level", "not_worth_it", "no_load", "migrating", "starting"}
        text = second.metrics_text().decode()
        assert 'eplane_leader{group="g"} 1.0' in text
        assert "eplane_task_deaths_total{" not in text


async def test_on_a_real_etcd_that_dies_in_the_middle_it_ends_too(etcd: EtcdProcess) -> None:
    stores = [EtcdStore([etcd.endpoint], give_up_s=2) for _ in range(2)]
    nodes = Nodes(stores[0], SystemClock(), start_placement())
    await nodes.appear()
    await settings(stores[0], **QUICK)
    one = controller(stores[1], "c0")
    async with running(one), acting(nodes, one):
        await until(lambda: outcomes(one) == [MigrationState.RUNNING], "a migration")
        etcd.kill()
        await asyncio.sleep(0.3)
        etcd.start()
        await until(lambda: MigrationState.DONE in outcomes(one), "the end of the migration")
        pointer = one.desk(GROUP).group.state.epoch()
        assert pointer is not None
        histories = one.desk(GROUP).group.state.histories()
        assert sorted(histories)[-1] >= pointer.epoch - 1
        assert {rank.digest for rank in nodes.ranks} <= {h.digest for h in histories.values()}
    for store in stores:
        await store.close()


async def test_a_driver_that_hangs_loses_the_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    one = controller(store.connect(), "c0", progress_limit_s=0.5)
    async with running(one):
        await until(lambda: one.is_leader(GROUP), "a leader")
        lead = one.desk(GROUP).lead()
        assert lead is not None

        async def hang() -> bool:
            await asyncio.sleep(3600)
            return False

        monkeypatch.setattr(lead, "turn", hang)
        two = controller(store.connect(), "c1")
        async with running(two):
            await until(lambda: two.is_leader(GROUP), "the other one leading")
            assert lead.term.ended
            assert not one.is_leader(GROUP)


async def test_a_task_that_dies_costs_the_seat_and_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    one = controller(MemoryStore(), "c0")
    async with running(one):
        await until(lambda: one.is_leader(GROUP), "a leader")
        lead = one.desk(GROUP).lead()
        assert lead is not None

        async def break_down() -> bool:
            raise ZeroDivisionError("nobody foresaw it")

        monkeypatch.setattr(lead, "turn", break_down)
        lead.nudge.set()
        await until(lambda: one.desk(GROUP).lead() not in (None, lead), "a new term")
        assert lead.term.ended
        assert b'eplane_task_deaths_total{group="g",task="drive"} 1.0' in one.metrics_text()
        assert b'eplane_terms_total{group="g"} 2.0' in one.metrics_text()


async def test_many_groups_have_a_leader_each() -> None:
    store = MemoryStore()
    one = controller(store.connect(), "c0", groups=("a", "b"))
    async with running(one):
        await until(lambda: one.is_leader("a") and one.is_leader("b"), "both groups led")
        with pytest.raises(NotFound, match="known are a, b"):
            one.desk("c")
    found = await store.list(KEYS.prefix.replace("/g/", "/"))
    assert not [kv.key for kv in found.items if kv.key.endswith("/leader")]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"groups": ()}, "groups"),
        ({"groups": ("a", "a")}, "groups"),
        ({"groups": ("a/b",)}, "groups"),
        ({"groups": ("a",), "tick_s": 20.0}, "progress_limit_s"),
        ({"groups": ("a",), "lease_ttl_s": 0.1}, "lease_ttl_s"),
    ],
)
def test_settings_of_a_controller_name_what_they_refuse(given: dict[str, Any], field: str) -> None:
    with pytest.raises(SettingsError) as error:
        ControllerSettings(url="http://x", **given)
    assert error.value.field == field


def test_the_controller_imports_without_torch_and_without_compiled_kernels() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import controller.daemon, controller.solving\n"
        "print('numba' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["False", "False"]
