"""Replaying a trace: judged on windows not seen, gate in seconds, progress told."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from controller.simulate import SimulationSettings, simulate
from controller.solver.measure import balance
from eplane.errors import ProblemError, SettingsError
from eplane.placement import linear


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
    base: dict[str, Any] = {"window": 4, "hardware": "atlas800i-a2", "policy": "eplb", "prior": "linear"}
    base |= {"step_tokens": 24 * 4000.0, "fields": {"bundle_bytes": 10**9}}
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
    plain = SimulationSettings(4, 8, window=4)
    for settings in (plain, replace(plain, prior="linear", hardware="h800", group={**CONTROLLED, "shares": True})):
        runs = [simulate(trace(3), settings).to_dict() for _ in range(2)]
        for run in runs:
            run.pop("solve_ms")
            for row in run["windows_detail"]:
                row.pop("solve_s")
        assert runs[0] == runs[1]


CONTROLLED: dict[str, Any] = {"confirm": False, "min_window_tokens": 0, "cooldown_s": 0}


def test_a_prior_is_where_it_starts_and_its_moves_count() -> None:
    base = linear(2, 24, 4, 8)
    free = SimulationSettings(4, 8, window=4, policy="eplb")
    cold, warm, same = (simulate(trace(), replace(free, prior=p)) for p in (None, "linear", base.p2l.tolist()))
    assert (cold.cold, len(cold.warm), len(warm.warm)) == (True, 3, 4)
    assert warm.windows[0].moves > 0
    assert cold.windows[0].moves == 0
    assert [w.next_mean for w in same.windows] == [w.next_mean for w in warm.windows]
    still = simulate(trace(), replace(free, policy="static", prior="linear"))
    first = trace()[4:8].sum(axis=0)
    fell = base.rank_load(first)
    assert still.windows[0].next_mean == pytest.approx((fell.mean(axis=1) / fell.max(axis=1)).mean())
    for group in (None, CONTROLLED):
        given = replace(free, policy="static", prior=np.roll(base.p2l, 8, axis=1), group=group, hardware="h800")
        # The same experts on other ranks are level alike.
        assert simulate(trace(), given).windows[0].next_mean == pytest.approx(still.windows[0].next_mean)


def test_a_decision_every_few_entries_and_live_only_later() -> None:
    free = SimulationSettings(4, 8, window=4, policy="eplb", prior="linear")
    often = simulate(trace(), replace(free, every=2))
    assert [w.entry for w in often.windows] == list(range(4, 19, 2))
    # Live after all the entries by which it is judged: as if the first decision were never made.
    late = simulate(trace(), replace(free, delay=4))
    assert late.windows[0].next_mean == simulate(trace(), replace(free, policy="static")).windows[0].next_mean
    assert late.windows[1].moves > 0
    soon = simulate(trace(), replace(free, delay=2)).windows[0].next_mean
    assert late.windows[0].next_mean < soon < simulate(trace(), free).windows[0].next_mean


def test_an_array_that_is_read_by_slices_gives_the_same() -> None:
    class Sliced:
        shape = trace(12).shape

        def __getitem__(self, part: slice) -> np.ndarray:
            return trace(12)[part].copy()

    for settings in (
        SimulationSettings(4, 8, window=4, policy="eplb", history=8),
        SimulationSettings(4, 8, window=4, policy="eplb", group=CONTROLLED, hardware="h800", prior="linear"),
    ):
        runs = [simulate(t, settings).windows for t in (trace(12), Sliced())]
        one, two = ([replace(w, solve_s=0.0) for w in run] for run in runs)
        assert one == two


def test_a_controller_in_trace_time_keeps_its_limits() -> None:
    """Entries of 600 s: six of them in the hour that the budget counts, and what was moved before is forgotten."""
    rng = np.random.default_rng(5)
    jumps = np.concatenate([np.roll(trace(1, 1) + 9, shift, axis=2).repeat(4, axis=0) for shift in rng.permutation(8)])
    base = SimulationSettings(
        4, 8, window=4, every=1, policy="eplb", prior="linear", hardware="demo", entry_s=600.0, group=CONTROLLED
    )
    free = simulate(jumps, base).summary()
    assert free["rebalances"] > 6
    first = next(w.moves for w in simulate(jumps, base).windows if w.acted)
    tight = simulate(jumps, replace(base, group={**CONTROLLED, "moves_per_hour": first + 10}))
    moved = [(w.entry * 600, w.moves) for w in tight.windows if w.acted]
    assert len(moved) > 2
    for at, _ in moved:
        assert sum(n for then, n in moved if at - 3600 < then <= at) <= first + 10
    assert tight.summary()["refused"]["moves_per_hour"] > 0
    said = [w.sentence for w in tight.windows if w.goal == "moves_per_hour"]
    assert all(f"{first + 10} are allowed" in s or f"{first + 10} an hour are allowed" in s for s in said)
    calm = simulate(jumps, replace(base, group={**CONTROLLED, "cooldown_s": 10_000})).summary()
    assert calm["rebalances"] < free["rebalances"]
    assert calm["refused"]["cooldown"] > 0


def test_a_controller_of_ranks_that_differ_in_speed() -> None:
    """The slow rank counts as slow wherever a replayed controller judges: measured, predicted, split and moved."""
    speeds = np.array([1.0, 1.0, 1.0, 0.25])
    # Time enough for kernels that are first loaded here.
    calm = {**CONTROLLED, "shares": False, "solver_budget_ms": 20_000}
    still = SimulationSettings(4, 8, window=4, policy="static", prior="linear", hardware="demo", group=calm)
    slow = replace(still, fields={"capacity": speeds.tolist()})
    (window, *_), (alike, *_) = (simulate(trace(), s).windows for s in (slow, still))
    base, none = linear(2, 24, 4, 8), np.zeros(4, dtype=np.bool_)
    for part, seen in ((slice(4, 8), window.next_mean), (slice(0, 4), window.fitted)):
        fell = base.rank_load(trace()[part].sum(axis=0))
        assert seen == pytest.approx(balance(fell, speeds, none).mean())
    # On the preset `demo` a rank's time is its tokens over its speed.
    assert window.step_s is not None
    assert alike.step_s is not None
    fell = base.rank_load(trace()[4:8].sum(axis=0))
    step = (fell / speeds).max(axis=1) / fell.sum(axis=1)
    assert window.step_s / alike.step_s == pytest.approx(step.sum() / (fell.max(axis=1) / fell.sum(axis=1)).sum(), 1e-3)
    assert f"measured balancedness {window.fitted:.3f}" in window.sentence
    for shares in (False, True):
        group = {**calm, "shares": shares}
        moved = simulate(trace(), replace(slow, policy="eplane", group=group)).windows
        assert moved[0].acted
        assert moved[0].fitted > window.fitted + 0.2
        assert f" to {moved[0].fitted:.3f}, " in moved[0].sentence
    with pytest.raises(ProblemError, match="capacity: is 0 for rank 3"):
        simulate(trace(), replace(slow, fields={"capacity": [1, 1, 1, 0]}))
    split = simulate(trace(), replace(slow, policy="eplane", group={**calm, "shares": True})).windows
    even = simulate(trace(), replace(slow, policy="eplane")).windows
    assert split[-1].next_mean > even[-1].next_mean


def test_settings_of_a_group_that_do_not_fit() -> None:
    base = SimulationSettings(4, 8, window=4, prior="linear", hardware="h800", group=CONTROLLED)
    for more, error, says in (
        ({"group": {"drained": ["n7"]}}, ProblemError, "drained: names node n7; the nodes here are n0"),
        ({"group": {"speed": 1}}, SettingsError, "speed: is not a setting"),
        ({"slots_per_rank": [8, 8, 8, 7]}, ProblemError, "slots_per_rank: must be one number"),
        ({"cells": 3}, ProblemError, "cells: 3 cells a rank are fewer than"),
        ({"node_names": ["a"]}, ProblemError, "node_names: names 1 ranks"),
        ({"prior": "left"}, ProblemError, "prior: is 'left'"),
        ({"prior": [[0] * 32] * 2}, ProblemError, "prior: is no placement"),
        ({"every": 0}, ProblemError, "every: is 0"),
        ({"delay": -1}, ProblemError, "delay: is -1"),
    ):
        with pytest.raises(error, match=says):
            simulate(trace(), replace(base, **more))


def test_nothing_is_compiled_before_a_solve() -> None:
    """The command line and the API import the solver: that must not load the compiler."""
    code = "import sys, controller.solver, controller.simulate, controller.costs, controller.forecast; controller.solver.policies(); "
    code += "sys.exit(any(m in sys.modules for m in ('numba', 'torch', 'scipy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
