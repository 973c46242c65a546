"""Replays a load trace window by window: forecast, policy, gate, and what the next window makes of the placement.

Pure: the same trace and settings give the same result. Each policy is judged on windows it has not seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controller.costs import Hardware, hardware_named, layer_s, worth_it
from controller.solver import Problem, solve
from controller.solver.measure import balance, rank_loads
from controller.solver.problem import Floats, Ints
from eplane.errors import ProblemError

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """ranks, slots_per_rank: as in a problem. window: trace entries in one load window. `fields`: further fields of the
    problem (nodes, groups, shares, move_weight, budget_ms, ...). hardware: adds predicted seconds, and the gate when
    `gate` is on; step_tokens: routed tokens a step and layer. history: entries that a policy may look back on.
    """

    ranks: int
    slots_per_rank: Any
    window: int
    policy: str = "eplane"
    hardware: str | None = None
    gate: bool = False
    step_tokens: float | None = None
    horizon_steps: int = 3000
    min_relative_gain: float = 0.0
    history: int = 64
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WindowResult:
    """One decision and the window after it. step_s: predicted seconds of a step's MoE layers on that window."""

    window: int
    fitted: float
    next_mean: float
    next_low: float
    moves: int
    bytes_moved: int
    acted: bool
    sentence: str
    step_s: float | None
    solve_s: float


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """All windows of one policy. Moves, bytes and rebalances leave the cold start out."""

    policy: str
    layers: int
    windows: tuple[WindowResult, ...]

    @property
    def warm(self) -> tuple[WindowResult, ...]:
        return self.windows[1:]

    def summary(self) -> dict[str, Any]:
        """next: balancedness on the window after each decision (mean, 5th percentile over layers and windows), ..."""
        warm = self.warm
        steps = [w.step_s for w in warm if w.step_s is not None]
        mean_step = float(np.mean(steps)) if steps else None
        return {
            "policy": self.policy,
            "windows": len(warm),
            "next": float(np.mean([w.next_mean for w in warm])) if warm else 1.0,
            "next_p5": float(np.mean([w.next_low for w in warm])) if warm else 1.0,
            "fitted": float(np.mean([w.fitted for w in warm])) if warm else 1.0,
            "moves": sum(w.moves for w in warm),
            "moves_a_layer": sum(w.moves for w in warm) / max(len(warm), 1) / self.layers,
            "bytes": sum(w.bytes_moved for w in warm),
            "rebalances": sum(w.acted for w in warm),
            "step_us": None if mean_step is None else mean_step * 1e6,
            "steps_a_second": None if not mean_step else 1 / mean_step,
            "solve_ms": float(np.median([w.solve_s for w in self.windows])) * 1e3 if self.windows else 0.0,
        }

    def to_dict(self) -> dict[str, Any]:
        rows = [{name: getattr(w, name) for name in WindowResult.__dataclass_fields__} for w in self.windows]
        return {**self.summary(), "windows_detail": rows}


def simulate(trace: Floats, settings: SimulationSettings, progress: Progress | None = None) -> SimulationResult:
    """Replay `trace [W, L, E]`. progress(done, total) is called after each window. Raises ProblemError."""
    if trace.ndim != 3 or trace.shape[0] < 2 * settings.window or settings.window < 1:
        raise ProblemError(
            "trace", f"has shape {trace.shape}; [entries, layers, experts] with two windows at least is needed"
        )
    hardware = None if settings.hardware is None else hardware_named(settings.hardware)
    if settings.gate and hardware is None:
        raise ProblemError("hardware", "is needed for the gate: it weighs seconds")
    count = trace.shape[0] // settings.window
    prior: Ints | None = None
    rows = []
    for number in range(count - 1):
        end = (number + 1) * settings.window
        problem = _problem(trace[max(0, end - settings.history) : end], settings, prior)
        after = np.asarray(trace[end : end + settings.window].sum(axis=0))
        row, prior = _window(number, problem, after, settings, hardware)
        rows.append(row)
        if progress is not None:
            progress(number + 1, count - 1)
    return SimulationResult(settings.policy, int(trace.shape[1]), tuple(rows))


def _problem(history: Floats, settings: SimulationSettings, prior: Ints | None) -> Problem:
    raw = {
        "loads": history,
        "ranks": settings.ranks,
        "slots_per_rank": settings.slots_per_rank,
        "window": settings.window,
        "policy": settings.policy,
        "hardware": settings.hardware,
        "step_tokens": settings.step_tokens,
        "horizon_steps": settings.horizon_steps,
        **settings.fields,
    }
    return Problem.from_dict(raw).with_prior(prior)


def _window(
    number: int, problem: Problem, after: Floats, settings: SimulationSettings, hardware: Hardware | None
) -> tuple[WindowResult, Ints]:
    started = time.perf_counter()
    answer = solve(problem)
    seconds = time.perf_counter() - started
    placement, shares, moves = answer.placement, answer.shares, answer.moves
    sentence = answer.decisions[0] if answer.decisions else ""
    if settings.gate and hardware is not None and problem.prior is not None and answer.predicted_step_us is not None:
        before_us, after_us = answer.predicted_step_us
        cost = answer.bytes_moved / hardware.far_s / problem.ranks
        verdict = worth_it(before_us * 1e-6, after_us * 1e-6, cost, settings.horizon_steps, settings.min_relative_gain)
        sentence = verdict.sentence
        if moves and not verdict.act:
            kept = solve(problem.with_policy("static"))
            placement, shares, moves = kept.placement, kept.shares, kept.moves
    loads = rank_loads(after, placement, shares, problem.ranks)
    live = after.sum(axis=1) > 0
    next_balance = balance(loads, problem.capacity, problem.drained)[live]
    if not next_balance.size:
        next_balance = np.ones(1)
    step = None if hardware is None else float(layer_s(problem, after, placement, shares, hardware).sum())
    return (
        WindowResult(
            window=number,
            fitted=float(answer.balancedness.mean()),
            next_mean=float(next_balance.mean()),
            next_low=float(np.percentile(next_balance, 5)),
            moves=moves,
            bytes_moved=moves * problem.bundle_bytes,
            acted=moves > 0,
            sentence=sentence,
            step_s=step,
            solve_s=seconds,
        ),
        placement,
    )
