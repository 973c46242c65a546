"""The engine link's contract: one suite that every engine passes, through real sockets.

It runs on the model engine and on the embedded runtime's rank end, with two ranks each.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from eplane.errors import LinkLost, LinkRefused
from eplane.placement import Placement, linear
from eplane.plan import Identity, LeaderEpoch
from eplane.topology import ModelShape
from runtime.link.client import LinkClient
from runtime.link.manifest import manifest_digest
from runtime.link.messages import RankStatus, StageCommand, StagedState, encode
from runtime.link.port import EnginePort
from runtime.link.server import LinkServer
from tests.link.model_engine import ModelGroup
from tests.moving.rig import LEADER, RealGroup, RealRank, wave

RANKS, LAYERS, EXPERTS, SLOTS, SPARE = 2, 2, 6, 4, 3


class Group(Protocol):
    world: str
    start: Placement

    def step(self) -> bool: ...

    def sample(self, first_step: int, last_step: int) -> None: ...


class Rig:
    """A group with a connected client for each rank."""

    def __init__(self, group: Group, ports: list[EnginePort], peers: dict[int, str], folder: Path) -> None:
        self.group = group
        self.world = group.world
        self.start = group.start
        self.peers = peers
        self.slow = False
        self.paths = [folder / f"rank{rank}.sock" for rank in range(RANKS)]
        self.servers = [LinkServer(port, path) for port, path in zip(ports, self.paths, strict=True)]
        self.clients = [LinkClient(path) for path in self.paths]

    async def open(self) -> None:
        for client in self.clients:
            await client.connect("agent-1")
            await client.adopt(self.world, 1, self.start.digest, LEADER)

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        for server in self.servers:
            server.close()

    def target(self, expert_a: int = 1, expert_b: int = 4) -> Placement:
        """The start with two experts of layer 0 exchanged between the ranks' first free places."""
        return exchange(self.start, 0, expert_a, expert_b)

    def command(self, rank: int, target: Placement, base: Placement | None = None, **names: object) -> StageCommand:
        rate = 8.0 if self.slow else None
        return wave(self.world, base or self.start, target, rank, peers=self.peers, bytes_per_s=rate, **names)  # type: ignore[arg-type]

    async def stage(self, target: Placement, base: Placement | None = None, **names: object) -> Identity:
        for rank, client in enumerate(self.clients):
            await client.stage(self.command(rank, target, base, **names))
        return self.command(0, target, base, **names).identity

    async def until(self, rank: int, wanted: Callable[[RankStatus], bool], *, step: bool = True) -> RankStatus:
        for _ in range(2000):
            status = await self.clients[rank].status()
            if wanted(status):
                return status
            if step:
                self.group.step()
            await asyncio.sleep(0.005)
        raise AssertionError(f"rank {rank} never got there: {status}")

    async def verified(self) -> None:
        for rank in range(RANKS):
            await self.until(rank, lambda s: s.staged is not None and s.staged.state is StagedState.VERIFIED)

    async def arm(self, identity: Identity) -> None:
        for client in self.clients:
            await client.arm(identity, LEADER)


def exchange(base: Placement, layer: int, expert_a: int, expert_b: int) -> Placement:
    """`base` with the first replicas of two experts exchanged."""
    table = base.p2l.copy()
    a, b = base.replicas(layer, expert_a)[0], base.replicas(layer, expert_b)[0]
    table[layer, a], table[layer, b] = expert_b, expert_a
    return Placement(table, base.ranks, base.experts)


@pytest.fixture(params=["model engine", "rank"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    if request.param == "rank":
        real = RealGroup(RANKS, LAYERS, EXPERTS, SLOTS, SPARE)
        made = Rig(real, [rank.port for rank in real.ranks], real.addresses, tmp_path)
    else:
        model = ModelGroup(["n0", "n1"], LAYERS, EXPERTS, SLOTS, SPARE)
        made = Rig(model, list(model.ranks), {0: "model:0", 1: "model:1"}, tmp_path)
    await made.open()
    yield made
    await made.close()
    if request.param == "rank":
        real.close()


def slow_down(rig: Rig) -> None:
    """From now on bundles arrive so slowly that staging stays open."""
    rig.slow = True
    if isinstance(rig.group, ModelGroup):
        rig.group.hold = True


async def refused(call: Awaitable[object], code: str) -> str:
    with pytest.raises(LinkRefused) as caught:
        await call
    assert caught.value.code == code, caught.value
    assert len(str(caught.value)) > 10
    return str(caught.value)


async def test_describe_manifest_placement(rig: Rig) -> None:
    described = [await client.describe() for client in rig.clients]
    first = described[0]
    assert [d.rank for d in described] == [0, 1]
    assert (first.layers, first.experts, first.slots) == (LAYERS, EXPERTS, SLOTS)
    assert first.cells == LAYERS * SLOTS + SPARE
    assert first.cells_free == SPARE
    assert first.digest == rig.start.digest
    assert first.epoch == 1
    manifest = await rig.clients[0].manifest()
    assert first.manifest_digest == described[1].manifest_digest
    assert first.manifest_digest == manifest_digest(manifest.manifest, manifest.digests)
    assert first.bundle_bytes == manifest.manifest.bundle_bytes
    placement = await rig.clients[1].placement()
    assert (placement.p2l == rig.start.p2l).all()
    assert np.allclose(placement.shares, rig.start.even_shares())


async def test_a_wave_switches_when_all_ranks_are_armed(rig: Rig) -> None:
    target = rig.target()
    identity = await rig.stage(target)
    await rig.verified()
    status = await rig.clients[0].status()
    assert status.staged is not None
    assert (status.staged.done, status.staged.total) == (1, 1)
    assert not status.clean
    await rig.clients[0].arm(identity, LEADER)
    for _ in range(3):
        assert not rig.group.step(), "one armed rank of two must not switch"
    await rig.clients[1].arm(identity, LEADER)
    assert [rig.group.step(), rig.group.step()] == [False, True], "agreed in one step, switched at the next"
    switched = (await rig.clients[0].status()).step
    for rank in range(RANKS):
        status = await rig.until(rank, lambda s: s.clean)
        assert (status.live.digest, status.live.epoch) == (target.digest, 2)
        assert (status.last_switched, status.armed, status.staged) == (identity, None, None)
        assert status.last_step_under_old == switched - 1
        assert (status.cells_free, status.cells_retired) == (SPARE, 0)
    assert ((await rig.clients[0].placement()).p2l == target.p2l).all()


async def test_every_call_can_be_repeated(rig: Rig) -> None:
    identity = await rig.stage(rig.target())
    assert await rig.stage(rig.target()) == identity
    await rig.verified()
    assert await rig.stage(rig.target()) == identity
    await rig.arm(identity)
    await rig.arm(identity)
    assert (await rig.clients[0].stage(rig.command(0, rig.target()))).armed == identity
    await rig.until(0, lambda s: s.last_switched == identity)
    assert (await rig.clients[0].arm(identity, LEADER)).armed is None
    assert (await rig.clients[0].stage(rig.command(0, rig.target()))).staged is None
    other = dataclasses.replace(identity, migration="m9")
    for _ in range(2):
        assert (await rig.clients[0].abort(other, LEADER)).live.digest == rig.target().digest


async def test_abort_frees_the_cells_and_is_for_good(rig: Rig) -> None:
    slow_down(rig)
    identity = await rig.stage(rig.target())
    assert (await rig.clients[0].status()).cells_free == SPARE - 1
    for client in rig.clients:
        await client.abort(identity, LEADER)
    for rank in range(RANKS):
        status = await rig.until(rank, lambda s: s.clean)
        assert (status.live.digest, status.cells_free, status.staged) == (rig.start.digest, SPARE, None)
    await refused(rig.clients[0].stage(rig.command(0, rig.target())), "unknown_identity")
    await refused(rig.clients[0].arm(identity, LEADER), "unknown_identity")


async def test_no_way_back_after_arm(rig: Rig) -> None:
    identity = await rig.stage(rig.target())
    await rig.verified()
    await rig.clients[0].arm(identity, LEADER)
    await refused(rig.clients[0].abort(identity, LEADER), "already_armed")
    await rig.clients[1].arm(identity, LEADER)
    await rig.until(0, lambda s: s.last_switched == identity)
    await refused(rig.clients[0].abort(identity, LEADER), "already_armed")


async def test_arm_needs_every_bundle_verified(rig: Rig) -> None:
    slow_down(rig)
    identity = await rig.stage(rig.target())
    await refused(rig.clients[0].arm(identity, LEADER), "not_verified")
    await refused(rig.clients[0].arm(dataclasses.replace(identity, epoch=3), LEADER), "unknown_identity")


async def test_an_older_leader_is_refused(rig: Rig) -> None:
    identity = await rig.stage(rig.target(), leader=LeaderEpoch(7, 20))
    client = rig.clients[0]
    await refused(client.arm(identity, LeaderEpoch(7, 19)), "stale_leader")
    await refused(client.abort(identity, LeaderEpoch(7, 19)), "stale_leader")
    await refused(client.stage(rig.command(0, rig.target(), migration="m2", leader=LEADER)), "stale_leader")
    await refused(client.adopt(rig.world, 5, rig.start.digest, LEADER), "stale_leader")
    assert (await client.status()).leader_epoch == LeaderEpoch(7, 20)
    await client.abort(identity, LeaderEpoch(7, 21))
    assert (await client.status()).leader_epoch == LeaderEpoch(7, 21)


async def test_another_store_comes_in_by_adoption_only(rig: Rig) -> None:
    client, wiped = rig.clients[0], LeaderEpoch(8, 1)
    await refused(client.stage(rig.command(0, rig.target(), leader=wiped)), "stale_leader")
    slow_down(rig)
    await client.stage(rig.command(0, rig.target()))
    await client.adopt(rig.world, 1, rig.start.digest, wiped)
    status = await rig.until(0, lambda s: s.clean)
    assert status.leader_epoch == wiped
    await refused(client.stage(rig.command(0, rig.target(), migration="m2")), "stale_leader")
    await refused(client.adopt(rig.world, 1, rig.start.digest, LEADER), "stale_leader")


async def test_what_does_not_fit_is_refused(rig: Rig) -> None:
    client, command = rig.clients[0], rig.command(0, rig.target())
    identity = command.identity
    lost = dataclasses.replace(command, identity=dataclasses.replace(identity, world="0" * 16))
    await refused(client.stage(lost), "unknown_world")
    await refused(client.arm(lost.identity, LEADER), "unknown_world")
    await refused(client.adopt("0" * 16, 2, rig.start.digest, LEADER), "unknown_world")
    await refused(client.adopt(rig.world, 2, rig.target().digest, LEADER), "digest_mismatch")
    await refused(client.stage(dataclasses.replace(command, base_digest="ab" * 8)), "wrong_base")
    old = dataclasses.replace(command, identity=dataclasses.replace(identity, epoch=1))
    await refused(client.stage(old), "wrong_base")
    other = dataclasses.replace(command, identity=dataclasses.replace(identity, digest="ab" * 8))
    await refused(client.stage(other), "digest_mismatch")
    await refused(client.stage(dataclasses.replace(command, loads=())), "bad_request")
    bad_shares = np.zeros_like(rig.start.even_shares())
    await refused(client.stage(dataclasses.replace(command, shares=bad_shares)), "bad_request")
    nothing = [dataclasses.replace(change, expert=-1) for change in command.changes]
    await refused(client.stage(dataclasses.replace(command, changes=tuple(nothing))), "bad_request")
    status = await client.status()
    assert status.clean, "a refused command leaves nothing behind"
    assert status.cells_free == SPARE


async def test_more_bundles_than_free_cells_are_refused(rig: Rig) -> None:
    target = rig.start
    for layer, a, b in ((0, 1, 4), (0, 2, 5), (1, 1, 4), (1, 2, 5)):
        target = exchange(target, layer, a, b)
    await refused(rig.clients[0].stage(rig.command(0, target)), "capacity")
    assert (await rig.clients[0].status()).cells_free == SPARE


async def test_a_newer_migration_drops_an_older_unarmed_one(rig: Rig) -> None:
    slow_down(rig)
    first = await rig.stage(rig.target())
    await refused(rig.clients[0].stage(rig.command(0, rig.target(2, 5), number=2, epoch=3)), "busy")
    second = rig.command(0, rig.target(2, 5), migration="m2")
    status = await rig.clients[0].stage(second)
    assert status.staged is not None
    assert status.staged.identity == second.identity
    assert status.cells_free == SPARE - 1
    await refused(rig.clients[0].arm(first, LEADER), "unknown_identity")


async def test_the_next_wave_stages_while_the_last_one_switches(rig: Rig) -> None:
    one, two = rig.target(), exchange(rig.target(), 1, 1, 4)
    first = await rig.stage(one)
    await rig.verified()
    await rig.clients[0].arm(first, LEADER)
    stale = rig.command(0, exchange(rig.start, 1, 1, 4), number=2, epoch=3)
    await refused(rig.clients[0].stage(stale), "wrong_base")
    second = rig.command(0, two, base=one, number=2, epoch=3)
    await rig.clients[0].stage(second)
    await rig.until(0, lambda s: s.staged is not None and s.staged.state is StagedState.VERIFIED)
    await refused(rig.clients[0].arm(second.identity, LEADER), "already_armed")
    await rig.clients[1].arm(first, LEADER)
    await rig.until(0, lambda s: s.last_switched == first)
    await rig.clients[1].stage(rig.command(1, two, base=one, number=2, epoch=3))
    await rig.verified()
    await rig.arm(second.identity)
    for rank in range(RANKS):
        status = await rig.until(rank, lambda s: s.clean and s.last_switched == second.identity)
        assert (status.live.digest, status.live.epoch, status.cells_free) == (two.digest, 3, SPARE)
        # An agent may still ask about the wave before: it has switched, and that is for good.
        assert (await rig.clients[rank].arm(first, LEADER)).last_switched == second.identity
        await refused(rig.clients[rank].abort(first, LEADER), "already_armed")


async def test_shares_are_a_hint_for_the_live_placement(rig: Rig) -> None:
    shares = rig.start.even_shares()
    slots = rig.start.replicas(0, 3)
    assert len(slots) == 2
    shares[0, list(slots)] = [0.25, 0.75]
    client = rig.clients[0]
    assert not await client.set_shares(rig.target().digest, shares)
    assert await client.set_shares(rig.start.digest, shares)
    rig.group.step()
    assert np.allclose((await client.placement()).shares, shares)
    shares[0, slots[0]] = 0.5
    await refused(client.set_shares(rig.start.digest, shares), "bad_request")


async def test_a_newer_agent_takes_the_session_for_good(rig: Rig) -> None:
    old, new = rig.clients[0], LinkClient(rig.paths[0])
    await new.connect("agent-2")
    with pytest.raises((LinkRefused, LinkLost)):
        await old.status()
    await refused(old.connect("agent-1"), "superseded")
    assert (await new.status()).rank == 0
    again = LinkClient(rig.paths[0])
    await again.connect("agent-2", LeaderEpoch(7, 30))
    assert (await again.status()).leader_epoch == LeaderEpoch(7, 30)
    await new.close()
    await again.close()


async def test_samples_are_told_window_by_window(rig: Rig) -> None:
    client = rig.clients[1]
    said = await client.describe()
    assert said.capabilities.routing_sample
    assert (await client.samples(0)).samples == ()
    rig.group.sample(0, 8)
    rig.group.sample(8, 11)
    reply = await client.samples(0)
    assert reply.world == rig.world
    assert [one.key for one in reply.samples] == [(1, 0, 8), (1, 8, 11)]
    shape = ModelShape(said.model, said.layers, said.experts, said.top_k, said.bundle_bytes)
    for one in reply.samples:
        one.check(shape)
        assert len(one.sample) <= one.sample.tokens == 100
    assert [one.key for one in (await client.samples(8)).samples] == [(1, 8, 11)]
    assert (await client.samples(11)).samples == ()
    await refused(client._call("samples", {"after_step": -1}), "bad_request")
    await refused(client._call("samples", {}), "bad_request")
    for step in range(11, 51):
        rig.group.sample(step, step + 1)
    assert len((await client.samples(0)).samples) == 16, "old ones are let go"


@pytest.mark.parametrize("engine", ["model engine", "rank"])
async def test_an_engine_that_samples_nothing_says_so_and_keeps_its_link(engine: str, tmp_path: Path) -> None:
    rank = RealRank("ab" * 8, 0, linear(1, 4, 1, 4), 0, samples=False)
    port: EnginePort = rank.port if engine == "rank" else ModelGroup(["n0"], 1, 4, 4, 0, samples=False).ranks[0]
    server, client = LinkServer(port, tmp_path / "rank0.sock"), LinkClient(tmp_path / "rank0.sock")
    assert not (await client.connect("agent-1")).capabilities.routing_sample
    await refused(client.samples(0), "bad_request")
    assert (await client.status()).rank == 0
    await client.close()
    server.close()
    rank.close()


async def test_noise_is_refused_and_harms_nobody(rig: Rig) -> None:
    reader, writer = await asyncio.open_unix_connection(str(rig.paths[0]))
    for frame in (
        encode({"id": 1, "call": "status", "args": {}}),
        encode({"id": 1, "call": "hello", "args": {}}),
        encode({"id": -1, "call": "status", "args": []}),
        (3).to_bytes(4, "big") + b"{]}",
        (2).to_bytes(4, "big") + b"[]",
    ):
        writer.write(frame)
        size = int.from_bytes(await reader.readexactly(4), "big")
        assert b'"error"' in await reader.readexactly(size)
    writer.write((2**31).to_bytes(4, "big"))
    assert await reader.read() == b"", "a frame over the limit ends the connection"
    writer.close()
    await refused(rig.clients[0]._call("explode", {}), "bad_request")
    assert (await rig.clients[0].status()).clean
