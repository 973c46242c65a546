"""Continuous batching: which tokens of which requests run in the next step. Pure: no tensors, no clock.

A request waits until its pages are free, then its prompt runs in chunks, then one token a step. Decode tokens go
first, so running requests are not held up by new prompts, but while a prompt waits they leave it a quarter of the
step; prompts are served in order of arrival. With more decoding requests than a step has room for, they take turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from eplane.errors import BadInput, QueueFull
from runtime.kvcache import PagePool, pages_for
from runtime.sampling import Chosen, Sampling


class Finish(StrEnum):
    """Why a request ended. STOP: an end token or a stop string; LENGTH: max_tokens."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Request:
    """A request on its rank. `tokens` are prompt and output; the first `done` of them are in the cache."""

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    done: int = 0
    pages: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def produced(self) -> int:
        return len(self.tokens) - len(self.prompt)


@dataclass(frozen=True, slots=True)
class Chunk:
    """`count` tokens of `request` from position `start`. `decode`: it continues an answer, else it is prompt."""

    request: Request
    start: int
    count: int
    decode: bool

    @property
    def tokens(self) -> list[int]:
        return self.request.tokens[self.start : self.start + self.count]

    @property
    def last(self) -> bool:
        """The chunk reaches the newest token, so its last row of logits gives the next one."""
        return self.start + self.count == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Produced:
    """One new token of a request; `finish` is set on its last."""

    request: int
    chosen: Chosen
    finish: Finish | None


class Scheduler:
    """The requests of one rank. `limit`: tokens a step; `queue`: requests that may wait. Engine thread only."""

    def __init__(self, pool: PagePool, limit: int, queue: int) -> None:
        if limit < 1:
            raise BadInput(f"a step needs room for at least one token, got {limit}")
        self._pool = pool
        self._limit = limit
        self._queue = queue
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, request: Request) -> None:
        """Take a request. Raises BadInput when it can never fit, QueueFull when too many wait."""
        needed = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1:
            raise BadInput("a request needs at least one prompt token and max_tokens of at least 1")
        if pages_for(needed) > self._pool.pages:
            raise BadInput(
                f"prompt and max_tokens are {needed} tokens; the key/value cache holds {self._pool.capacity_tokens}"
            )
        if len(self._waiting) >= self._queue:
            raise QueueFull(f"{len(self._waiting)} requests wait already")
        self._waiting.append(request)

    def cancel(self, request_id: int) -> bool:
        """Forget a request and free its pages; False when it is not here (any more)."""
        for request in self._waiting:
            if request.id == request_id:
                self._waiting.remove(request)
                return True
        for request in self._running:
            if request.id == request_id:
                self._release(request)
                return True
        return False

    def next_step(self) -> tuple[Chunk, ...]:
        """The chunks of the next step, at most `limit` tokens; empty when there is nothing to do."""
        self._admit()
        prompts = any(not request.produced for request in self._running)
        kept = max(1, self._limit // 4) if prompts and self._limit > 1 else 0
        room = self._limit
        chunks: list[Chunk] = []
        for request in self._running:
            if room > kept and request.produced:
                chunks.append(Chunk(request, request.done, 1, True))
                room -= 1
        for request in self._running:
            if room and not request.produced:
                count = min(room, len(request.tokens) - request.done)
                chunks.append(Chunk(request, request.done, count, False))
                room -= count
        return tuple(chunks)

    def complete(self, chunks: Sequence[Chunk], chosen: Sequence[Chosen | None]) -> tuple[Produced, ...]:
        """Take in what a step made: `chosen[i]` is the new token of `chunks[i]` if it was its last."""
        produced: list[Produced] = []
        for chunk, new in zip(chunks, chosen, strict=True):
            request = chunk.request
            request.done += chunk.count
            if new is None:
                continue
            request.tokens.append(new.token)
            finish: Finish | None = None
            if new.token in request.end_tokens:
                finish = Finish.STOP
            elif request.produced >= request.max_tokens:
                finish = Finish.LENGTH
            produced.append(Produced(request.id, new, finish))
            if finish is not None:
                self._release(request)
        served = {chunk.request.id for chunk in chunks if chunk.decode}
        self._running.sort(key=lambda request: request.id in served)  # Stable: who had a turn goes behind.
        return tuple(produced)

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            pages = self._pool.take(pages_for(len(request.prompt) + request.max_tokens))
            if pages is None:
                return
            request.pages = pages
            self._running.append(self._waiting.popleft())

    def _release(self, request: Request) -> None:
        self._running.remove(request)
        self._pool.give_back(request.pages)
        request.pages = ()
