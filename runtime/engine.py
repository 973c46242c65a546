"""The engine of one rank: one step after the other, in lock step with its peers.

A step: switch if due, take the tokens that are to run, run the dense model on them (its experts go through the
dispatcher) or, without tokens, only join the peers' exchanges; then choose tokens and count what arrived. If no rank
has tokens the step ended after its first exchange (a tick).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.attention import Span
from runtime.dispatch import DECODE, PREFILL, Dispatcher
from runtime.forward import Forward
from runtime.routing import RoutingSampler
from runtime.sampling import Chosen, choose
from runtime.scheduler import Chunk, Produced, Scheduler
from runtime.switch import Switch

Counts = NDArray[np.int64]


class Counters(Protocol):
    """Where the tokens that arrived at own slots are counted."""

    def add(self, step: int, prefill: Counts, decode: Counts) -> None: ...

    def due(self, step: int) -> bool:
        """Whether a window ends before `step` on every rank."""

    def cut(self, step: int, digest: str) -> bool:
        """End the window: steps before `step` were served under `digest`."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did. `own`: tokens of this rank, `total`: of all ranks; `prefill`, `decode`: own, by phase."""

    step: int
    own: int
    total: int
    seconds: float
    switched: bool
    produced: tuple[Produced, ...]
    prefill: int = 0
    decode: int = 0


class Engine:
    """Engine thread only, but for `scheduler`, which the same thread fills between steps."""

    def __init__(
        self,
        forward: Forward,
        dispatcher: Dispatcher,
        scheduler: Scheduler,
        switch: Switch,
        counters: Counters,
        sampler: RoutingSampler | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.switch = switch
        self._forward = forward
        self._dispatcher = dispatcher
        self._counters = counters
        self._sampler = sampler
        self._clock = clock
        self._next = 0
        self._digest = switch.live.digest

    def step(self) -> StepReport:
        """One step. Raises WorldEnded when a peer is lost or serves another placement."""
        step = self._next
        self._next = step + 1
        start = self._clock()
        table = self.switch.begin_step(step)
        switched = table.digest != self._digest
        if switched or self._counters.due(step):
            # The sample first: who finds the counts of a window finds its sample, too.
            if self._sampler is not None:
                self._sampler.cut(step)
            self._counters.cut(step, self._digest)
        self._digest = table.digest
        chunks = self.scheduler.next_step()
        phases = [DECODE if c.decode else PREFILL for c in chunks for _ in range(c.count)]
        sampled = self._sampler.draw(len(phases)) if self._sampler is not None else ()
        self._dispatcher.begin(table, step, self.switch.sample(), torch.tensor(phases, dtype=torch.int64), sampled)
        produced: tuple[Produced, ...] = ()
        if chunks:
            produced = self._run(chunks)
        else:
            self._dispatcher.join()
        self.switch.end_step(step)
        total = self._dispatcher.tokens
        if total:
            prefill, decode = self._dispatcher.arrived.numpy()
            self._counters.add(step, prefill, decode)
        if self._sampler is not None and sampled:
            self._sampler.take(self._dispatcher.routed.numpy())
        prompt = sum(c.count for c in chunks if not c.decode)
        seconds = self._clock() - start
        return StepReport(step, len(phases), total, seconds, switched, produced, prompt, len(phases) - prompt)

    def _run(self, chunks: tuple[Chunk, ...]) -> tuple[Produced, ...]:
        tokens = [t for chunk in chunks for t in chunk.tokens]
        spans = [Span(c.start, c.count, c.request.pages) for c in chunks]
        ends = np.cumsum([c.count for c in chunks]) - 1
        wanted = [i for i, chunk in enumerate(chunks) if chunk.last]
        # A step that ends no prompt still asks for one row: the model's head takes no empty input.
        rows = [int(ends[i]) for i in wanted] or [0]
        logits = self._forward.logits(tokens, spans, rows).numpy()
        chosen: list[Chosen | None] = [None] * len(chunks)
        for row, i in enumerate(wanted):
            request = chunks[i].request
            chosen[i] = choose(logits[row], request.sampling, len(request.tokens))
        return self.scheduler.complete(chunks, chosen)
