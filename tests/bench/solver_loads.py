"""Load families and shapes of the solver's comparison. Pure numpy, seeded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

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


def corr_drift(shape: Shape, seed: int, windows: int = WINDOWS) -> Loads:
    """Six topics, alike in all layers, each with experts of its own. Their mix drifts, the experts drift as well (AR 0.9,
    0.25 a window, both in the logarithm), and half-way the domain switches: topics that were wanted most are wanted least.

    The spread of a topic's experts (0.95) and of the domain's taste for topics (0.9) are fitted so that the plain greedy is
    as well balanced on the next window, and windows lie as far apart (total variation 0.09 to 0.10), as in the comparison.
    """
    rng = np.random.default_rng(seed)
    topics, steps = 6, windows * PARTS
    likes = np.exp(rng.normal(0, 0.95, (topics, shape.layers, shape.experts)))
    likes /= likes.sum(axis=2, keepdims=True)
    taste = 0.9 * np.array([NormalDist().inv_cdf((i + 0.5) / topics) for i in range(topics)])
    logits = drifting(rng, steps, (topics,), 0.9, 0.25)
    logits[: steps // 2] += taste
    logits[steps // 2 :] -= taste
    mix = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    drift = np.exp(drifting(rng, steps, (shape.layers, shape.experts), 0.9, 0.25))
    return counted(rng, np.einsum("wt,tle->wle", mix, likes) * drift)


def abrupt_shift(shape: Shape, seed: int, windows: int = WINDOWS) -> Loads:
    """Zipf shares that stay, but for one moment half-way when every layer's hot experts are others."""
    rng = np.random.default_rng(seed)
    steps = windows * PARTS
    before, after = (shuffled_zipf(rng, shape.layers, shape.experts) for _ in range(2))
    shares = np.repeat(before[None], steps, axis=0)
    shares[steps // 2 :] = after
    return counted(rng, shares)


def one_hot(shape: Shape, seed: int, windows: int = WINDOWS) -> Loads:
    """One expert of each layer takes three ranks' worth of tokens, another layer-wide drift lies under it."""
    rng = np.random.default_rng(seed)
    base = np.exp(rng.normal(0, 0.5, (shape.layers, shape.experts)))
    base /= base.sum(axis=1, keepdims=True)
    hot = rng.integers(shape.experts, size=shape.layers)
    base[np.arange(shape.layers), hot] = 3.0 / shape.ranks / (1 - 3.0 / shape.ranks)
    return counted(rng, base * np.exp(drifting(rng, windows * PARTS, base.shape, 0.97, 0.15)))


def zero_layers(shape: Shape, seed: int, windows: int = WINDOWS) -> Loads:
    """Lognormal with drift; every other layer sees no token in every other window."""
    loads = lognormal(shape, seed, windows)
    for window in range(1, windows, 2):
        loads[window * PARTS : (window + 1) * PARTS, ::2] = 0
    return loads


FAMILIES = {
    "zipf": zipf,
    "lognormal": lognormal,
    "corr_drift": corr_drift,
    "abrupt_shift": abrupt_shift,
    "one_hot": one_hot,
    "zero_layers": zero_layers,
}


def unrest(loads: Loads, window: int) -> tuple[float, float, float, float]:
    """(mean total variation between windows next to each other, mean, least and largest hottest / mean over layers and windows)."""
    count = loads.shape[0] // window
    sums = loads[: count * window].reshape(count, window, *loads.shape[1:]).sum(axis=1)
    total = sums.sum(axis=2, keepdims=True)
    shares = np.divide(sums, total, out=np.zeros_like(sums), where=total > 0)
    live = (total[1:, :, 0] > 0) & (total[:-1, :, 0] > 0)
    apart = 0.5 * np.abs(np.diff(shares, axis=0)).sum(axis=2)[live]
    hot = (shares.max(axis=2) * loads.shape[2])[total[:, :, 0] > 0]
    if not hot.size:
        return 0.0, 0.0, 0.0, 0.0
    return float(apart.mean()) if apart.size else 0.0, float(hot.mean()), float(hot.min()), float(hot.max())


def recorded() -> list[tuple[str, Shape, Loads, int]]:
    """(name, shape, trace [W, L, E], entries a window) of recorded loads that are there: the product's own and others'."""
    found: list[tuple[str, Shape, Loads, int]] = []
    root = Path(__file__).resolve().parents[2]
    for path in sorted((root / "runtime" / "tiny").rglob("*.npz")):
        with np.load(path, allow_pickle=False) as data:
            if "load" in data and data["load"].ndim == 3:
                trace = data["load"].astype(np.float64)
                shape = Shape(path.stem, trace.shape[1], trace.shape[2], 40, 4, 2)
                found.append((f"our tiny model, {path.stem}, 4 ranks", shape, trace[: 16 * 24], 16))
    shared = Path(os.environ.get("EPLANE_TRACES", root.parent / "shared" / "traces"))
    oss = shared / "gpt_oss_20b_fingerprint_counts.npz"
    if oss.exists():
        with np.load(oss, allow_pickle=False) as data:
            counts = data["counts"].astype(np.float64)
        # Subjects put to equal size, seven to an entry, five entries to a window.
        counts = counts / counts.sum(axis=(1, 2), keepdims=True) * 1e6
        counts = counts[: len(counts) // 7 * 7].reshape(-1, 7, *counts.shape[1:]).sum(axis=1)
        found.append(("gpt-oss-20b subjects, 8 ranks", Shape("oss", 24, 32, 40, 8, 1), counts, 5))
        found.append(("gpt-oss-20b subjects, 16 ranks", Shape("oss16", 24, 32, 48, 16, 2), counts, 5))
    esft = shared / "deepseek_esft_16b_token_scores.npz"
    if esft.exists():
        with np.load(esft, allow_pickle=False) as data:
            domains = np.stack(
                [data[name].astype(np.float64) for name in sorted(data.files) if data[name].shape == (26, 64)]
            )
        mixed = _domain_mix(domains)
        found.append(("DeepSeek-MoE 16B domains, 8 ranks", Shape("esft", 26, 64, 80, 8, 1), mixed, PARTS))
        found.append(("DeepSeek-MoE 16B domains, 16 ranks", Shape("esft16", 26, 64, 80, 16, 2), mixed, PARTS))
    return found


def _domain_mix(domains: Loads) -> Loads:
    """Twelve windows that pass from domain to domain, a quarter of the way each, sampled as counts."""
    rng = np.random.default_rng(0)
    steps = 12 * PARTS
    where = np.linspace(0, len(domains), steps, endpoint=False)
    out = np.empty((steps, *domains.shape[1:]))
    for step, at in enumerate(where):
        first, part = int(at), at - int(at)
        mix = (1 - part) * domains[first] + part * domains[(first + 1) % len(domains)]
        out[step] = rng.multinomial(40_000, mix / mix.sum(axis=1, keepdims=True))
    return out
