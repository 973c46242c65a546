"""Posts load to the leader: a bounded queue, jittered back-off, a replay to every new leader; shares come back."""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import httpx

from agent.settings import AgentSettings
from eplane.errors import FieldError, LinkError
from eplane.fields import Fields
from eplane.load import LoadReport, SubWindow
from eplane.placement import FloatTable
from eplane.routing import RankSample
from runtime.link.messages import Describe, PlacementReply, RankStatus, read_table

log = logging.getLogger("eplane.agent")
FIRST_BACKOFF_S = 0.2
LONGEST_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, as the value and the create revision of the leader key say."""

    url: str
    revision: int


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """A hint that rode back on a reply: how the replicas of the placement `digest` may split their tokens."""

    digest: str
    shares: FloatTable


@dataclass(frozen=True, slots=True)
class About:
    """What a leader must know of this node's ranks before it can adopt or plan: who they are, and their table."""

    describes: Sequence[Describe]
    placement: PlacementReply | None


class Reporter:
    """Keeps what was not yet told, oldest first; what does not fit the queue any more is dropped and counted."""

    def __init__(self, settings: AgentSettings, incarnation: str, monotonic: Callable[[], float]) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._monotonic = monotonic
        headers = {"Authorization": f"Bearer {settings.token.reveal()}"} if settings.token else {}
        self._http = httpx.AsyncClient(
            timeout=settings.request_timeout_s, headers=headers, verify=settings.verify_tls, trust_env=False
        )
        self._queue: deque[SubWindow] = deque()
        self._told: Leader | None = None
        self._described_at: float | None = None
        self._not_before = 0.0
        self._backoff_s = FIRST_BACKOFF_S
        self.dropped = 0
        self.refused = 0

    def add(self, windows: Sequence[SubWindow]) -> None:
        self._queue.extend(windows)
        while len(self._queue) > self._settings.queue_windows:
            self._queue.popleft()
            self.dropped += 1

    def forget_world(self) -> None:
        """The ranks live in a new world: what was counted before tells nothing about it."""
        self._queue.clear()
        self._described_at = None

    def wants_describe(self, leader: Leader) -> bool:
        at = self._described_at
        return leader != self._told or at is None or self._monotonic() - at >= self._settings.describe_every_s

    async def report(
        self,
        leader: Leader,
        world: str,
        replay: Sequence[SubWindow],
        about: About | None,
        statuses: Sequence[RankStatus],
        samples_of: Callable[[Sequence[SubWindow]], Sequence[RankSample]] = lambda _: (),
    ) -> Shares | None:
        """Tell `leader` what is queued, with the routing samples of it. A failure keeps the queue and waits longer

        before the next try.
        """
        if self._monotonic() < self._not_before:
            return None
        if leader != self._told:
            # A new leader knows nothing: it is told the last windows again; what it knows already it refuses as twice.
            known = {(w.rank, w.seq) for w in self._queue}
            self._queue.extendleft(reversed([w for w in replay if (w.rank, w.seq) not in known]))
        sending = [w for w in self._queue if w.world == world]
        report = LoadReport(self._settings.group, self._settings.node, self._incarnation, world, tuple(sending))
        body = {
            "report": report.to_json(),
            "describe": [] if about is None else [describe.to_json() for describe in about.describes],
            "placement": None if about is None or about.placement is None else about.placement.to_json(),
            "statuses": [status.to_json() for status in statuses],
            # Beside the report, not in it: a leader that knows no samples overlooks them, and takes the counts.
            "samples": [sample.to_json() for sample in samples_of(sending)],
        }
        url = f"{leader.url}/v1/groups/{self._settings.group}/reports"
        try:
            reply = await self._http.post(url, json=body)
            reply.raise_for_status()
            shares = self._read(reply.json())
        except (httpx.HTTPError, ValueError, FieldError, LinkError) as error:
            self._wait(error)
            return None
        self._queue.clear()
        self._backoff_s = FIRST_BACKOFF_S
        self._told = leader
        if about is not None:
            self._described_at = self._monotonic()
        return shares

    def _read(self, body: object) -> Shares | None:
        fields = Fields(body, "reply")
        refused = fields.items("refused")
        self.refused += len(refused)
        for item in refused[:3]:
            log.debug("the leader refused a sub-window: %s", item)
        if fields.flag("want_describe"):
            self._described_at = None
        hint = fields.value("shares")
        if hint is None:
            return None
        of = Fields(hint, "reply.shares")
        return Shares(of.hexes("digest", 16), read_table(of, "shares"))

    def _wait(self, error: Exception) -> None:
        log.info("could not report to the leader, %d sub-windows wait: %s", len(self._queue), error)
        self._not_before = self._monotonic() + self._backoff_s * random.uniform(0.5, 1.5)
        self._backoff_s = min(self._backoff_s * 2, LONGEST_BACKOFF_S)
        # Whoever answers next may have been restarted meanwhile.
        self._described_at = None

    async def close(self) -> None:
        await self._http.aclose()
