"""What the next window will look like: expected load with an error bar, and scenarios that carry how experts move together.

Pure numpy. History entries (sub-windows) come oldest first; entries weigh by their tokens, so a nearly idle one says little.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ALPHAS = (0.95, 0.6, 0.35, 0.2, 0.1, 0.05)
"""Memory of the bank: weight of the newest entry. Never all of it: a nearly idle entry must not speak alone."""
KEEP = 32
"""Entries looked at; older ones change little and cost time."""
SCENARIOS = 16
FADE = 0.9
"""Weight of an error one entry older."""
JUDGED = 10
"""Newest forecasts whose error is counted."""
LEAP, LEAST_LEAP, AROUND, SINCE = 5.0, 0.03, 4, 3
"""An abrupt change: a step over LEAP times the usual one plus LEAST_LEAP, still there in the AROUND entries around it, at
least SINCE entries ago."""
UNKNOWN_ERROR = 0.1
"""Relative error assumed before any forecast could be compared with what came."""

Single = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected shares of the next window. A layer's shares sum to 1; a layer without tokens is even.

    mean [L, E]; scenarios [L, E, H], each re-centred on the mean; error [L] relative error of an expert's share one
    window ahead, measured on this history where it is long enough; alpha [L] the memory that won.
    """

    mean: Single
    scenarios: Single
    error: Single
    alpha: Single


def forecast(history: NDArray[np.float64], window: int) -> Forecast:
    """Forecast the mean share over the `window` entries after `history [W, L, E]` (tokens).

    A layer whose load changed abruptly is forecast from what came since alone.
    """
    recent = history[-KEEP:].astype(np.float32)
    since = _since_change(recent)
    parts = [(np.flatnonzero(since == first), int(first)) for first in np.unique(since)]
    if len(parts) == 1:
        return _steady(recent[parts[0][1] :], window)
    found = [(layers, _steady(recent[first:, layers], window)) for layers, first in parts]
    order = np.argsort(np.concatenate([layers for layers, _ in found]))
    names = ("mean", "scenarios", "error", "alpha")
    return Forecast(*(np.concatenate([getattr(one, name) for _, one in found])[order] for name in names))


def _steady(recent: Single, window: int) -> Forecast:
    """Forecast from entries without an abrupt change."""
    entries, layers = recent.shape[:2]
    totals = recent.sum(axis=2)
    bank = _bank(recent)
    horizon = max(1, min(window, entries // 2))
    errors, known = _errors(recent, totals, bank, horizon)
    best = errors.argmin(axis=0) if known else np.zeros(layers, dtype=np.int64)
    rows = np.arange(layers)
    mean = _shares(bank[-1, best, rows])
    error = np.sqrt(errors[best, rows]) if known else np.full(layers, UNKNOWN_ERROR, dtype=np.float32)
    return Forecast(
        mean=mean,
        scenarios=_scenarios(recent, totals, mean),
        error=error.astype(np.float32),
        alpha=np.asarray(ALPHAS, dtype=np.float32)[best],
    )


def _since_change(recent: Single) -> NDArray[np.int64]:
    """[L] first entry after the last abrupt change of each layer, 0 where there was none.

    Drift takes steps of like size; an abrupt change is one step far longer than the others (half the sum of absolute
    differences of shares) that what comes after does not take back. Two entries may be a burst and are no change.
    """
    entries, layers = recent.shape[:2]
    first = np.zeros(layers, dtype=np.int64)
    live = recent.sum(axis=2) > 0
    if entries < 2 * SINCE:
        return first
    shares = _shares(recent)
    steps = np.where(live[1:] & live[:-1], 0.5 * np.abs(shares[1:] - shares[:-1]).sum(axis=2), np.nan)
    usual = np.nanmedian(np.where(np.isnan(steps).all(axis=0), 0.0, steps), axis=0)
    far = np.nan_to_num(steps) > LEAP * usual + LEAST_LEAP
    for entry, layer in np.argwhere(far[: entries - SINCE]).tolist():
        at = entry + 1
        before = _shares(recent[max(0, at - AROUND) : at, layer].sum(axis=0))
        after = _shares(recent[at : at + AROUND, layer].sum(axis=0))
        if 0.5 * float(np.abs(after - before).sum()) > 0.5 * float(steps[entry, layer]):
            first[layer] = at
    return first


def last_window(history: NDArray[np.float64], window: int) -> Forecast:
    """No forecast: the window as it was, without error bar or scenarios."""
    mean = _shares(history[-window:].sum(axis=0).astype(np.float32))
    layers = mean.shape[0]
    return Forecast(
        mean, np.repeat(mean[:, :, None], SCENARIOS, axis=2), np.zeros(layers, np.float32), np.ones(layers, np.float32)
    )


def _shares(tokens: Single) -> Single:
    total = tokens.sum(axis=-1, keepdims=True)
    even = np.float32(1.0 / tokens.shape[-1])
    return np.where(total > 0, tokens / np.where(total > 0, total, 1.0), even).astype(np.float32)


def _bank(recent: Single) -> Single:
    """[W, A, L, E] exponentially weighted tokens after each entry, for each memory."""
    alphas = np.asarray(ALPHAS, dtype=np.float32)[:, None, None]
    out = np.empty((recent.shape[0], len(ALPHAS), *recent.shape[1:]), dtype=np.float32)
    # Start as a plain mean would: without it a long memory leans on the first entry.
    weight = np.zeros((len(ALPHAS), 1, 1), dtype=np.float32)
    state = np.zeros(out.shape[1:], dtype=np.float32)
    for at, entry in enumerate(recent):
        weight = weight * (1 - alphas) + alphas
        state += (entry - state) * (alphas / weight)
        out[at] = state
    return out


def _errors(recent: Single, totals: Single, bank: Single, horizon: int) -> tuple[Single, bool]:
    """[A, L] discounted squared relative error, `horizon` entries ahead: sum (x - f)^2 / sum f^2. False if none is known."""
    entries = recent.shape[0]
    score = np.zeros((len(ALPHAS), recent.shape[1]), dtype=np.float32)
    weight = np.zeros(recent.shape[1], dtype=np.float32)
    for at in range(max(0, entries - horizon - JUDGED), entries - horizon):
        real = _shares(recent[at + 1 : at + 1 + horizon].sum(axis=0))
        predicted = _shares(bank[at])
        miss = ((predicted - real) ** 2).sum(axis=2) / (predicted**2).sum(axis=2)
        counts = np.float32(FADE ** (entries - horizon - 1 - at)) * (totals[at + 1 : at + 1 + horizon].sum(axis=0) > 0)
        score += miss * counts
        weight += counts
    known = bool((weight > 0).any())
    unknown = np.float32(UNKNOWN_ERROR**2)
    return np.where(weight > 0, score / np.where(weight > 0, weight, 1.0), unknown).astype(np.float32), known


def _scenarios(recent: Single, totals: Single, mean: Single) -> Single:
    """[L, E, H] the last entries, moved so that their average is the forecast; too few are repeated."""
    last = _shares(recent[-SCENARIOS:])
    live = totals[-SCENARIOS:] > 0
    count = np.maximum(live.sum(axis=0), 1)[:, None]
    centre = np.where(live[:, :, None], last, 0).sum(axis=0) / count
    moved = np.maximum(mean + np.where(live[:, :, None], last - centre, 0), 0)
    moved /= moved.sum(axis=2, keepdims=True)
    pick = np.arange(SCENARIOS) % len(moved)
    return np.ascontiguousarray(np.moveaxis(moved[pick], 0, 2), dtype=np.float32)
