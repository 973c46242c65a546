"""A group on a memory store with four ranks on two nodes, a leader, and a tilted load."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from eplane.clock import ManualClock
from eplane.store.memory import MemoryStore
from tests.controller.rig import HereSolver, Nodes, Seated, seat, settings, start_placement


@dataclass
class Rig:
    """`store`: of the nodes and the tests; each leader has a client of its own."""

    clock: ManualClock
    store: MemoryStore
    nodes: Nodes
    seated: list[Seated] = field(default_factory=list)

    async def lead(self, name: str = "c0", solver: HereSolver | None = None) -> Seated:
        """A new leader, which takes the seat from whoever has it."""
        found = await seat(self.store.connect(), self.clock, name, solver)
        self.seated.append(found)
        return found

    async def adopted(self, name: str = "c0") -> Seated:
        """A leader that has adopted the nodes' world."""
        leader = await self.lead(name)
        await self.nodes.report(leader.desk)
        await leader.turns()
        return leader


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    clock = ManualClock()
    store = MemoryStore(clock)
    nodes = Nodes(store, clock, start_placement())
    await nodes.appear()
    await settings(store, policy="eplb", confirm=False, cooldown_s=0, min_window_tokens=10, solver_budget_ms=10)
    made = Rig(clock, store, nodes)
    yield made
    for seated in made.seated:
        await seated.group.mirror.close()
