"""The launcher's view of its ranks: who is ready, who has least to do, which requests are open. No torch here.

Attention is data-parallel, so any rank can serve any request: a request goes to the local rank with the fewest
tokens still to run.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from enum import StrEnum
from multiprocessing.connection import Connection

from eplane.errors import BadInput, QueueFull, WorldEnded
from runtime import wire


class WorldState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the ranks take it."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = 0
    ignore_end: bool = False


@dataclass(frozen=True, slots=True)
class NewToken:
    token: int
    logprob: float
    finish: str | None
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Rank:
    """One local rank. `owed`: tokens still to run of its open requests; `facts`: what it said when it was ready."""

    number: int
    connection: Connection
    facts: wire.Message | None = None
    stats: wire.Message = field(default_factory=dict)
    owed: int = 0


@dataclass(slots=True)
class _Open:
    rank: Rank
    owed: int
    events: asyncio.Queue[NewToken | Exception] = field(default_factory=asyncio.Queue)


@dataclass(slots=True)
class Totals:
    """Requests by outcome, and tokens returned, since the launcher began."""

    ok: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    tokens: int = 0


RECENT_STEPS = 65536
SEND_LIMIT_S = 5.0
"""A rank reads at once, in a thread of its own. One that has not for so long stands still, and its world with it."""


class Front:
    """Asyncio only: every method is called from the loop that serves HTTP."""

    def __init__(self, ranks: dict[int, Connection]) -> None:
        self.ranks = {number: Rank(number, connection) for number, connection in ranks.items()}
        for connection in ranks.values():
            _limit_sends(connection, SEND_LIMIT_S)
        self.state = WorldState.STARTING
        self.reason = "the ranks are loading the model"
        self.exit_code = wire.EXIT_WORLD_LOST
        self.totals = Totals()
        self.recent: dict[int, list[list[float]]] = {number: [] for number in ranks}
        self.changed = asyncio.Event()
        self.idle = asyncio.Event()  # No request is open.
        self.idle.set()
        self._open: dict[int, _Open] = {}
        self._next = 0

    @property
    def facts(self) -> wire.Message:
        """What the ranks said of the world. Raises WorldEnded when it does not serve."""
        facts = next(iter(self.ranks.values())).facts
        if self.state is not WorldState.READY or facts is None:
            raise WorldEnded(self.reason)
        return facts

    @property
    def open_requests(self) -> int:
        return len(self._open)

    def listen(self) -> None:
        """Take in what the ranks say, from now on."""
        loop = asyncio.get_running_loop()
        for rank in self.ranks.values():
            loop.add_reader(rank.connection.fileno(), self._readable, rank)

    def deaf(self) -> None:
        loop = asyncio.get_running_loop()
        for rank in self.ranks.values():
            loop.remove_reader(rank.connection.fileno())

    async def run(self, ask: Ask) -> AsyncGenerator[NewToken, bool]:
        """The tokens of a request as they come. Sent True, it has all it wanted; left early, it is cancelled.

        Raises WorldEnded when the world does not serve or is lost meanwhile, QueueFull, BadInput.
        """
        facts = self.facts
        self._check(ask, facts)
        rank = min(self.ranks.values(), key=lambda r: (r.owed, r.number))
        self._next += 1
        number, entry = self._next, _Open(rank, len(ask.prompt) + ask.max_tokens)
        self._open[number] = entry
        self.idle.clear()
        rank.owed += entry.owed
        finished = False
        try:
            self._tell(
                rank, wire.START, id=number, prompt=list(ask.prompt), max_tokens=ask.max_tokens,
                temperature=ask.temperature, top_p=ask.top_p, seed=ask.seed, logprobs=ask.logprobs,
                ignore_end=ask.ignore_end,
            )  # fmt: skip
            while not finished:
                event = await entry.events.get()
                if isinstance(event, Exception):
                    finished = True
                    self._count(event)
                    raise event
                self.totals.tokens += 1
                finished = event.finish is not None
                if finished:
                    self.totals.ok += 1
                enough = yield event
                if enough and not finished:
                    self.totals.ok += 1
                    finished = True
                    self._tell(rank, wire.CANCEL, id=number)
        finally:
            del self._open[number]
            if not self._open:
                self.idle.set()
            rank.owed -= entry.owed
            if not finished:
                self.totals.cancelled += 1
                self._tell(rank, wire.CANCEL, id=number)

    def stop(self) -> None:
        """No new requests; open ones end with a WorldEnded."""
        self.end(WorldState.STOPPING, "the server is stopping", 0)

    def end(self, state: WorldState, reason: str, code: int) -> None:
        """The first end counts; what comes after it follows from it."""
        if self.state in (WorldState.STOPPING, WorldState.LOST):
            return
        self.state, self.reason, self.exit_code = state, reason, code
        for entry in self._open.values():
            entry.events.put_nowait(WorldEnded(reason))
        self.changed.set()

    def _check(self, ask: Ask, facts: wire.Message) -> None:
        vocabulary, context = int(facts["vocabulary"]), int(facts["context"])
        if not ask.prompt:
            raise BadInput("the prompt is empty")
        if min(ask.prompt) < 0 or max(ask.prompt) >= vocabulary:
            raise BadInput(f"the prompt holds a token outside 0..{vocabulary - 1}")
        if len(ask.prompt) + ask.max_tokens > context:
            raise BadInput(
                f"prompt ({len(ask.prompt)}) and max_tokens ({ask.max_tokens}) exceed the {context} tokens of a context"
            )

    def _count(self, event: Exception) -> None:
        if isinstance(event, QueueFull | BadInput):
            self.totals.refused += 1
        else:
            self.totals.failed += 1

    def _tell(self, rank: Rank, kind: str, **fields: object) -> None:
        if self.state is WorldState.LOST:
            return
        try:
            wire.send(rank.connection, kind, **fields)
        except OSError:
            self._lost(rank, f"rank {rank.number} is gone")

    def _readable(self, rank: Rank) -> None:
        try:
            while rank.connection.poll():
                self._heed(rank, wire.receive(rank.connection))
        except (EOFError, OSError):
            self._lost(rank, f"rank {rank.number} died")

    def _lost(self, rank: Rank, reason: str) -> None:
        asyncio.get_running_loop().remove_reader(rank.connection.fileno())
        self.end(WorldState.LOST, f"the world is lost: {reason}", wire.EXIT_WORLD_LOST)

    def _heed(self, rank: Rank, message: wire.Message) -> None:
        kind = message["is"]
        if kind == wire.TOKENS:
            for number, token, logprob, finish, top in message["items"]:
                entry = self._open.get(number)
                if entry is not None:
                    tops = tuple((int(t), float(p)) for t, p in top)
                    entry.events.put_nowait(NewToken(token, logprob, finish, tops))
        elif kind == wire.REFUSED:
            entry = self._open.get(message["id"])
            if entry is not None:
                error = QueueFull if message["code"] == wire.FULL else BadInput
                entry.events.put_nowait(error(message["reason"]))
        elif kind == wire.STATS:
            recent = self.recent[rank.number]
            recent.extend(message.pop("recent"))
            del recent[: max(0, len(recent) - RECENT_STEPS)]
            rank.stats = message
        elif kind == wire.READY:
            rank.facts = message
            if all(r.facts is not None for r in self.ranks.values()) and self.state is WorldState.STARTING:
                self.state, self.reason = WorldState.READY, ""
                self.changed.set()
        elif kind == wire.ENDED:
            starting = self.state is WorldState.STARTING
            code = int(message["code"]) if starting else wire.EXIT_WORLD_LOST
            self.end(WorldState.LOST, str(message["reason"]), code)


def _limit_sends(connection: Connection, seconds: float) -> None:
    """Let a send fail with an OSError once the pipe has been full for `seconds`: it must not hold up the loop for ever."""
    whole = int(seconds)
    limit = struct.pack("ll", whole, int((seconds - whole) * 1e6))  # struct timeval
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
