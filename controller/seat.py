"""A controller's place in one group: it waits for the seat, leads while it holds it, and waits again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from controller.group import Group
from controller.history import prune
from controller.lead import Lead
from controller.loop import Loop
from controller.settings import ControllerSettings
from controller.term import Term
from controller.verdict import VerdictKind
from eplane.election import Election, ProgressGate
from eplane.errors import EPlaneError, LeaseLost, StoreError, StoreUnavailable
from eplane.plan import LeaderEpoch
from eplane.records import LeaderRecord, encode

log = logging.getLogger(__name__)
RETRY_S = 0.5


class Seat:
    """`lead` is the present term; None while another controller leads, or nobody does."""

    def __init__(self, group: Group, settings: ControllerSettings) -> None:
        self.group = group
        self.lead: Lead | None = None
        self._settings = settings
        self._lost = asyncio.Event()

    async def run(self) -> None:
        """Follow and lead, until cancelled. Raises what makes going on senseless: a mirror that ended, a store that denies."""
        await self._mirror_up()
        try:
            while True:
                await self._campaign()
        finally:
            await self.group.mirror.close()

    async def decide(self) -> None:
        """One control cycle; nothing while another leads. Called by a timer."""
        lead = self.lead
        if lead is None:
            return
        try:
            await Loop(lead).cycle()
        except LeaseLost as error:
            log.warning("group %s: %s", self.group.name, error)
            self._lost.set()

    async def keep_house(self) -> None:
        """Forget the old, mark the stale. Called by a slow timer."""
        lead = self.lead
        if lead is None:
            return
        try:
            await lead.plans.forget_stale()
            await prune(lead.state, lead.term, self.group.clock, self._settings.history_kept)
        except LeaseLost as error:
            log.warning("group %s: %s", self.group.name, error)
            self._lost.set()
        except (EPlaneError, StoreError) as error:
            log.warning("group %s: housekeeping is put off: %s", self.group.name, error)

    async def _mirror_up(self) -> None:
        while True:
            try:
                await self.group.mirror.start()
                return
            except StoreUnavailable as error:
                log.warning("group %s: the store does not answer: %s", self.group.name, error)
                await self.group.clock.sleep(RETRY_S)

    async def _campaign(self) -> None:
        """One campaign and, once won, one term."""
        gate = ProgressGate(self._settings.progress_limit_s, self.group.clock)
        me = encode(LeaderRecord(self._settings.controller_id, self._settings.url))
        election = Election(
            self.group.store, self.group.keys.leader, me, self._settings.lease_ttl_s, self.group.clock, gate
        )
        try:
            won = await election.campaign()
            gate.beat()
            await self._serve_term(election, LeaderEpoch(won.cluster, won.revision), gate)
        finally:
            await election.resign()

    async def _serve_term(self, election: Election, epoch: LeaderEpoch, gate: ProgressGate) -> None:
        group, name = self.group, self.group.name
        await group.mirror.wait(epoch.revision)
        term = Term(group.store, group.mirror, epoch, election.compare())
        group.forget()
        self._lost.clear()
        lead = self.lead = Lead(group, term, gate.beat, self._settings.tick_s)
        group.speak(VerdictKind.STARTING, "this controller has begun to lead; it waits for what the ranks say")
        group.metrics.leader.labels(name).set(1)
        group.metrics.terms.labels(name).inc()
        log.info("leading group %s, epoch of leadership %d", name, epoch.revision)
        tasks: set[asyncio.Task[Any]] = {
            asyncio.create_task(lead.drive(), name="drive"),
            asyncio.create_task(self._wake(lead), name="wake"),
            asyncio.create_task(election.lost.wait(), name="lost"),
            asyncio.create_task(self._lost.wait(), name="ended"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            term.ended, self.lead = True, None
            group.metrics.leader.labels(name).set(0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._account(done)

    async def _account(self, done: set[asyncio.Task[Any]]) -> None:
        """Why a term ended. An error that nobody foresaw is a metric, costs the seat, and is not tried again at once."""
        for task in done:
            error = task.exception()
            if error is None or isinstance(error, LeaseLost):
                log.warning("group %s: the seat is lost%s", self.group.name, f": {error}" if error else "")
                continue
            self.group.metrics.task_deaths.labels(self.group.name, task.get_name()).inc()
            log.error("group %s: the task %s died", self.group.name, task.get_name(), exc_info=error)
            if isinstance(error, StoreError) and not isinstance(error, StoreUnavailable):
                raise error
            await self.group.clock.sleep(RETRY_S)

    async def _wake(self, lead: Lead) -> None:
        """Every change under the group's prefix wakes the driver."""
        async for _ in self.group.mirror.wakeups():
            lead.nudge.set()
