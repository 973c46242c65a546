"""The routing sample of one rank: for each window of steps a few of its tokens, with their experts in every layer.

A reservoir that skips (Li 1994, algorithm L): how many tokens to pass over until the next one is taken is drawn at
once, so a step asks for a random number only when it takes a token, and a window of N tokens takes about
n (1 + ln(N / n)) of them. Nothing here touches torch, nor any random state that answers depend on.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplane.errors import LoadReportError
from eplane.routing import MAX_SAMPLE_IDS, RankSample, TokenSample

WINDOWS_KEPT = 16
"""Windows whose samples wait for an agent; an older one is lost, its counts are not."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    """`held [n, L, K]` of `tokens` own tokens in a window, as drawn: whether it is a sample is found out off the hot path."""

    first_step: int
    last_step: int
    tokens: int
    held: NDArray[np.int32]


class RoutingSampler:
    """Engine thread only, but for `since`. `most`: tokens that a window's sample holds.

    All ranks cut where they cut their counts. The draws depend on `seed` alone: ranks must have different ones.
    """

    def __init__(self, rank: int, layers: int, top_k: int, most: int, seed: int) -> None:
        self._rank = rank
        self._most = most_tokens(layers, top_k, most)
        self._random = random.Random(seed)
        self._held: NDArray[np.int32] = np.zeros((self._most, layers, top_k), dtype=np.int32)
        self._done: deque[_Window] = deque(maxlen=WINDOWS_KEPT)
        self._cut_step = 0
        self._places: list[int] = []
        self._seen = self._next = self._filled = 0
        self._weight = 1.0

    def draw(self, tokens: int) -> Sequence[int]:
        """Which of a step's `tokens` own tokens are to be taken, as rows; `take` must follow when there are any."""
        rows: dict[int, int] = {}
        end = self._seen + tokens
        while self._next < end:
            if self._filled < self._most:
                place = self._filled
                self._filled += 1
            else:
                place = self._random.randrange(self._most)
            rows[place] = self._next - self._seen  # Of two for one place, the later one stays.
            self._next += 1 + (self._skip() if self._filled == self._most else 0)
        self._seen = end
        self._places = list(rows)
        return list(rows.values())

    def take(self, routed: NDArray[np.int64]) -> None:
        """The experts `[n, L, K]` of the tokens that `draw` named last."""
        self._held[self._places] = routed

    def cut(self, step: int) -> None:
        """The window ends before `step`; the next one begins with nothing. A window without tokens has no sample."""
        if self._seen:
            order = self._random.sample(range(self._filled), self._filled)
            self._done.append(_Window(self._cut_step, step, self._seen, self._held[order]))
        self._cut_step = step
        self._begin()

    def since(self, step: int) -> tuple[RankSample, ...]:
        """The samples of windows that end after `step`, oldest first. Any thread."""
        found = []
        for one in self._done.copy():
            if one.last_step > step:
                try:
                    sample = TokenSample(one.tokens, one.held)
                    found.append(RankSample(self._rank, one.first_step, one.last_step, sample))
                except LoadReportError as error:
                    # A router that is unlike any known here (an expert twice for one token, say) goes without samples.
                    _log.debug("rank %d, steps from %d: %s", self._rank, one.first_step, error)
        return tuple(found)

    def _begin(self) -> None:
        self._seen = self._next = self._filled = 0
        self._weight = 1.0

    def _skip(self) -> int:
        """How many tokens pass before the next one is taken: geometric, ever longer."""
        self._weight *= math.exp(math.log(1.0 - self._random.random()) / self._most)
        chance = min(self._weight, 1.0 - 2.0**-53)
        return math.floor(math.log(1.0 - self._random.random()) / math.log1p(-chance))


def most_tokens(layers: int, top_k: int, wanted: int) -> int:
    """Tokens that a sample can hold, at most `wanted`; 0 where not even one fits."""
    return min(wanted, MAX_SAMPLE_IDS // (layers * top_k))
