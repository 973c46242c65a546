"""The forecast: which memory wins, what the error bar means, what scenarios carry."""

from __future__ import annotations

import numpy as np
import pytest

from controller.forecast import ALPHAS, SCENARIOS, UNKNOWN_ERROR, _since_change, forecast, last_window


def test_steady_noise_wants_a_long_memory_and_steps_a_short_one() -> None:
    rng = np.random.default_rng(0)
    noise = rng.poisson(40, (32, 1, 16)).astype(np.float64)
    assert forecast(noise, 4).alpha[0] < 0.3
    steps = np.repeat(rng.lognormal(5, 1, (4, 1, 16)), 8, axis=0)
    assert forecast(steps, 1).alpha[0] == ALPHAS[0]


def test_the_forecast_beats_the_last_window_on_noise() -> None:
    rng = np.random.default_rng(1)
    truth = rng.lognormal(3, 1, (1, 64))
    history = rng.poisson(truth, (40, 1, 64)).astype(np.float64)
    share = truth / truth.sum()
    ours = np.abs(forecast(history, 2).mean - share).sum()
    assert ours < np.abs(last_window(history, 2).mean - share).sum()


def test_shares_sum_to_one_and_scenarios_to_the_mean() -> None:
    rng = np.random.default_rng(2)
    seen = forecast(rng.poisson(30, (20, 3, 8)).astype(np.float64), 4)
    assert np.allclose(seen.mean.sum(axis=1), 1, atol=1e-5)
    assert seen.scenarios.shape == (3, 8, SCENARIOS)
    assert np.allclose(seen.scenarios.sum(axis=1), 1, atol=1e-5)
    assert np.allclose(seen.scenarios.mean(axis=2), seen.mean, atol=2e-3)


def test_scenarios_keep_what_moves_together() -> None:
    """Experts 0 and 1 are hot at the same times: so they are in the scenarios."""
    wave = np.where(np.arange(16) % 2, 300.0, 100.0)
    history = np.stack([wave, wave, 400 - wave, 400 - wave], axis=1)[:, None, :]
    lanes = forecast(history, 4).scenarios[0]
    assert np.corrcoef(lanes[0], lanes[1])[0, 1] > 0.99
    assert np.corrcoef(lanes[0], lanes[2])[0, 1] < -0.99


def test_an_idle_entry_says_nothing() -> None:
    busy = np.tile(np.array([[[800.0, 100, 60, 40]]]), (8, 1, 1))
    idle = np.concatenate([busy, np.array([[[0.0, 0, 0, 3]]])])
    assert np.abs(forecast(idle, 2).mean - forecast(busy, 2).mean).max() < 0.2
    silent = np.concatenate([busy, np.zeros((3, 1, 4))])
    assert np.allclose(forecast(silent, 2).mean, forecast(busy, 2).mean, atol=1e-4)


def test_the_error_bar_is_the_error_seen() -> None:
    rng = np.random.default_rng(3)
    calm = rng.lognormal(3, 1, (1, 1, 32)) * np.exp(rng.normal(0, 0.02, (32, 1, 32)))
    wild = rng.lognormal(3, 1, (1, 1, 32)) * np.exp(rng.normal(0, 0.4, (32, 1, 32)))
    assert forecast(calm * 1e4, 1).error[0] < 0.06
    assert 0.25 < forecast(wild * 1e4, 1).error[0] < 0.8
    assert forecast(calm[:1], 1).error[0] == pytest.approx(UNKNOWN_ERROR)


def test_a_layer_without_tokens_is_even() -> None:
    seen = forecast(np.zeros((4, 2, 5)), 2)
    assert np.allclose(seen.mean, 0.2)
    assert np.isfinite(seen.scenarios).all()
    assert np.isfinite(seen.error).all()


def _far(a: np.ndarray, b: np.ndarray) -> float:
    return 0.5 * float(np.abs(a / a.sum() - b / b.sum()).sum())


def test_after_an_abrupt_change_only_what_came_since_counts() -> None:
    rng = np.random.default_rng(4)
    before, after = rng.lognormal(5, 1, (2, 1, 64))
    history = np.concatenate([rng.poisson(before, (20, 1, 64)), rng.poisson(after, (3, 1, 64))]).astype(np.float64)
    seen = forecast(history, 8)
    assert _far(seen.mean[0], after[0]) < 0.06 < 0.3 < _far(after[0], before[0])
    assert np.abs(seen.scenarios.mean(axis=2) - seen.mean).max() < 2e-3
    # The other layer's history is whole, and its forecast what it is alone.
    calm = rng.poisson(before, (23, 1, 64)).astype(np.float64)
    both = forecast(np.concatenate([history, calm], axis=1), 8)
    assert np.array_equal(both.mean[0], seen.mean[0])
    assert np.allclose(both.mean[1], forecast(calm, 8).mean[0])


def test_a_burst_or_steady_drift_is_no_change() -> None:
    rng = np.random.default_rng(5)
    usual, odd = rng.lognormal(5, 1, (2, 1, 64))
    history = rng.poisson(usual, (20, 1, 64)).astype(np.float64)
    history[15] = rng.poisson(odd)
    assert _far(forecast(history, 8).mean[0], usual[0]) < 0.15
    walk = np.exp(np.cumsum(rng.normal(0, 0.1, (24, 1, 64)), axis=0)) * 1e4
    assert _since_change(walk.astype(np.float32)).tolist() == [0]
    assert _since_change(history[:3].astype(np.float32)).tolist() == [0]
