"""A controller process: any number of groups, led or followed, their timers, and one solver beside it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from datetime import UTC
from typing import Any

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED, JobEvent
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from controller.decide import Solver
from controller.desk import Desk
from controller.group import Group
from controller.lead import Lead
from controller.metrics import Metrics
from controller.seat import Seat
from controller.settings import ControllerSettings, GroupSettings
from controller.solving import SolverProcess
from controller.state import GroupState
from eplane.clock import Clock, SystemClock
from eplane.errors import EPlaneError, FieldError, NotFound
from eplane.keys import GroupKeys
from eplane.store.base import Store
from eplane.store.mirror import Mirror

log = logging.getLogger(__name__)
_EVENTS = {EVENT_JOB_ERROR: "error", EVENT_JOB_MISSED: "missed", EVENT_JOB_MAX_INSTANCES: "piled_up"}


class Controller:
    """`run` serves until cancelled; when something it can not go on without ends, it raises. The store stays the caller's."""

    def __init__(
        self, store: Store, settings: ControllerSettings, clock: Clock | None = None, solver: Solver | None = None
    ) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._own_solver = SolverProcess() if solver is None else None
        self.metrics = Metrics()
        self._seats = {
            name: Seat(self._group(store, name, solver or self._own_solver), settings) for name in settings.groups
        }
        self._intervals: dict[str, float] = {}

    def _group(self, store: Store, name: str, solver: Solver | None) -> Group:
        if solver is None:
            raise NotFound("no solver was given")
        keys = GroupKeys(name)
        mirror = Mirror(store, keys.prefix, self._clock)
        state = GroupState(mirror, keys, self._settings.default_mode)
        return Group(name, store, mirror, state, solver, self._clock, self.metrics)

    # --- what the API asks ---

    def groups(self) -> Sequence[str]:
        return self._settings.groups

    def desk(self, group: str) -> Desk:
        """The desk of a group. NotFound for one that this controller was not started for."""
        seat = self._seat(group)

        def lead() -> Lead | None:
            return seat.lead

        return Desk(seat.group, lead)

    def is_leader(self, group: str) -> bool:
        lead = self._seat(group).lead
        return lead is not None and not lead.term.ended

    def leader_url(self, group: str) -> str | None:
        found = self._seat(group).group.state.leader()
        return found[0].url if found else None

    def metrics_text(self) -> bytes:
        return self.metrics.text()

    def _seat(self, group: str) -> Seat:
        if group not in self._seats:
            raise NotFound(f"no group {group!r:.80} here; known are {', '.join(self._seats)}")
        return self._seats[group]

    # --- running ---

    async def run(self) -> None:
        """Lead or follow every group. A task that dies ends the others, and the process with them: no half-alive controller."""
        timers = self._timers()
        timers.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                if self._own_solver is not None:
                    tasks.create_task(_warm(self._own_solver), name="warm")
                for name, seat in self._seats.items():
                    tasks.create_task(seat.run(), name=f"seat {name}")
        finally:
            timers.shutdown(wait=False)
            if self._own_solver is not None:
                await self._own_solver.close()

    def _timers(self) -> AsyncIOScheduler:
        """Slow timers only. One that is late runs once, soon, and never beside itself."""
        defaults = {"misfire_grace_time": None, "coalesce": True, "max_instances": 1}
        timers = AsyncIOScheduler(timezone=UTC, job_defaults=defaults)
        timers.add_listener(self._heard, EVENT_JOB_ERROR | EVENT_JOB_MISSED | EVENT_JOB_MAX_INSTANCES)
        for name, seat in self._seats.items():
            interval = self._intervals[name] = GroupSettings().interval_s
            timers.add_job(self._decide, "interval", [timers, seat], seconds=interval, id=f"decide {name}")
            timers.add_job(seat.keep_house, "interval", seconds=self._settings.housekeeping_s, id=f"house {name}")
        return timers

    async def _decide(self, timers: AsyncIOScheduler, seat: Seat) -> None:
        await seat.decide()
        name = seat.group.name
        try:
            wanted = seat.group.state.settings().interval_s
        except FieldError as error:
            log.error("group %s: %s", name, error)
            return
        if wanted != self._intervals[name]:
            self._intervals[name] = wanted
            timers.reschedule_job(f"decide {name}", trigger="interval", seconds=wanted)

    def _heard(self, event: JobEvent) -> None:
        job, _, name = str(event.job_id).partition(" ")
        kind = _EVENTS.get(event.code, "error")
        error: Any = getattr(event, "exception", None)
        if error is not None:
            log.error("group %s: the timer %s failed", name, job, exc_info=error)
            self.metrics.task_deaths.labels(name, job).inc()
        self.metrics.timer_events.labels(name, kind).inc()


async def _warm(solver: SolverProcess) -> None:
    """Spares the first decision the wait for compiled kernels. What goes wrong here, the first decision will tell."""
    try:
        await solver.warm()
    except EPlaneError as error:
        log.warning("the solver could not be warmed up: %s", error)
