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
    worlds: list[Json] = field(default_factory=list)
    # Of each rank of each world.
    steps: dict[tuple[int, str], list[list[float]]] = field(default_factory=dict)

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
        self._since: dict[str, int] = {}
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
        for url in self._controllers:
            # Only the leader has them; under chaos two may have thought themselves leader, and both are right.
            self._ledger.add(_windows(await self._get(f"{url}/v1/groups/{self._group}/windows")))
        await self._look_at_migrations()

    async def _look_at_migrations(self) -> None:
        """Every migration with its waves, until it has ended and that was seen."""
        for line in await self._ask("migrations") or []:
            known = self.seen.migrations.get(line["id"])
            if known is None or known["ended_at"] is None or known.get("measured_gain_s") is None:
                whole = await self._ask(f"migrations/{line['id']}")
                if whole is not None:
                    self.seen.migrations[line["id"]] = whole

    async def start_placement(self) -> Placement | None:
        """What the ranks serve at the beginning."""
        found = await self._ask("placement")
        if found is None:
            return None
        try:
            return Placement(np.array(found["p2l"], dtype=np.int32), int(found["ranks"]), int(found["experts"]))
        except PlacementError:
            return None

    async def close(self) -> None:
        await self._http.aclose()

    async def _look_at_fronts(self) -> None:
        worlds: list[Json] = []
        for url in self._fronts:
            since = self._since.get(url, -1)
            world = await self._get(f"{url}/v1/world?recent_since={since}")
            if isinstance(world, dict):
                worlds.append(world)
                self._note_steps(url, world)
        self.seen.worlds = worlds
        if worlds:
            step = max(int(rank["step"]) for world in worlds for rank in world["ranks"])
            self._ledger.saw_step(self.seconds, step)

    def _note_steps(self, url: str, world: Json) -> None:
        """Busy steps, one by one: (step, ms, own tokens, all tokens, wave in progress), each once."""
        for rank in world["ranks"]:
            rows = rank["recent"]
            self.seen.steps.setdefault((int(rank["rank"]), world["world"]), []).extend(rows)
            self._since[url] = max([self._since.get(url, -1), *(int(row[0]) for row in rows)])

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


def _windows(answer: Any) -> list[Window]:
    if not isinstance(answer, dict):
        return []
    return [
        Window(
            entry["world"],
            entry["digest"],
            int(entry["first_step"]),
            int(entry["last_step"]),
            np.array(entry["rank_load"], dtype=np.float64),
            np.array(entry["load"], dtype=np.float64),
        )
        for entry in answer["windows"]
    ]
