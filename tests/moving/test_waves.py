"""Hundreds of random waves between random valid placements, under traffic, and every answer checked.

Once with all ranks in one process (many waves), once with real processes that meet only in gloo and in transfers, and
are driven through the engine link as an agent would.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplane.errors import LinkLost, LinkRefused
from eplane.placement import Placement, linear
from eplane.plan import Identity
from runtime.cells import CellState
from runtime.link.client import LinkClient
from runtime.link.messages import RankStatus, StagedState
from tests.moving import ranks
from tests.moving.rig import LEADER, RealGroup, is_verified, random_target, wave

LAYERS, EXPERTS, SLOTS, SPARE = 2, 8, 4, 5
ROOM = 2  # Bundles that a wave may bring to one rank; two waves and what retires fit the spare cells.


def test_hundreds_of_waves_in_one_process() -> None:
    rng = np.random.default_rng(11)
    group = RealGroup(3, LAYERS, EXPERTS, SLOTS, SPARE)
    ended, torn = threading.Event(), []
    watcher = threading.Thread(target=watch, args=(group, ended, torn))
    watcher.start()
    live, epoch, moved, aborted, number = group.start, 1, 0, 0, 0
    while moved < 200:
        target = random_target(live, rng, ROOM)
        if target.digest == live.digest:
            continue
        number += 1
        tokens = int(rng.integers(0, 4))
        names = {"migration": f"m{number}", "epoch": epoch + 1}
        if rng.random() < 0.15:
            identity = group.stage(live, target, **names)
            for _ in range(int(rng.integers(0, 3))):
                group.step(tokens)
            for rank in group.ranks:
                rank.port.abort(identity, LEADER)
            group.until(lambda s: s.clean, tokens)
            aborted += 1
        else:
            group.move(live, target, tokens, **names)
            live, epoch, moved = target, epoch + 1, moved + 1
        for rank in group.ranks:
            assert (rank.switch.live.digest, rank.pool.count(CellState.LIVE)) == (live.digest, held(live, rank.rank))
            assert rank.pool.count(CellState.FREE) == rank.pool.cells - held(live, rank.rank)
    group.step(tokens=50)
    ended.set()
    watcher.join()
    assert torn == []
    assert aborted > 10
    assert group.checked > 1000
    assert group.wrong == 0
    assert all(rank.checkpoint_reads == 0 for rank in group.ranks)
    group.close()


def watch(group: RealGroup, ended: threading.Event, torn: list[RankStatus]) -> None:
    """What an agent reads at any moment must be of one moment."""
    while not ended.wait(0.001):
        for rank in group.ranks:
            status = rank.port.status()
            last, live = status.last_switched, status.live
            if last is not None and (live.digest, live.epoch) != (last.digest, last.epoch):
                torn.append(status)
            if status.clean and (status.armed is not None or status.staged is not None or status.cells_retired):
                torn.append(status)


def held(placement: Placement, rank: int) -> int:
    return int((placement.by_rank()[:, rank] >= 0).sum())


class Driver:
    """Drives rank processes through their links, as the agents of one group do."""

    def __init__(self, setting: ranks.Setting) -> None:
        self.setting = setting
        self.clients = [LinkClient(f"{setting.folder}/rank{rank}.sock") for rank in range(setting.ranks)]
        self.peers: dict[int, str] = {}
        self.live = linear(setting.layers, setting.experts, setting.ranks, setting.slots)

    async def open(self) -> None:
        for rank, client in enumerate(self.clients):
            for _ in range(600):
                try:
                    self.peers[rank] = (await client.connect("agent")).transfer_address
                    break
                except LinkLost:
                    await asyncio.sleep(0.05)
            await client.adopt(self.setting.world, 1, self.live.digest, LEADER)

    async def __aenter__(self) -> Driver:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.close()

    async def stage(self, base: Placement, target: Placement, number: int, epoch: int) -> Identity:
        for rank, client in enumerate(self.clients):
            command = wave(
                self.setting.world,
                base,
                target,
                rank,
                migration=f"m{number}",
                number=number,
                epoch=epoch,
                peers=self.peers,
            )
            await client.stage(command)
        return command.identity

    async def until(self, wanted: Callable[[RankStatus], bool]) -> None:
        for client in self.clients:
            for _ in range(4000):
                status = await client.status()
                if wanted(status):
                    break
                await asyncio.sleep(0.002)
            else:
                raise AssertionError(status)

    async def arm(self, identity: Identity, rng: np.random.Generator) -> None:
        for rank in rng.permutation(len(self.clients)):
            await self.clients[rank].arm(identity, LEADER)
            await asyncio.sleep(float(rng.random()) * 0.004)


def started(folder: Path, **names: int | bool | None) -> tuple[ranks.Setting, list[ranks.ForkServerProcess]]:
    setting = ranks.Setting(str(folder), secrets.token_hex(8), 3, LAYERS, EXPERTS, SLOTS, SPARE, **names)  # type: ignore[arg-type]
    return setting, ranks.start(ranks.serve, setting.ranks, setting)


def results(folder: Path, count: int) -> list[dict[str, object]]:
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(count)]


async def test_waves_between_real_processes(tmp_path: Path) -> None:
    """60 waves, the next one staged while the last one switches, some aborted; idle spans included."""
    setting, processes = started(tmp_path)
    async with Driver(setting) as driver:
        live, epoch, aborted = await many_waves(driver, 60)
        (tmp_path / "stop").touch()
        codes = await asyncio.to_thread(ranks.join, processes)
    assert codes == [0, 0, 0]
    found = results(tmp_path, 3)
    assert [r["ended"] for r in found] == [None] * 3
    assert {(r["digest"], r["epoch"]) for r in found} == {(live.digest, epoch)}
    assert total(found, "wrong") == 0
    assert total(found, "checked") > 1000
    assert min(total([r], "ticks") for r in found) > 20
    assert aborted > 3


async def many_waves(driver: Driver, waves: int) -> tuple[Placement, int, int]:
    """(live placement, its epoch, waves that were aborted) in the end."""
    rng = np.random.default_rng(5)
    epoch, aborted, before = 1, 0, driver.live
    staged: tuple[Identity, Placement] | None = None
    for number in range(1, waves + 1):
        target = before
        while target.digest == before.digest:
            target = random_target(before, rng, ROOM)
        epoch += 1
        # `before` may be armed and not live yet: then this wave stages beside it.
        identity = await driver.stage(before, target, number, epoch)
        if staged is not None:
            last = staged[0]
            await driver.until(lambda s, last=last: s.last_switched == last)  # type: ignore[misc]
            staged = None
        if rng.random() < 0.15:
            for client in driver.clients:
                await client.abort(identity, LEADER)
            await driver.until(lambda s: s.clean and s.live.digest == before.digest)  # noqa: B023
            epoch, aborted = epoch - 1, aborted + 1
            continue
        await driver.until(lambda s: s.staged is not None and s.staged.state is StagedState.VERIFIED)
        await driver.arm(identity, rng)
        staged, before = (identity, target), target
    await driver.until(lambda s: s.clean)
    return before, epoch, aborted


async def one_wave(driver: Driver) -> None:
    """Exchanges two experts of which no rank has a second copy, so that a rank that is late serves the wrong one."""
    base = driver.live
    table = base.p2l.copy()
    single = [e for e in range(EXPERTS) if len(base.replicas(0, e)) == 1]
    a = base.replicas(0, single[0])[0]
    b = next(base.replicas(0, e)[0] for e in single if base.rank_of(base.replicas(0, e)[0]) != base.rank_of(a))
    table[:, [a, b]] = table[:, [b, a]]
    identity = await driver.stage(base, Placement(table, base.ranks, EXPERTS), 1, 2)
    await driver.until(lambda s: s.staged is not None and s.staged.state is StagedState.VERIFIED)
    await driver.arm(identity, np.random.default_rng(0))


async def test_an_idle_group_moves_too(tmp_path: Path) -> None:
    """No token at all: ticks carry the agreement."""
    (tmp_path / "idle").touch()
    setting, processes = started(tmp_path)
    async with Driver(setting) as driver:
        await one_wave(driver)
        await driver.until(lambda s: s.clean and s.live.epoch == 2)
        (tmp_path / "stop").touch()
        assert await asyncio.to_thread(ranks.join, processes) == [0, 0, 0]
    assert {(r["checked"], r["ended"]) for r in results(tmp_path, 3)} == {(0, None)}


@pytest.mark.parametrize("stamped", [True, False])
async def test_tooth_one_rank_switches_late(tmp_path: Path, stamped: bool) -> None:
    """With the stamp all ranks see it in the very exchange and stop; without it, tokens are wrong."""
    (tmp_path / "busy").touch()
    setting, processes = started(tmp_path, late=1, trust_headers=not stamped)
    async with Driver(setting) as driver:
        await one_wave(driver)
        if not stamped:
            await driver.until(lambda s: s.clean and s.live.epoch == 2)
            (tmp_path / "stop").touch()
        await asyncio.to_thread(ranks.join, processes)
    found = results(tmp_path, 3)
    if stamped:
        assert all("serves placement" in str(r["ended"]) for r in found)
        assert total(found, "wrong") == 0
    else:
        assert [r["ended"] for r in found] == [None] * 3
        assert total(found, "wrong") > 0


def total(found: list[dict[str, object]], name: str) -> int:
    return sum(int(str(result[name])) for result in found)


def test_a_wave_that_needs_more_cells_than_are_free_is_refused_whole() -> None:
    group = RealGroup(2, LAYERS, EXPERTS, SLOTS, 1)
    table = group.start.p2l.copy()
    table[:, [0, SLOTS]] = table[:, [SLOTS, 0]]
    target = Placement(table, 2, EXPERTS)
    with pytest.raises(LinkRefused) as caught:
        group.stage(group.start, target)
    assert caught.value.code == "capacity"
    group.step(tokens=10)
    assert group.wrong == 0
    assert not any(is_verified(rank.port.status()) for rank in group.ranks)
    group.close()
