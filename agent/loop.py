"""The agent on one page: what one node does for its group, again and again.

    observe   link to the ranks, tell them the epoch that the leader made of their world, fold their counters into load
              windows, fetch the routing samples of these, say who is here, post the load to the leader, hand the shares
              that ride back to the ranks
    obey      read the leader's orders in the store, carry them out on the ranks, acknowledge what the engines confirmed

The two run side by side: a leader that answers slowly holds up no migration. Neither is needed for serving: when the
agent is gone the ranks serve on with the placement they have.
"""

from __future__ import annotations

from agent.collector import Collector
from agent.heartbeat import Heartbeat
from agent.links import Links
from agent.mover import Mover
from agent.orders import Orders
from agent.reporter import About, Reporter
from agent.samples import Samples
from agent.settings import AgentSettings
from eplane.clock import Clock


class AgentLoop:
    """Both halves of an agent. Everything it needs is handed in; `run_observe` and `run_obey` end only when cancelled."""

    def __init__(
        self,
        settings: AgentSettings,
        clock: Clock,
        orders: Orders,
        links: Links,
        collector: Collector,
        samples: Samples,
        heartbeat: Heartbeat,
        reporter: Reporter,
        mover: Mover,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._orders = orders
        self._links = links
        self._collector = collector
        self._samples = samples
        self._heartbeat = heartbeat
        self._reporter = reporter
        self._mover = mover
        self._world: str | None = None

    async def observe(self) -> None:
        """Count, and tell."""
        leader = self._orders.leader()
        await self._links.refresh(self._orders.leader_epoch())
        statuses = await self._links.statuses()
        await self._links.adopt(self._orders.adoption(), statuses)
        # Ranks that stand still cost their time-outs, a leader that does costs its own: neither is a loop that hangs.
        self._heartbeat.beat()
        world = self._links.world
        if world != self._world:
            self._reporter.forget_world()
            self._world = world
        windows = self._collector.collect(world, {rank: link.counters for rank, link in self._links.ranks.items()})
        self._reporter.add(windows)
        # After the counts: a rank has the sample of a window before its counts can be read.
        self._samples.take(world, await self._links.samples(self._samples.wanted(windows)))
        await self._heartbeat.tell(world, statuses)
        if leader is None or world is None:
            return
        about = None
        if self._reporter.wants_describe(leader):
            about = About(await self._links.describe(), await self._links.placement())
        replay, said = self._collector.replay(), tuple(statuses.values())
        shares = await self._reporter.report(leader, world, replay, about, said, self._samples.of)
        if shares is not None:
            await self._links.hint(shares.digest, shares.shares)

    async def obey(self) -> None:
        """Carry out what the leader ordered."""
        orders = self._orders.waves()
        if orders:
            await self._mover.carry_out(orders, self._links, self._heartbeat.compare())

    async def run_observe(self) -> None:
        while True:
            await self.observe()
            self._heartbeat.beat()
            await self._clock.sleep(self._settings.report_every_s)

    async def run_obey(self) -> None:
        while True:
            await self.obey()
            await self._clock.sleep(self._settings.move_every_s)
