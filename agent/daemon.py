"""One life of an agent as a process: claims its presence, runs the loop, ends when told or when a newer life takes over."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable

from agent.collector import Collector
from agent.heartbeat import Heartbeat
from agent.links import Links
from agent.loop import AgentLoop
from agent.mover import Mover
from agent.orders import Orders
from agent.reporter import Reporter
from agent.samples import Samples
from agent.settings import AgentSettings
from eplane.clock import Clock, SystemClock
from eplane.errors import LeaseLost, RecordError, StoreUnavailable, Superseded
from eplane.keys import GroupKeys
from eplane.store.base import Store
from eplane.store.mirror import Mirror

log = logging.getLogger("eplane.agent")
HalfLoop = Callable[[], Awaitable[None]]
# A pass that fails because the store is away is tried again after this long.
RETRY_S = 0.5
EXIT_OK = 0
EXIT_PRESENCE_LOST = 75
EXIT_SUPERSEDED = Superseded.exit_code


def build(settings: AgentSettings, store: Store, clock: Clock | None = None) -> Agent:
    """A new life of the agent, with an incarnation of its own."""
    return Agent(settings, store, secrets.token_hex(8), clock or SystemClock())


class Agent:
    """One life: what it holds, from claim to leave."""

    def __init__(self, settings: AgentSettings, store: Store, incarnation: str, clock: Clock) -> None:
        self._settings = settings
        self._store = store
        self._clock = clock
        self._keys = GroupKeys(settings.group)
        self._incarnation = incarnation
        self._heartbeat = Heartbeat(store, self._keys, settings.node, incarnation, settings.ttl_s, clock)
        self._links = Links(settings.link_dir, incarnation, settings.request_timeout_s)
        self._collector = Collector(settings.replay_windows)
        self._reporter = Reporter(settings, incarnation, clock.monotonic)
        self._mover = Mover(store, self._keys, settings.node, incarnation, settings.request_timeout_s, clock)

    async def run(self, stop: asyncio.Event) -> int:
        """Run until `stop` (0), until the presence is lost (75: start me again), or until a newer life of the agent has it
        (76: it does this node's work; started again, this one would only take the node back)."""
        try:
            async with Mirror(self._store, self._keys.prefix, self._clock) as mirror:
                cluster = (await self._store.status()).cluster_id
                await self._heartbeat.presence.claim()
                node, group = self._settings.node, self._settings.group
                log.info("agent of node %s in group %s, life %s", node, group, self._incarnation)
                orders = Orders(mirror, self._keys, node, cluster)
                return await self._until_told(self._loop(orders), stop)
        finally:
            await self._heartbeat.presence.leave()
            await self._reporter.close()
            await self._links.close()
            self._collector.close()

    def _loop(self, orders: Orders) -> AgentLoop:
        return AgentLoop(
            self._settings,
            self._clock,
            orders,
            self._links,
            self._collector,
            Samples(self._settings.replay_windows),
            self._heartbeat,
            self._reporter,
            self._mover,
        )

    async def _until_told(self, loop: AgentLoop, stop: asyncio.Event) -> int:
        """Both halves of the loop, and whatever may end them. The death of a half is the death of the agent."""
        told = asyncio.create_task(stop.wait())
        lost = asyncio.create_task(self._heartbeat.presence.lost.wait())
        halves = [asyncio.create_task(_persist(half)) for half in (loop.run_observe, loop.run_obey)]
        try:
            done, _ = await asyncio.wait([told, lost, *halves], return_when=asyncio.FIRST_COMPLETED)
            if told in done:
                return EXIT_OK
            for half in halves:
                if half in done:
                    half.result()
            return await self._lost("the presence key is lost: its lease ran out, or the store forgot us")
        except LeaseLost as error:
            return await self._lost(str(error))
        finally:
            for task in (told, lost, *halves):
                task.cancel()
            await asyncio.gather(told, lost, *halves, return_exceptions=True)

    async def _lost(self, why: str) -> int:
        """Which of the two exit codes. Nothing can be written under the lost presence, whichever it is."""
        try:
            newer = await self._heartbeat.successor()
        except (StoreUnavailable, RecordError):
            newer = None
        if newer is None:
            log.warning("%s", why)
            return EXIT_PRESENCE_LOST
        log.error(
            "superseded: agent life %s has taken node %s over, this one (%s) ends and must not be started again",
            newer, self._settings.node, self._incarnation,
        )  # fmt: skip
        return EXIT_SUPERSEDED


async def _persist(half: HalfLoop) -> None:
    """Go on through outages of the store; every other error is one nobody foresaw, and ends the agent."""
    while True:
        try:
            await half()
        except StoreUnavailable as error:
            log.warning("the store does not answer, serving goes on: %s", error)
            await asyncio.sleep(RETRY_S)
