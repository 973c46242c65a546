"""Replaying a trace: judged on windows not seen, gate in seconds, progress told."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from controller.simulate import SimulationSettings, simulate
from eplane.errors import ProblemError


def trace(windows: int = 5, parts: int = 4) -> np.ndarray:
    rng = np.random.default_rng(7)
    base = rng.lognormal(0, 1, (2, 24)) * 3000
    base[1, 0] = base[1].sum()
    drift = np.cumsum(rng.normal(0, 0.05, (windows * parts, 2, 24)), axis=0)
    return rng.poisson(base * np.exp(drift)).astype(np.float64)


def test_eplane_beats_static_on_windows_not_seen() -> None:
    told: list[tuple[int, int]] = []
    results = {
        name: simulate(trace(), SimulationSettings(4, 8, window=4, policy=name), lambda a, b: told.append((a, b)))
        for name in ("static", "eplb", "eplane")
    }
    summary = {name: result.summary() for name, result in results.items()}
    assert summary["eplane"]["next"] > summary["static"]["next"] + 0.2
    assert summary["eplane"]["moves"] < summary["eplb"]["moves"] / 3
    assert summary["static"]["moves"] == summary["static"]["rebalances"] == 0
    assert told[:4] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert len(results["eplane"].windows) == 4
    assert len(results["eplane"].to_dict()["windows_detail"]) == 4


def test_the_gate_holds_moves_that_do_not_pay() -> None:
    base = {"window": 4, "hardware": "atlas800i-a2", "step_tokens": 24 * 4000.0, "policy": "eplb", "prior": "linear"}
    base["fields"] = {"bundle_bytes": 10**9}
    free = {"confirm": False, "min_window_tokens": 0, "cooldown_s": 0}
    held = simulate(trace(), SimulationSettings(4, 8, group={**free, "horizon_s": 0.1, "interference": 1}, **base))
    assert held.summary()["moves"] == held.summary()["waves"] == 0
    assert held.summary()["verdicts"] == {"not_worth_it": 4}
    assert held.summary()["refused"] == {"gain": 4}
    assert all("not worth it, 0." in w.sentence for w in held.warm)
    made = simulate(trace(), SimulationSettings(4, 8, group=free, **base)).summary()
    assert made["verdicts"]["started"] == made["rebalances"] > 0
    assert made["moves"] > 0
    assert made["migration_s"] > 0
    assert made["next"] > held.summary()["next"]
    assert made["step_us"] < held.summary()["step_us"]
    assert made["tokens_a_second"] == pytest.approx(24 * 4000.0 / made["step_us"] * 1e6)


def test_bad_traces_are_refused() -> None:
    with pytest.raises(ProblemError, match="trace"):
        simulate(trace()[:7], SimulationSettings(4, 8, window=4))
    with pytest.raises(ProblemError, match="hardware"):
        simulate(trace(), SimulationSettings(4, 8, window=4, gate=True))


def test_the_same_trace_gives_the_same_result() -> None:
    runs = [simulate(trace(3), SimulationSettings(4, 8, window=4)).summary() for _ in range(2)]
    for run in runs:
        run.pop("solve_ms")
    assert runs[0] == runs[1]


def test_nothing_is_compiled_before_a_solve() -> None:
    """The command line and the API import the solver: that must not load the compiler."""
    code = "import sys, controller.solver, controller.simulate, controller.costs, controller.forecast; controller.solver.policies(); "
    code += "sys.exit(any(m in sys.modules for m in ('numba', 'torch', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
