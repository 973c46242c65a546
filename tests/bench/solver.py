"""Every placement policy side by side: balance on windows not seen, moves, time, gap to the proved bound.

    python tests/bench/solver.py [--quick] [--layers N] [--seeds N] [--jobs N] [--shapes c1,c2] [--families zipf]
                                 [--only compare,traces,originals,loads,kernels,time,scale,gap] [-o OUT.md]

Each policy's answer for a window is the present placement of the next. Balance is the mean over all decisions, moves leave
the first (the cold start) out. A family's layers are alike in distribution, so a sample of them stands for all; times are
taken with all layers of a shape. Everything but the times is the same in every run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from controller.simulate import SimulationSettings, simulate  # noqa: E402
from controller.solver import Problem, policies, solve  # noqa: E402
from controller.solver.measure import balance, rank_loads  # noqa: E402
from tests.bench.report import Report  # noqa: E402
from tests.bench.solver_loads import FAMILIES, PARTS, SHAPES, Loads, Shape, recorded, unrest  # noqa: E402
from tests.bench.solver_originals import PUBLISHED, SWIFT_IN_ORDER, Reached, means_table, scenario_table  # noqa: E402

ORDER = ("static", "eplb", "omni", "omni-swap", "swift", "flash", "eplane")
PARTS_OF_ALL = ("compare", "traces", "originals", "loads", "kernels", "time", "scale", "gap")
HEAD = ["shape, family", *ORDER, "best other", "moves allowed", "met"]

Rows = dict[tuple[str, str], dict[str, Reached]]


def run(trace: Loads, shape: Shape, policy: str, window: int, prior: list[list[int]] | None = None) -> Reached:
    """One policy over one trace, from nothing or from `prior [L][P]`."""
    settings = SimulationSettings(
        shape.ranks, shape.per_rank, window=window, policy=policy, fields={"nodes": shape.nodes}, prior=prior
    )
    windows = simulate(trace, settings).windows
    moves = [w.moves / shape.layers for w in windows[1:]]
    return Reached(*(float(np.mean(v)) for v in ([w.fitted for w in windows], [w.next_mean for w in windows], moves)))


@dataclass(frozen=True, slots=True)
class Task:
    """One row: a shape and family over seeds, or a recorded trace by its number."""

    shape: Shape
    family: str
    seeds: int = 1
    first: int = 0
    trace: int = -1
    quick: bool = False

    def __call__(self) -> dict[str, Reached]:
        if self.trace < 0:
            traces, shape, window = (
                [FAMILIES[self.family](self.shape, self.first + s) for s in range(self.seeds)],
                self.shape,
                PARTS,
            )
        else:
            _, shape, trace, window = recorded()[self.trace]
            if self.quick:
                trace, shape = trace[: 6 * window, :4], replace(shape, layers=4)
            traces = [trace]
        found = {p: Reached(*np.mean([run(t, shape, p, window) for t in traces], axis=0).tolist()) for p in ORDER}
        if self.family in PUBLISHED:
            in_order = [[slot % shape.experts for slot in range(shape.slots)]] * shape.layers
            runs = [run(t, shape, "swift", window, in_order) for t in traces]
            found[SWIFT_IN_ORDER] = Reached(*np.mean(runs, axis=0).tolist())
        return found


def each(tasks: list[Task], jobs: int) -> Iterator[dict[str, Reached]]:
    """Their rows, in order, as they become ready."""
    if jobs == 1:
        yield from (task() for task in tasks)
        return
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(Task.__call__, tasks)


def row_line(name: str, found: dict[str, Reached]) -> str:
    """One line of a table: next-window balancedness / moves a layer of each policy, and whether ours is better cheaply."""
    best = max((p for p in ORDER if p not in ("static", "eplane")), key=lambda p: found[p].next)
    mine, allowed = found["eplane"], max(8.0, found[best].moves / 5)
    verdict = "yes" if mine.next > found[best].next and mine.moves <= allowed else "no"
    cells = [f"{found[p].next:.3f} / {found[p].moves:.1f}" for p in ORDER]
    return f"| {' | '.join([name, *cells, best, f'{allowed:.0f}', verdict])} |"


def tell_rows(report: Report, names: list[str], keys: list[tuple[str, str]], tasks: list[Task], jobs: int) -> Rows:
    """Say one line after the other, and in how many of them ours is better."""
    rows: Rows = {}
    for name, key, found in zip(names, keys, each(tasks, jobs), strict=True):
        report.say(row_line(name, found))
        rows[key] = found
    others = [p for p in ORDER if p != "eplane"]
    ahead = sum(r["eplane"].next > max(r[p].next for p in others) for r in rows.values())
    met = sum(line.endswith("| yes |") for line in report.lines[-len(rows) :])
    report.say("", f"`eplane` is better balanced than every other policy in {ahead} of {len(rows)} rows; met: {met}.")
    return rows


def compare(report: Report, given: argparse.Namespace, shapes: list[Shape], families: list[str]) -> Rows:
    small = [replace(s, layers=min(given.layers, s.layers)) for s in shapes]
    pairs = [(s, f) for s in small for f in families]
    title = f"Synthetic families ({given.layers} layers a shape, {given.seeds} seeds from {given.first_seed}): next-window balancedness / moves a layer"
    report.table(title, HEAD)
    tasks = [Task(s, f, given.seeds, given.first_seed) for s, f in pairs]
    names, keys = [f"{s.name}, {f}" for s, f in pairs], [(s.name.split()[0], f) for s, f in pairs]
    return tell_rows(report, names, keys, tasks, given.jobs)


def traces(report: Report, given: argparse.Namespace) -> Rows:
    found = recorded()
    report.table("Recorded loads: next-window balancedness / moves a layer", ["trace", *HEAD[1:]])
    tasks = [Task(shape, "recorded", trace=i, quick=given.quick) for i, (_, shape, _, _) in enumerate(found)]
    keys = [(shape.name, "recorded") for _, shape, _, _ in found]
    return tell_rows(report, [name for name, *_ in found], keys, tasks, given.jobs)


def originals(report: Report, rows: Rows) -> None:
    report.say("", "### Beside the originals: next-window balancedness / moves a layer", "", *scenario_table(rows))
    lines = means_table(rows, {s.name.split()[0]: s.slots for s in SHAPES})
    if len(lines) > 2:
        report.say("", "### Fidelity: means over zipf, lognormal and corr_drift", "", *lines)


def restless(report: Report, given: argparse.Namespace, shapes: list[Shape], families: list[str]) -> None:
    """How far windows lie apart and how hot the hottest expert is, in each family."""
    head = ["load", "total variation between windows", "hottest expert / mean (least to most)"]
    report.table("The loads", head)
    cases = [
        (f"{shape.name}, {family}", FAMILIES[family](replace(shape, layers=min(given.layers, shape.layers)), 0), PARTS)
        for shape in shapes
        for family in families
    ]
    cases += [(name, trace, window) for name, _, trace, window in recorded()]
    for name, load, window in cases:
        apart, hot, least, most = unrest(load, window)
        report.say(f"| {name} | {apart:.3f} | {hot:.1f} ({least:.1f} to {most:.1f}) |")


def kernels(report: Report, quick: bool) -> None:
    from tests.bench.solver_kernels import compare_kernels

    report.table("Hot kernels: compiled (numba) against vectorised numpy", ["kernel", "numba ms", "numpy ms", "ratio"])
    for name, ready, plain, miss in compare_kernels(8 if quick else SHAPES[0].layers):
        if miss > 1e-5:
            raise SystemExit(f"{name}: the results differ by {miss:g}")
        report.say(f"| {name} | {ready:.2f} | {plain:.1f} | {plain / ready:.0f} |")


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
    report.say(f"\n### Time, {shape.name}, all {shape.layers} layers, warm process, best of 3 (wall ms / CPU ms)\n")
    report.say("| solve | ms | next-window balancedness | moves a layer |")
    report.say("|---|---|---|---|")
    for name, problem in [
        ("from nothing", cold),
        *((f"from a prior, {b} ms", replace(warm, budget_ms=float(b))) for b in (20, 40, 60, 100)),
        ("from a prior, to the end", warm),
        *((f"{p}", warm.with_policy(p)) for p in ORDER[:-1]),
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


def gaps(report: Report, layers: int, shapes: list[Shape], families: list[str]) -> None:
    report.say(f"\n### Gap to the proved bound on the measured window, forecast off, moves free ({layers} layers)\n")
    report.say("| shape | " + " | ".join(families) + " |")
    report.say("|" + "---|" * (len(families) + 1))
    for shape in shapes:
        small = replace(shape, layers=min(layers, shape.layers))
        cells = []
        for family in families:
            loads = FAMILIES[family](small, 0, 2)[:PARTS]
            answer = solve(
                Problem.of(loads, small.ranks, small.per_rank, nodes=small.nodes, forecast=False, tight_bound=True)
            )
            cells.append(f"{100 * float((1 - answer.balancedness / answer.bound).mean()):.2f} %")
        report.say(f"| {shape.name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two shapes, two families, two layers: a minute")
    parser.add_argument("--layers", type=int, default=6, help="of each shape, in the comparison and the gaps")
    parser.add_argument("--seeds", type=int, default=2, help="of each family")
    parser.add_argument("--first-seed", type=int, default=0, help="others than those on which something was chosen")
    parser.add_argument("--jobs", type=int, default=1, help="processes, for the comparison and the recorded loads")
    parser.add_argument("--only", default=",".join(PARTS_OF_ALL), help="parts, comma separated (default: %(default)s)")
    parser.add_argument("--shapes", default="", help="first words of shapes, comma separated")
    parser.add_argument("--families", default="", help=", ".join(FAMILIES))
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    assert_known()
    if given.quick:
        given.layers, given.seeds = 2, 1
    words = [s.name.split()[0] for s in SHAPES]
    names = chosen(given.shapes, words, ["c1", "c6b"] if given.quick else words)
    shapes = [s for s in SHAPES if s.name.split()[0] in names]
    families = chosen(given.families, list(FAMILIES), ["zipf", "corr_drift"] if given.quick else list(FAMILIES))
    report, rows = Report(), Rows()
    steps: dict[str, Callable[[], object]] = {
        "compare": lambda: rows.update(compare(report, given, shapes, families)),
        "traces": lambda: rows.update(traces(report, given)),
        "originals": lambda: originals(report, rows),
        "loads": lambda: restless(report, given, shapes, families),
        "kernels": lambda: kernels(report, given.quick),
        "time": lambda: timing(report),
        "scale": lambda: scaling(report, given.quick),
        "gap": lambda: gaps(report, given.layers, shapes, families),
    }
    for part in chosen(given.only, list(PARTS_OF_ALL), list(PARTS_OF_ALL)):
        steps[part]()
    if given.output:
        given.output.write_text("\n".join(report.lines) + "\n")


def chosen(text: str, known: list[str], default: list[str]) -> list[str]:
    """What a comma separated option names, in the order of `known`. Exits with a sentence for a name that is not there."""
    asked = [word for word in text.split(",") if word]
    for word in asked:
        if word not in known:
            raise SystemExit(f"{word!r} is none of {', '.join(known)}")
    return [word for word in known if word in asked] if asked else default


def assert_known() -> None:
    """The table must name every policy there is."""
    if set(ORDER) != set(policies()):
        raise SystemExit(f"policies changed: {json.dumps(sorted(policies()))}")


if __name__ == "__main__":
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    main()
