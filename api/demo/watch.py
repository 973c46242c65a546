"""Looks at the running stack as any operator would: over REST, at whichever controller and front answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from api.demo.ledger import Ledger, Window
from eplane.errors import PlacementError
from eplane.placement import Placement

Json = dict[str, Any]


@dataclass(slots=True)
class Seen:
    """The latest answers. Times are seconds after the start of the traffic."""

    status: Json = field(default_factory=dict)
    migrations: dict[str, Json] = field(default_factory=dict)
    history: dict[int, Json] = field(default_factory=dict)
    worlds: list[Json] = field(default_factory=list)
    rank_load: list[list[float]] = field(default_factory=list)

    def active(self) -> Json | None:
        """The migration in progress."""
        return next((m for m in self.migrations.values() if m["state"] in ("PLANNED", "RUNNING", "STOPPING")), None)


class Watcher:
    """`look` asks once around. A part that does not answer is asked again next time: under chaos some are always away."""

    def __init__(self, group: str, controllers: Sequence[str], fronts: Sequence[str], ledger: Ledger) -> None:
        self._group = group
        self._controllers = list(controllers)
        self._fronts = fronts
        self._ledger = ledger
        self._http = httpx.AsyncClient(timeout=3.0, trust_env=False)
        self.seen = Seen()
        self.started_at = time.time()
        self._t0 = time.monotonic()

    def start(self) -> None:
        """Second 0 of the demo is now."""
        self.started_at, self._t0 = time.time(), time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._t0

    async def look(self) -> None:
        await self._look_at_fronts()
        status = await self._ask("status")
        if status is not None:
            self.seen.status = status
        load = await self._ask("load")
        if load is not None:
            self._ledger.add(_windows(load))
        for migration in await self._ask("migrations") or []:
            self.seen.migrations[migration["id"]] = migration
        for record in await self._ask("history?limit=64") or []:
            self.seen.history[record["epoch"]] = record

    async def start_placement(self) -> Placement | None:
        """What the ranks serve at the beginning."""
        found = await self._ask("placement")
        if found is None:
            return None
        table = np.array(found["p2l"], dtype=np.int32)
        try:
            return Placement(table, int(found["ranks"]), int(table.max()) + 1)
        except PlacementError:
            return None

    async def close(self) -> None:
        await self._http.aclose()

    async def _look_at_fronts(self) -> None:
        worlds: list[Json] = []
        for url in self._fronts:
            world = await self._get(f"{url}/v1/world")
            if isinstance(world, dict):
                worlds.append(world)
        self.seen.worlds = worlds
        if worlds:
            self._ledger.saw_step(self.seconds, max(int(world["step"]) for world in worlds))

    async def _ask(self, noun: str) -> Any:
        """The answer of the first controller that has one; it is asked first from then on."""
        for url in list(self._controllers):
            answer = await self._get(f"{url}/v1/groups/{self._group}/{noun}")
            if answer is not None:
                self._controllers.remove(url)
                self._controllers.insert(0, url)
                return answer
        return None

    async def _get(self, url: str) -> Any:
        try:
            reply = await self._http.get(url)
            return reply.json() if reply.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None


def _windows(load: Json) -> list[Window]:
    return [
        Window(
            entry["world"],
            entry["digest"],
            int(entry["first_step"]),
            int(entry["last_step"]),
            np.array(entry["rank_load"], dtype=np.float64),
            np.array(entry["load"], dtype=np.float64),
        )
        for entry in load["recent"]
    ]
