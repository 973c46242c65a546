"""Choosing the next token: from a row of logits, the request's wish and the position alone.

Random numbers come from a counter-based generator (Philox, Salmon et al. 2011) keyed by the request's seed and
counted by the token's position, so a choice does not depend on batch, chunking or rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplane.errors import BadInput
from runtime.wire import MAX_LOGPROBS

_SEED_MASK = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request wants its tokens. `temperature` 0: the likeliest token; `logprobs`: how many alternatives to tell."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    logprobs: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 100.0:
            raise BadInput(f"temperature must be between 0 and 100, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise BadInput(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise BadInput(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}")


@dataclass(frozen=True, slots=True)
class Chosen:
    """The token, its log probability (a float32 value), and the likeliest tokens with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[V]` of one row, computed in float64 so that the last bits do not depend on how rows are grouped."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max()
    result: NDArray[np.float32] = (shifted - np.log(np.exp(shifted).sum())).astype(np.float32)
    return result


def choose(logits: NDArray[np.float32], wish: Sampling, position: int) -> Chosen:
    """The token at `position` (counted from the prompt's start) for one row of logits `[V]`. Ties: lowest token."""
    logs = log_probabilities(logits)
    token = int(np.argmax(logits)) if wish.temperature == 0.0 else _draw(logits, wish, position)
    top: tuple[tuple[int, float], ...] = ()
    if wish.logprobs:
        best = np.argsort(-logs, kind="stable")[: wish.logprobs]
        top = tuple((int(t), float(logs[t])) for t in best)
    return Chosen(token, float(logs[token]), top)


def _draw(logits: NDArray[np.float32], wish: Sampling, position: int) -> int:
    wide = logits.astype(np.float64)
    # Shifted first: divided by a tiny temperature, logits would overflow and their difference be no number.
    with np.errstate(over="ignore", under="ignore"):
        weight = np.exp((wide - wide.max()) / wish.temperature)
    order = np.argsort(-weight, kind="stable")
    total = np.cumsum(weight[order])
    # The smallest set of likeliest tokens that holds at least top_p of the mass.
    kept = int(np.searchsorted(total, wish.top_p * total[-1], side="left")) + 1
    kept = min(kept, int(order.size))
    generator = np.random.Generator(np.random.Philox(key=wish.seed & _SEED_MASK, counter=position))
    point = generator.random() * total[kept - 1]
    return int(order[min(int(np.searchsorted(total[:kept], point, side="right")), kept - 1)])
