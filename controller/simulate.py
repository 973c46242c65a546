"""Replays a load trace window by window: forecast, policy, and what the windows after make of the placement.

Two ways. Plainly, policies are compared: after every window the solver decides from the placement that it decided
before. As a controller (`gate`, `group`), a change is also judged by every goal of a group, cut into waves, confirmed,
throttled and moved at the speed of the links, by the very code that a controller runs (`controller/replay.py`).

Pure: the same trace and settings give the same result, unless a time for the solver (`budget_ms`) cuts it short. Each
policy is judged on load it has not seen.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controller.costs import Hardware, hardware_named, layer_s
from controller.gate import Split, predicted_s
from controller.replay import Cycle, Replay
from controller.scene import Scene
from controller.solver import Problem, solve
from controller.solver.measure import balance, rank_loads
from controller.solver.problem import Floats, Ints
from controller.tape import Tape, Trace
from eplane.errors import PlacementError, ProblemError
from eplane.placement import linear

Progress = Callable[[int, int], None]
LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Everything here is plain JSON, but for an array as `prior`.

    ranks, slots_per_rank: as in a problem. window: trace entries in one load window. `fields`: further fields of the
    problem (nodes, groups, shares, move_weight, budget_ms, ...). hardware: adds predicted seconds. step_tokens: routed
    tokens a step and layer. history: entries that a policy may look back on. prior: the first placement, `linear`,
    `[L][P]`, or None: the first decision fills an empty world. every: entries between decisions, None: `window`, or what
    the group's interval makes of it. delay: entries until a decided placement is live, None: none, or as long as the
    bundles of a controller's plan travel.

    gate: decide as a controller does. group: its settings where they differ from the defaults; sets `gate`.
    node_names: of each rank, for goals that name nodes. cells: of each rank. entry_s: seconds of one entry, None: the
    interval over `every`. entry_steps: steps of one entry, None: its tokens over `step_tokens`.
    """

    ranks: int
    slots_per_rank: Any
    window: int
    policy: str = "eplane"
    hardware: str | None = None
    gate: bool = False
    step_tokens: float | None = None
    horizon_steps: int = 3000
    history: int = 64
    fields: Mapping[str, Any] = field(default_factory=dict)
    prior: Any = None
    every: int | None = None
    delay: int | None = None
    group: Mapping[str, Any] | None = None
    node_names: Sequence[str] | None = None
    cells: int | None = None
    entry_s: float | None = None
    entry_steps: int | None = None

    @property
    def controlled(self) -> bool:
        return self.gate or self.group is not None


@dataclass(frozen=True, slots=True)
class WindowResult:
    """One decision and the entries until the next. entry: the first of these. step_s: predicted seconds of a step's MoE
    layers on them. kind, goal: the verdict of a controller's cycle, and what refused or throttled a change.
    """

    window: int
    entry: int
    fitted: float
    next_mean: float
    next_low: float
    moves: int
    bytes_moved: int
    acted: bool
    sentence: str
    step_s: float | None
    solve_s: float
    kind: str | None = None
    goal: str | None = None
    waves: int | None = None
    migration_s: float | None = None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """All windows of one policy. `cold`: the first decision filled an empty world; no figure counts it."""

    policy: str
    layers: int
    windows: tuple[WindowResult, ...]
    cold: bool = True
    step_tokens: float | None = None

    @property
    def warm(self) -> tuple[WindowResult, ...]:
        return self.windows[1:] if self.cold else self.windows

    def summary(self) -> dict[str, Any]:
        """next: balancedness on the window after each decision (mean, 5th percentile over layers and windows), ..."""
        warm = self.warm
        steps = [w.step_s for w in warm if w.step_s is not None]
        mean_step = float(np.mean(steps)) if steps else None
        controlled = any(w.kind is not None for w in warm)
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
            "waves": sum(w.waves or 0 for w in warm) if controlled else None,
            "migration_s": sum(w.migration_s or 0.0 for w in warm) if controlled else None,
            "verdicts": dict(Counter(w.kind for w in warm if w.kind is not None)),
            "refused": dict(Counter(w.goal for w in warm if w.goal is not None)),
            "step_us": None if mean_step is None else mean_step * 1e6,
            "steps_a_second": None if not mean_step else 1 / mean_step,
            "tokens_a_second": None if not mean_step or self.step_tokens is None else self.step_tokens / mean_step,
            "solve_ms": float(np.median([w.solve_s for w in self.windows])) * 1e3 if self.windows else 0.0,
        }

    def to_dict(self) -> dict[str, Any]:
        rows = [{name: getattr(w, name) for name in WindowResult.__dataclass_fields__} for w in self.windows]
        return {**self.summary(), "windows_detail": rows}


def simulate(trace: Trace, settings: SimulationSettings, progress: Progress | None = None) -> SimulationResult:
    """Replay `trace [W, L, E]`. progress(done, total) is called after each decision. Raises ProblemError, Infeasible."""
    for name in ("every", "delay"):
        value = getattr(settings, name)
        if value is not None and value < (name == "every"):
            raise ProblemError(name, f"is {value}, must be at least {int(name == 'every')}")
    if settings.window < 1:
        raise ProblemError("window", f"is {settings.window}, must be at least 1")
    if len(trace.shape) != 3 or trace.shape[0] < least_entries(settings):
        shape = tuple(trace.shape)
        raise ProblemError(
            "trace", f"has shape {shape}; {least_entries(settings)} entries of [layers, experts] are needed at least"
        )
    run = _controlled if settings.controlled else _plain
    rows = tuple(run(trace, settings, progress))
    tokens = settings.step_tokens
    if tokens is None and settings.hardware is not None:
        tokens = hardware_named(settings.hardware).tokens_a_rank * settings.ranks
    return SimulationResult(settings.policy, int(trace.shape[1]), rows, settings.prior is None, tokens)


def least_entries(settings: SimulationSettings) -> int:
    """Of a trace: a load window, and what one decision is judged by."""
    return settings.window + _every(settings)


def least_to_count(settings: SimulationSettings) -> int:
    """As many more as there must be for a figure: a first decision that fills an empty world does not count."""
    return least_entries(settings) + (_every(settings) if settings.prior is None else 0)


def _every(settings: SimulationSettings) -> int:
    return Scene.interval(settings) if settings.controlled else settings.every or settings.window


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Load `after [L, E]` that falls under one placement with these shares."""

    after: Floats
    placement: Ints
    shares: Floats


def _ends(entries: int, window: int, every: int) -> range:
    """Entries before which a decision is made: a whole window behind each, and a whole span to judge it by ahead."""
    return range(window, entries - every + 1, every)


# ---------------------------------------------------------------- policies alone


def _plain(trace: Trace, settings: SimulationSettings, progress: Progress | None) -> Iterator[WindowResult]:
    window, every, delay = settings.window, _every(settings), settings.delay or 0
    hardware = None if settings.hardware is None else hardware_named(settings.hardware)
    history = max(settings.history, window)
    tape = Tape(trace, history)
    ends = _ends(trace.shape[0], window, every)
    chosen = first_table(settings, trace.shape[1], trace.shape[2])
    live: tuple[Ints, Floats] | None = None
    coming: deque[tuple[int, Ints, Floats]] = deque()
    for number, end in enumerate(ends):
        problem = _problem(tape.read(max(0, end - history), end), settings, chosen)
        if live is None and problem.prior is not None:
            kept = solve(problem.with_policy("static"))
            live = kept.placement, kept.shares
        started = time.perf_counter()
        answer = solve(problem)
        seconds = time.perf_counter() - started
        if live is None:
            live = answer.placement, answer.shares
        chosen = answer.placement
        coming.append((end + delay, answer.placement, answer.shares))
        spans = []
        for at, until in _spans(end, end + every, window):
            parts = []
            while at < until:
                while coming and coming[0][0] <= at:
                    live = coming.popleft()[1:]
                stop = min(until, coming[0][0]) if coming else until
                parts.append(_Part(tape.read(at, stop).sum(axis=0, dtype=np.float64), *live))
                at = stop
            spans.append(parts)
        mean, low = _judged(spans, settings.ranks, problem)
        yield WindowResult(
            window=number,
            entry=end,
            fitted=float(answer.balancedness.mean()),
            next_mean=mean,
            next_low=low,
            moves=answer.moves,
            bytes_moved=answer.moves * problem.bundle_bytes,
            acted=answer.moves > 0,
            sentence=answer.decisions[0] if answer.decisions else "",
            step_s=None if hardware is None else _plain_step_s(spans, problem, hardware),
            solve_s=seconds,
        )
        if progress is not None:
            progress(number + 1, len(ends))


def _spans(first: int, end: int, window: int) -> Iterator[tuple[int, int]]:
    """The entries `first` to `end` in windows; the last may be shorter."""
    for at in range(first, end, window):
        yield at, min(at + window, end)


def first_table(settings: SimulationSettings, layers: int, experts: int) -> Any:
    """The start placement as `prior` of a problem; None: an empty world. Raises ProblemError."""
    if not isinstance(settings.prior, str):
        return settings.prior
    if settings.prior != LINEAR:
        raise ProblemError("prior", f"is {settings.prior!r:.40}, must be {LINEAR}, a table or nothing")
    if not isinstance(settings.slots_per_rank, int):
        raise ProblemError("prior", f"{LINEAR} needs one number of slots for all ranks")
    try:
        return linear(layers, experts, settings.ranks, settings.slots_per_rank).p2l
    except PlacementError as error:
        raise ProblemError("slots_per_rank", str(error)) from None


def _problem(history: Floats, settings: SimulationSettings, prior: Any) -> Problem:
    raw = {
        "loads": history,
        "ranks": settings.ranks,
        "slots_per_rank": settings.slots_per_rank,
        "window": settings.window,
        "policy": settings.policy,
        "hardware": settings.hardware,
        "step_tokens": settings.step_tokens,
        "horizon_steps": settings.horizon_steps,
        "prior": prior,
        **settings.fields,
    }
    return Problem.from_dict(raw)


def _plain_step_s(spans: list[list[_Part]], problem: Problem, hardware: Hardware) -> float:
    parts = [p for parts in spans for p in parts]
    weights = [p.after.sum() for p in parts]
    steps = [float(layer_s(problem, p.after, p.placement, p.shares, hardware).sum()) for p in parts]
    return float(np.average(steps, weights=weights)) if sum(weights) else float(np.mean(steps))


def _judged(spans: list[list[_Part]], ranks: int, problem: Problem) -> tuple[float, float]:
    """Balancedness of the spans, each as it fell on the ranks: mean and 5th percentile over the layers with tokens."""
    means, lows = [], []
    for parts in spans:
        loads = np.sum([rank_loads(p.after, p.placement, p.shares, ranks) for p in parts], axis=0)
        live = loads.sum(axis=1) > 0
        mean, low = _level(balance(loads, problem.capacity, problem.drained)[live])
        means.append(mean)
        lows.append(low)
    return float(np.mean(means)), float(np.mean(lows))


# ---------------------------------------------------------------- as a controller


def _controlled(trace: Trace, settings: SimulationSettings, progress: Progress | None) -> Iterator[WindowResult]:
    scene = Scene.of(settings, int(trace.shape[1]), int(trace.shape[2]))
    replay = Replay(
        scene.world, scene.group, scene.start, scene.entry_s, settings.delay, scene.solver, scene.routings, scene.speeds
    )
    tape = Tape(trace, 1)
    ends = _ends(trace.shape[0], scene.window, scene.every)
    for at in range(scene.window):
        _observe(tape, replay, scene, at)
    if settings.prior is None:
        replay.place()
    for number, end in enumerate(ends):
        cycle = replay.cycle()
        yield _followed(number, end, cycle, tape, replay, scene)
        if progress is not None:
            progress(number + 1, len(ends))


def _observe(tape: Tape, replay: Replay, scene: Scene, at: int) -> tuple[Floats, Floats]:
    """One entry falls: `[L, E]` tokens by expert and `[L, R]` by rank."""
    load = np.asarray(tape.read(at, at + 1)[0], dtype=np.float64)
    return load, replay.observe(load, scene.steps_of(load))


@dataclass(slots=True)
class _Fallen:
    """Entries one after another, those under one placement and split added up. For one decision."""

    scene: Scene
    parts: list[tuple[Split, Floats]] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    lows: list[float] = field(default_factory=list)

    def add(self, live: Split, load: Floats) -> None:
        if self.parts:
            last, sum_ = self.parts[-1]
            if last.placement is live.placement and last.shares is live.shares:
                self.parts[-1] = last, sum_ + load
                return
        self.parts.append((live, load))

    def judge(self, ranks: Floats) -> None:
        """`ranks [L, R]`: how a window fell."""
        speeds = np.ones(ranks.shape[1]) if self.scene.speeds is None else self.scene.speeds
        mean, low = _level(balance(ranks, speeds, self.scene.drained)[ranks.sum(axis=1) > 0])
        self.means.append(mean)
        self.lows.append(low)

    def step_s(self) -> float:
        scene = self.scene
        known = scene.hardware, scene.step_tokens, scene.speeds
        steps = [predicted_s(scene.world, load, live, *known) for live, load in self.parts]
        weights = [float(load.sum()) for _, load in self.parts]
        return float(np.average(steps, weights=weights)) if sum(weights) else float(np.mean(steps))


def _followed(number: int, end: int, cycle: Cycle, tape: Tape, replay: Replay, scene: Scene) -> WindowResult:
    """The cycle, and the entries until the next one, in which the shares may be split anew."""
    fallen = _Fallen(scene)
    for first, until in _spans(end, end + scene.every, scene.window):
        total = np.zeros((scene.world.shape.layers, scene.world.ranks))
        for at in range(first, until):
            if at > end and (at - end) % scene.split == 0:
                replay.resplit()
            live = replay.live
            load, ranks = _observe(tape, replay, scene, at)
            total += ranks
            fallen.add(live, load)
        fallen.judge(total)
    found = cycle.found
    return WindowResult(
        window=number,
        entry=end,
        fitted=cycle.fitted,
        next_mean=float(np.mean(fallen.means)),
        next_low=float(np.mean(fallen.lows)),
        moves=found.moves if found else 0,
        bytes_moved=sum(wave.bytes for wave in found.waves) if found else 0,
        acted=found is not None,
        sentence=cycle.sentence,
        step_s=fallen.step_s(),
        solve_s=cycle.solve_s,
        kind=cycle.kind.value,
        goal=cycle.refused_by,
        waves=len(found.waves) if found else 0,
        migration_s=cycle.migration_s,
    )


def _level(found: Floats) -> tuple[float, float]:
    """Mean and 5th percentile of the balancedness of layers; 1 where none had tokens."""
    return (float(found.mean()), float(np.percentile(found, 5))) if found.size else (1.0, 1.0)
