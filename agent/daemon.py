"""One life of an agent as a process: claims its presence, runs the loop, ends when told or when a newer life takes over."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
from collections.abc import Awaitable, Callable

from agent.collector import Collector
from agent.heartbeat import Heartbeat
from agent.links import Links
from agent.loop import AgentLoop
from agent.mover import Mover
from agent.orders import Orders
from agent.reporter import Reporter
from agent.settings import AgentSettings
from eplane.clock import Clock, SystemClock
from eplane.errors import LeaseLost, StoreUnavailable
from eplane.keys import GroupKeys
from eplane.store.base import Store
from eplane.store.mirror import Mirror

log = logging.getLogger("eplane.agent")
HalfLoop = Callable[[], Awaitable[None]]
# A pass that fails because the store is away is tried again after this long.
RETRY_S = 0.5
EXIT_OK = 0
EXIT_PRESENCE_LOST = 75


async def run(settings: AgentSettings, store: Store, clock: Clock | None = None) -> int:
    """Run until SIGTERM, SIGINT (0) or until the presence key is lost (75: start me again)."""
    clock = clock or SystemClock()
    keys = GroupKeys(settings.group)
    incarnation = secrets.token_hex(8)
    heartbeat = Heartbeat(store, keys, settings.node, incarnation, settings.ttl_s, clock)
    links = Links(settings.link_dir, incarnation, settings.request_timeout_s)
    collector = Collector(settings.replay_windows)
    reporter = Reporter(settings, incarnation, clock.monotonic)
    mover = Mover(store, keys, settings.node, incarnation, settings.request_timeout_s, clock)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    try:
        async with Mirror(store, keys.prefix, clock) as mirror:
            await heartbeat.presence.claim()
            log.info("agent of node %s in group %s, life %s", settings.node, settings.group, incarnation)
            orders = Orders(mirror, keys, settings.node, (await store.status()).cluster_id)
            agent = AgentLoop(settings, clock, orders, links, collector, heartbeat, reporter, mover)
            return await _until_told(agent, heartbeat, stop)
    finally:
        await heartbeat.presence.leave()
        await reporter.close()
        await links.close()
        collector.close()


async def _until_told(agent: AgentLoop, heartbeat: Heartbeat, stop: asyncio.Event) -> int:
    """Both halves of the loop, and whatever may end them. The death of a half is the death of the agent."""
    told = asyncio.create_task(stop.wait())
    lost = asyncio.create_task(heartbeat.presence.lost.wait())
    halves = [asyncio.create_task(_persist(run)) for run in (agent.run_observe, agent.run_obey)]
    try:
        done, _ = await asyncio.wait([told, lost, *halves], return_when=asyncio.FIRST_COMPLETED)
        if told in done:
            return EXIT_OK
        for half in halves:
            if half in done:
                half.result()
        log.warning("the presence key is lost: another life of this agent is here, or the store forgot us")
        return EXIT_PRESENCE_LOST
    except LeaseLost as error:
        log.warning("%s", error)
        return EXIT_PRESENCE_LOST
    finally:
        for task in (told, lost, *halves):
            task.cancel()
        await asyncio.gather(told, lost, *halves, return_exceptions=True)


async def _persist(run_half: HalfLoop) -> None:
    """Go on through outages of the store; every other error is one nobody foresaw, and ends the agent."""
    while True:
        try:
            await run_half()
        except StoreUnavailable as error:
            log.warning("the store does not answer, serving goes on: %s", error)
            await asyncio.sleep(RETRY_S)
