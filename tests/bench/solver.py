"""Every placement policy side by side: balance on windows not seen, moves, time, gap to the proved bound.

    python tests/bench/solver.py [--quick] [--layers N] [--seeds N] [--only compare,traces,time,scale,gap] [-o OUT.md]

Each policy's answer for a window is the present placement of the next. Moves leave the cold start out. A family's layers
are alike in distribution, so a sample of them stands for all; times are taken with all layers of a shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from controller.simulate import SimulationSettings, simulate  # noqa: E402
from controller.solver import Problem, policies, solve  # noqa: E402
from controller.solver.measure import balance, rank_loads  # noqa: E402
from tests.bench.solver_loads import FAMILIES, PARTS, SHAPES, Loads, Shape, recorded  # noqa: E402

ORDER = ("static", "eplb", "omni", "swift", "flash", "eplane")


class Report:
    """Lines to the terminal and, at the end, to a file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        self.lines.append(text)


def run(trace: Loads, shape: Shape, policy: str, window: int) -> dict[str, float]:
    settings = SimulationSettings(
        shape.ranks, shape.per_rank, window=window, policy=policy, fields={"nodes": shape.nodes}
    )
    return simulate(trace, settings).summary()


def rows(report: Report, name: str, shape: Shape, traces: list[Loads], window: int) -> dict[str, tuple[float, float]]:
    """One table row: next-window balancedness / moves a layer for each policy, mean over the traces."""
    found: dict[str, tuple[float, float]] = {}
    for policy in ORDER:
        results = [run(trace, shape, policy, window) for trace in traces]
        found[policy] = tuple(float(np.mean([r[k] for r in results])) for k in ("next", "moves_a_layer"))  # type: ignore[assignment]
    best = max((p for p in ORDER if p not in ("static", "eplane")), key=lambda p: found[p][0])
    mine, allowed = found["eplane"], max(8.0, found[best][1] / 5)
    verdict = "yes" if mine[0] > found[best][0] and mine[1] <= allowed else "no"
    cells = " | ".join(f"{found[p][0]:.3f} / {found[p][1]:.1f}" for p in ORDER)
    report.say(f"| {name} | {cells} | {best} | {allowed:.0f} | {verdict} |")
    return found


def compare(report: Report, shapes: list[Shape], families: list[str], layers: int, seeds: int) -> None:
    report.say(
        f"\n### Synthetic families ({layers} layers a shape, {seeds} seeds): next-window balancedness / moves a layer\n"
    )
    report.say("| shape, family | " + " | ".join(ORDER) + " | best other | moves allowed | met |")
    report.say("|" + "---|" * (len(ORDER) + 4))
    for shape in shapes:
        small = replace(shape, layers=min(layers, shape.layers))
        for family in families:
            traces = [FAMILIES[family](small, seed) for seed in range(seeds)]
            rows(report, f"{shape.name}, {family}", small, traces, PARTS)


def traces(report: Report, quick: bool) -> None:
    report.say("\n### Recorded loads: next-window balancedness / moves a layer\n")
    report.say("| trace | " + " | ".join(ORDER) + " | best other | moves allowed | met |")
    report.say("|" + "---|" * (len(ORDER) + 4))
    for name, shape, trace, window in recorded():
        if quick:
            trace, shape = trace[: 6 * window, :4], replace(shape, layers=4)
        rows(report, name, shape, [trace], window)


def warm_case(shape: Shape) -> tuple[Problem, Problem, Loads]:
    """A cold problem, a warm one a window later, and the window after that."""
    loads = FAMILIES["zipf"](shape, 0, 4)
    cold = Problem.of(loads[: 2 * PARTS], shape.ranks, shape.per_rank, nodes=shape.nodes, window=PARTS)
    placed = solve(cold)
    warm = Problem.of(loads[: 3 * PARTS], shape.ranks, shape.per_rank, nodes=shape.nodes, window=PARTS)
    return cold, warm.with_prior(placed.placement), loads[3 * PARTS :].sum(axis=0)


def seconds(problem: Problem, repeat: int = 5) -> tuple[float, float]:
    """Best wall and CPU seconds of a solve: what it takes when nothing else runs."""
    wall, cpu = [], []
    for _ in range(repeat):
        w, c = time.perf_counter(), time.process_time()
        solve(problem)
        wall.append(time.perf_counter() - w)
        cpu.append(time.process_time() - c)
    return min(wall), min(cpu)


def timing(report: Report) -> None:
    shape = SHAPES[0]
    cold, warm, after = warm_case(shape)
    report.say(f"\n### Time, {shape.name}, all {shape.layers} layers, warm process, best of 5 (wall ms / CPU ms)\n")
    report.say("| solve | ms | next-window balancedness | moves a layer |")
    report.say("|---|---|---|---|")
    for name, problem in [
        ("from nothing", cold),
        *((f"from a prior, {b} ms", replace(warm, budget_ms=float(b))) for b in (20, 40, 60, 100)),
        ("from a prior, to the end", warm),
        *((f"{p}", warm.with_policy(p)) for p in ("static", "eplb", "omni", "swift")),
    ]:
        wall, cpu = seconds(problem, 3)
        answer = solve(problem)
        value = balance(
            rank_loads(after, answer.placement, answer.shares, shape.ranks), cold.capacity, cold.drained
        ).mean()
        report.say(f"| {name} | {wall * 1e3:.0f} / {cpu * 1e3:.0f} | {value:.3f} | {answer.moves / shape.layers:.1f} |")


def scaling(report: Report, quick: bool) -> None:
    report.say("\n### Growth of a warm solve to the end (CPU ms, zipf)\n")
    report.say("| layers x experts, ranks x slots | ms | ms for each thousand slots |")
    report.say("|---|---|---|")
    for shape in _growth(quick):
        _, warm, _ = warm_case(shape)
        _, cpu = seconds(warm, 3)
        size = shape.layers * shape.slots / 1000
        name = f"{shape.layers} x {shape.experts}, {shape.ranks} x {shape.per_rank}"
        report.say(f"| {name} | {cpu * 1e3:.0f} | {cpu * 1e3 / size:.2f} |")


def _growth(quick: bool) -> Iterator[Shape]:
    for layers in (8, 16) if quick else (8, 16, 32, 64):
        yield Shape("", layers, 256, 288, 32, 4)
    for ranks in (16, 64) if quick else (16, 64, 128, 256, 512, 1024):
        yield Shape("", 8 if quick else 64, 512, max(1024, ranks), ranks, max(ranks // 8, 1))


def gaps(report: Report, layers: int) -> None:
    report.say(f"\n### Gap to the proved bound on the measured window, forecast off, moves free ({layers} layers)\n")
    report.say("| shape | " + " | ".join(FAMILIES) + " |")
    report.say("|" + "---|" * (len(FAMILIES) + 1))
    for shape in SHAPES:
        small = replace(shape, layers=min(layers, shape.layers))
        cells = []
        for family in FAMILIES:
            loads = FAMILIES[family](small, 0, 2)[:PARTS]
            answer = solve(Problem.of(loads, small.ranks, small.per_rank, nodes=small.nodes, forecast=False))
            cells.append(f"{100 * float((1 - answer.balancedness / answer.bound).mean()):.2f} %")
        report.say(f"| {shape.name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, two families, two layers: a minute")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", default="compare,traces,time,scale,gap")
    parser.add_argument("--shapes", default="", help="first words of shapes, comma separated")
    parser.add_argument("--families", default="", help=", ".join(FAMILIES))
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    assert_known()
    names = [n for n in given.shapes.split(",") if n] or (["c1", "c6b"] if given.quick else [])
    shapes = [s for s in SHAPES if not names or s.name.split()[0] in names]
    families = [f for f in given.families.split(",") if f] or (
        ["zipf", "corr_drift"] if given.quick else list(FAMILIES)
    )
    layers = 2 if given.quick else given.layers
    report = Report()
    parts = given.only.split(",")
    if "compare" in parts:
        compare(report, shapes, families, layers, given.seeds)
    if "traces" in parts:
        traces(report, given.quick)
    if "time" in parts:
        timing(report)
    if "scale" in parts:
        scaling(report, given.quick)
    if "gap" in parts:
        gaps(report, layers)
    if given.output:
        given.output.write_text("\n".join(report.lines) + "\n")


def assert_known() -> None:
    """The table must name every policy there is."""
    if set(ORDER) != set(policies()):
        raise SystemExit(f"policies changed: {json.dumps(sorted(policies()))}")


if __name__ == "__main__":
    main()
