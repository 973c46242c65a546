"""The cost model against published figures."""

from __future__ import annotations

import numpy as np
import pytest

from controller.costs import PRESETS, fit_latency, hardware_named, layer_s, move_price
from controller.solver import Problem, solve
from controller.solver.measure import even_shares
from eplane.errors import ProblemError

# DeepEP low-latency kernels on H800, 128 tokens, hidden 7,168, top-8 (published table), EP 8, 16, 32, 64, 128, 256.
RANKS = (8, 16, 32, 64, 128, 256)
DISPATCH = (77, 118, 155, 173, 192, 194)
COMBINE = (114, 195, 273, 314, 369, 360)
DISPATCH_BYTES, COMBINE_BYTES = 1024 * (7168 + 224), 1024 * 14336


@pytest.mark.parametrize(
    ("table", "size", "alpha", "gb_s", "errors"),
    [(DISPATCH, DISPATCH_BYTES, 44.6, 51.5, (-5.0, -3.7)), (COMBINE, COMBINE_BYTES, 36.4, 46.4, (-9.7, -4.7))],
)
def test_held_out_latencies_of_deep_ep(
    table: tuple[int, ...], size: int, alpha: float, gb_s: float, errors: tuple[float, float]
) -> None:
    """Fitted on EP 16, 32 and 64 alone, the model predicts 128 and 256."""
    model = fit_latency(RANKS[1:4], table[1:4], size)
    assert model.alpha_us == pytest.approx(alpha, abs=0.5)
    assert model.bytes_us / 1e3 == pytest.approx(gb_s, abs=0.5)
    for ranks, measured, error in zip(RANKS[4:], table[4:], errors, strict=True):
        assert 100 * (model.us(ranks, size) / measured - 1) == pytest.approx(error, abs=0.3)
    whole = fit_latency(RANKS[1:], table[1:], size)
    assert max(abs(whole.us(r, size) / t - 1) for r, t in zip(RANKS[1:], table[1:], strict=True)) <= 0.0505


def test_crossovers_are_those_of_the_hardware() -> None:
    expert = 44_040_192
    assert hardware_named("cloudmatrix384").crossover_tokens(expert) == pytest.approx(235, abs=1)
    assert hardware_named("atlas800i-a2").crossover_tokens(expert) == pytest.approx(160, abs=1)
    assert hardware_named("atlas800i-a2").move_s(expert) == pytest.approx(1.76e-3, rel=0.01)
    assert hardware_named("cloudmatrix384").move_s(expert) == pytest.approx(0.22e-3, rel=0.03)
    with pytest.raises(ProblemError, match="hardware"):
        hardware_named("abacus")
    assert {"cloudmatrix384", "atlas800i-a2", "h800", "h800-prefill", "h200", "cpu", "demo"} == PRESETS.keys()


def gain(hardware: str, tokens_an_expert: float) -> float:
    """Part of the matmul-and-wire time that perfect balance over a mild imbalance would save."""
    experts, ranks = 32, 4
    load = np.ones((1, experts)) * tokens_an_expert
    load[0, :8] *= 1.4
    load[0, 8:] *= (1 - 8 * 1.4 / experts) / (1 - 8 / experts)
    flat = np.full((1, experts), tokens_an_expert)
    p = Problem.of(load, ranks, 8, step_tokens=float(load.sum()), hardware=hardware)
    table = np.arange(experts).reshape(1, -1)
    model = hardware_named(hardware)
    shares = even_shares(table, experts)
    matmul_only = {"near_s": 1e18, "far_s": 1e18, "alpha_s": 0.0}
    bare = type(model)(**{**{f: getattr(model, f) for f in model.__dataclass_fields__}, **matmul_only})
    slow = float(layer_s(p, load, table, shares, bare)[0])
    level = float(layer_s(p, flat, table, shares, bare)[0])
    return 1 - level / slow


def test_where_balance_pays_and_where_it_does_not() -> None:
    """Decode on A2 at 81 tokens an expert reads weights whatever the tokens; prefill and CloudMatrix 384 compute."""
    assert gain("atlas800i-a2", 81) == pytest.approx(0.0, abs=1e-6)
    assert gain("atlas800i-a2", 512) == pytest.approx(1 - 1 / 1.4, abs=1e-6)
    assert gain("cloudmatrix384", 432) == pytest.approx(1 - 1 / 1.4, abs=1e-6)


def test_prices_follow_links_and_horizon() -> None:
    load = np.ones((1, 256))
    near = Problem.of(load, 32, 9, hardware="atlas800i-a2", horizon_steps=1000)
    far = Problem.of(load, 32, 9, nodes=4, hardware="atlas800i-a2", horizon_steps=1000)
    long = Problem.of(load, 32, 9, nodes=4, hardware="atlas800i-a2", horizon_steps=10_000)
    model = hardware_named("atlas800i-a2")
    assert move_price(far, model) > move_price(near, model)
    assert move_price(long, model) == pytest.approx(move_price(far, model) / 10)


def test_an_answer_predicts_before_and_after() -> None:
    rng = np.random.default_rng(0)
    load = rng.lognormal(0, 1, (2, 64)) * 1000
    prior = np.tile(np.r_[np.arange(64), np.arange(16)], (2, 1))
    p = Problem.of(load, 8, 10, hardware="cloudmatrix384", prior=prior)
    answer = solve(p)
    assert answer.predicted_step_us is not None
    before, after = answer.predicted_step_us
    assert after < before


@pytest.mark.parametrize("cost", ["activated", "model"])
def test_rank_cost_is_pluggable(cost: str) -> None:
    """With few tokens an expert costs what its weights cost: then places count, not tokens."""
    load = [[40, 30, 20, 10, 1, 1, 1, 1]]
    p = Problem.of(load, 2, 6, rank_cost=cost, hardware="atlas800i-a2", step_tokens=50, max_replicas=1)
    tokens = solve(Problem.of(load, 2, 6, max_replicas=1))
    answer = solve(p)
    places = sorted(int((row >= 0).sum()) for row in answer.placement.reshape(2, 6))
    assert places == [4, 4]
    assert tokens.rank_load.max() <= answer.rank_load.max()
