"""Load families and shapes of the solver's comparison. Pure numpy, seeded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]
WINDOWS, PARTS = 7, 8
TOKENS, TOP_K = 200_000, 8


@dataclass(frozen=True, slots=True)
class Shape:
    """layers x experts over `ranks` ranks on `nodes` nodes with `slots` slots a layer in all."""

    name: str
    layers: int
    experts: int
    slots: int
    ranks: int
    nodes: int

    @property
    def per_rank(self) -> int:
        return self.slots // self.ranks


SHAPES = (
    Shape("c1 DeepSeek-V3 EP32", 58, 256, 288, 32, 4),
    Shape("c2 DeepSeek-V3 EP144", 58, 256, 288, 144, 18),
    Shape("c3 DeepSeek-V3 EP320", 58, 256, 320, 320, 40),
    Shape("c4 Qwen3-235B EP16", 94, 128, 160, 16, 2),
    Shape("c5 Kimi-K2 EP64", 61, 384, 448, 64, 8),
    Shape("c6 Pangu-Pro EP8", 48, 64, 80, 8, 1),
    Shape("c6b Pangu-Pro EP16", 48, 64, 80, 16, 2),
)


def drifting(rng: np.random.Generator, steps: int, size: tuple[int, ...], keep: float, sigma: float) -> Loads:
    """[steps, *size] AR(1) from zero: x' = keep * x + sigma * noise, both given for a window of PARTS steps."""
    out = np.zeros((steps, *size))
    for t in range(1, steps):
        out[t] = keep ** (1 / PARTS) * out[t - 1] + rng.normal(0, sigma / np.sqrt(PARTS), size)
    return out


def shuffled_zipf(rng: np.random.Generator, layers: int, experts: int, exponent: float = 0.8) -> Loads:
    base = 1.0 / np.arange(1, experts + 1) ** exponent
    return np.stack([rng.permutation(base) for _ in range(layers)])


def counted(rng: np.random.Generator, shares: Loads, tokens: int = TOKENS) -> Loads:
    """[W, L, E] multinomial counts of `tokens` x top-8 a window, split over its sub-windows."""
    shares = shares / shares.sum(axis=2, keepdims=True)
    return rng.multinomial(tokens * TOP_K // PARTS, shares).astype(np.float64)


def zipf(shape: Shape, seed: int, windows: int = WINDOWS) -> Loads:
    """Zipf 0.8 with slow independent drift of every expert."""
    rng = np.random.default_rng(seed)
    base = shuffled_zipf(rng, shape.layers, shape.experts)
    return counted(rng, base * np.exp(drifting(rng, windows * PARTS, base.shape, 0.97, 0.15)))


def lognormal(shape: Shape, seed: int, windows: int = WINDOWS) -> Loads:
    """Lognormal shares of sigma 1, the same drift."""
    rng = np.random.default_rng(seed)
    base = np.exp(rng.normal(0, 1, (shape.layers, shape.experts)))
    return counted(rng, base * np.exp(drifting(rng, windows * PARTS, base.shape, 0.97, 0.15)))


def corr_drift(shape: Shape, seed: int, windows: int = WINDOWS, spread=1.0, sigma=0.25, jump=1.0) -> Loads:
    """Six topics common to all layers, each with experts of its own; the mix drifts and switches half-way."""
    rng = np.random.default_rng(seed)
    topics = 6
    likes = np.exp(rng.normal(0, spread, (topics, shape.layers, shape.experts)))
    likes /= likes.sum(axis=2, keepdims=True)
    logits = drifting(rng, windows * PARTS, (topics,), 0.9, sigma)
    logits += rng.normal(0, jump, topics)
    half = windows * PARTS // 2
    logits[half:] = np.roll(logits[half:], 1, axis=1) if jump else logits[half:]
    mix = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return counted(rng, np.einsum("wt,tle->wle", mix, likes))
