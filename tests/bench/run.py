"""Every benchmark, one after the other, each in a process of its own: what `make bench` runs.

    python tests/bench/run.py [--full] [--only NAME]

`--full` makes the solver's benchmarks run in full (the comparison: all shapes and families, six layers, two seeds, two
processes) instead of their quick form. Benchmarks show figures, they do not judge them: the exit code tells only whether
each ran to its end.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""More OpenMP threads than free cores stall every parallel region, which would be all that is measured."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A module that is run with `quick`, or with `full` when asked for all of it."""

    name: str
    title: str
    module: str
    quick: tuple[str, ...] = ()
    full: tuple[str, ...] = ()


BENCHMARKS = (
    Benchmark("migration", "Migration cost: steps with a wave in progress and without", "tests.bench.migration"),
    Benchmark(
        "solver",
        "Solver: balance, cost and time of the policies",
        "tests.bench.solver",
        quick=("--quick",),
        full=("--layers", "6", "--seeds", "2", "--jobs", "2"),
    ),
    Benchmark(
        "coactivation",
        "Nodes touched per token, with and without sampled routings",
        "tests.bench.coactivation",
        quick=("--quick",),
        full=("--tiny",),
    ),
    Benchmark(
        "coactivation",
        "Solver: nodes touched per token with sampled routings",
        "tests.bench.coactivation",
        quick=("--quick",),
    ),
)


def run(benchmark: Benchmark, *, full: bool) -> int:
    """Run it to its end, output as it comes. Returns its exit code."""
    line = "=" * len(benchmark.title)
    print(f"{line}\n{benchmark.title}\n{line}", flush=True)
    start = time.monotonic()
    options = benchmark.full if full else benchmark.quick
    command = [sys.executable, "-m", benchmark.module, *options]
    with subprocess.Popen(command, cwd=ROOT, env={**ONE_THREAD, **os.environ}) as process:
        code = _wait(process)
    ended = "" if code == 0 else f", exit code {code}"
    print(f"\n{benchmark.name}: {time.monotonic() - start:.0f} s{ended}\n", flush=True)
    return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    """Wait for its end, also when told to stop: it first stops the processes it started. Then raises SystemExit."""
    told: list[int] = []

    def stop(number: int, _: object) -> None:
        told.append(number)
        if number == signal.SIGTERM:  # Ctrl-C reaches the benchmark by itself.
            process.terminate()

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        raise SystemExit(128 + told[0])
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/bench/run.py", description="Run the benchmarks")
    parser.add_argument("--full", action="store_true", help="the long form of benchmarks that have one")
    parser.add_argument("--only", choices=[b.name for b in BENCHMARKS], help="one benchmark alone")
    given = parser.parse_args(arguments)
    chosen = [b for b in BENCHMARKS if given.only in (None, b.name)]
    codes = [run(benchmark, full=given.full) for benchmark in chosen]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
