"""A script that moves experts of a running world through the engine link, as an agent and a controller would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from eplane.placement import Placement
from eplane.plan import Identity, LeaderEpoch, Load
from runtime.link.client import LinkClient
from runtime.link.messages import Describe, RankStatus, StageCommand, StagedState
from tests.runtime.serving import Serve

LEADER = LeaderEpoch(7, 3)
PATIENCE_S = 60.0


@dataclass
class Mover:
    """Links to all ranks of a world. `placement` is what is live, by what `placement` and the waves said."""

    links: list[LinkClient]
    facts: list[Describe]
    placement: Placement
    epoch: int = 1

    @classmethod
    async def connect(cls, serve: Serve) -> Mover:
        links = [LinkClient(serve.link(rank)) for rank in range(serve.ranks)]
        facts = [await link.connect(f"{rank:016x}") for rank, link in enumerate(links)]
        told = await links[0].placement()
        placement = Placement(told.p2l, serve.ranks, facts[0].experts)
        for link in links:
            await link.adopt(facts[0].world, 1, placement.digest, LEADER)
        return cls(links, facts, placement)

    def identity(self, target: Placement) -> Identity:
        return Identity(self.facts[0].world, f"{self.epoch:032x}", 1, self.epoch + 1, target.digest)

    async def stage(self, target: Placement) -> Identity:
        """Have every rank fetch and verify what it lacks for `target`."""
        identity = self.identity(target)
        changes = self.placement.delta(target)
        peers = {rank: fact.transfer_address for rank, fact in enumerate(self.facts)}
        moves = self.placement.moves(target)
        for rank, link in enumerate(self.links):
            loads = tuple(
                Load(layer, _slot(target, layer, expert, rank), expert, self._source(layer, expert))
                for layer, expert, to in moves
                if to == rank
            )
            command = StageCommand(identity, LEADER, self.placement.digest, changes, None, loads, peers, None)
            await link.stage(command)
        await self.until(lambda s: s.staged is not None and s.staged.state is StagedState.VERIFIED)
        return identity

    async def switch(self, identity: Identity, target: Placement) -> None:
        """Arm all ranks and wait until all have switched and let their old cells go."""
        for link in self.links:
            await link.arm(identity, LEADER)
        await self.until(lambda s: s.last_switched == identity and s.clean)
        self.placement, self.epoch = target, self.epoch + 1

    async def move(self, target: Placement) -> None:
        await self.switch(await self.stage(target), target)

    async def until(self, met: Callable[[RankStatus], bool]) -> list[RankStatus]:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                statuses = [await link.status() for link in self.links]
                if all(map(met, statuses)):
                    return statuses
                failed = [s.staged for s in statuses if s.staged and s.staged.state is StagedState.FAILED]
                if failed:
                    raise RuntimeError(failed[0].reason)
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for link in self.links:
            await link.close()

    def _source(self, layer: int, expert: int) -> int:
        return self.placement.rank_of(self.placement.replicas(layer, expert)[-1])


def _slot(placement: Placement, layer: int, expert: int, rank: int) -> int:
    return next(s for s in placement.replicas(layer, expert) if placement.rank_of(s) == rank)


def random_wave(base: Placement, rng: np.random.Generator, bundles: int) -> Placement:
    """A valid placement near `base`: at most `bundles` new bundles on any rank; slots may also trade places."""
    table = base.by_rank().copy()
    layers, ranks, slots = table.shape
    for rank in range(ranks):
        for _ in range(int(rng.integers(1, bundles + 1))):
            layer, k = int(rng.integers(layers)), int(rng.integers(slots))
            old = int(table[layer, rank, k])
            others = np.setdiff1d(np.arange(base.experts), table[layer, rank])
            if others.size and (old < 0 or (table[layer] == old).sum() > 1):
                table[layer, rank, k] = rng.choice(others)
        layer = int(rng.integers(layers))
        table[layer, rank] = rng.permutation(table[layer, rank])
    return Placement(table.reshape(layers, -1), ranks, base.experts)
