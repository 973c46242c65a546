"""What a wave costs the steps it runs beside: 2 real ranks, bundles of 8 MB, the same plan live and stop-the-world.

    python -m tests.bench.migration [--rounds 5] [--steps 260] [--layers 2] [--json FILE]

One world serves constant traffic. Every round measures, one after the other and in changing order,

    without     steps with no wave in progress
    live        steps between the first byte and the last acknowledgement of a wave that is held to a rate limit
    unlimited   the same wave without a limit, under the same traffic
    stopped     the same wave with traffic held back: the stall counts as one long step

so that noise of the machine falls on all of them alike. Step times are the ranks' own (the slower rank of each step).
The limit is set so that a wave lasts at least `--steps` steps, and is told. All bytes really move over TCP, are
digested in the receiving cell, and the ranks switch as they do under a controller.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from eplane.placement import Placement
from tests.bench.two_ranks import EXPERTS, RANKS, Mover, Size, Traffic, swapped, write_checkpoint
from tests.runtime.serving import Serve, serving

SETTLE_S = 0.4
"""Ranks tell their step times four times a second."""
LIMIT = 1.5
KINDS = ("without", "live", "unlimited", "stopped")


@dataclass
class Steps:
    """All steps of one kind, over all rounds. `ms`: of each step; `stalls`: seconds in which no step was served."""

    ms: list[float] = field(default_factory=list)
    rounds: list[list[float]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    stalls: list[float] = field(default_factory=list)

    def add(self, ms: list[float], seconds: float) -> None:
        self.ms += ms
        self.rounds.append(ms)
        self.seconds.append(seconds)

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.ms, q))

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": len(self.ms),
            "p50_ms": round(self.percentile(50), 2),
            "p99_ms": round(self.percentile(99), 2),
            "max_ms": round(max(self.ms), 2),
            "steps_of_round": [len(r) for r in self.rounds],
            "p99_ms_of_round": [round(float(np.percentile(r, 99)), 2) for r in self.rounds],
            "seconds_of_round": [round(s, 3) for s in self.seconds],
            "stall_s": [round(s, 3) for s in self.stalls],
        }


class Bench:
    """One world and what was measured on it."""

    def __init__(self, serve: Serve, size: Size, mover: Mover, traffic: Traffic, http: httpx.AsyncClient) -> None:
        self._serve, self._size, self._mover, self._traffic, self._http = serve, size, mover, traffic, http
        self.kinds = {kind: Steps() for kind in KINDS}
        self._since = -1

    async def quiet(self, steps: int, pace_s: float) -> tuple[list[float], float]:
        """`steps` steps with no wave in progress; `pace_s`: seconds that a step takes, to wait as long as is needed."""
        start = time.monotonic()
        await self._rows()
        rows: list[float] = []
        while len(rows) < steps:
            await asyncio.sleep(max(0.3, (steps - len(rows)) * pace_s))
            rows += (await self._rows())[0]
        return rows, time.monotonic() - start

    async def round(self, number: int, steps: int, pace_s: float, limit: float) -> None:
        order = KINDS if number % 2 == 0 else KINDS[::-1]
        for kind in order:
            if kind == "without":
                self.kinds[kind].add(*await self.quiet(steps, pace_s))
            elif kind == "stopped":
                await self._stopped(steps, pace_s)
            else:
                await self._rows()
                seconds = await self._mover.wave(self._target(), limit if kind == "live" else None)
                self.kinds[kind].add((await self._rows())[1], seconds)

    async def _stopped(self, steps: int, pace_s: float) -> None:
        """Steps without a wave, and the stall in which the bundles move, as one step of its length."""
        await self._traffic.hold()
        stall = await self._mover.wave(self._target(), None)
        self._traffic.release()
        rows, seconds = await self.quiet(steps, pace_s)
        self.kinds["stopped"].add([*rows, stall * 1000.0], seconds + stall)
        self.kinds["stopped"].stalls.append(stall)

    def _target(self) -> Placement:
        return swapped(self._mover.placement, self._size.pairs)

    async def _rows(self) -> tuple[list[float], list[float]]:
        """Milliseconds of the steps since the last call: (without, with) a wave in progress on some rank."""
        await asyncio.sleep(SETTLE_S)
        answer = await self._http.get(f"{self._serve.url}/v1/world", params={"recent_since": self._since})
        slowest: dict[int, tuple[float, bool]] = {}
        seen = [entry["recent"] for entry in answer.raise_for_status().json()["ranks"]]
        for step, ms, _, _, wave in (row for rows in seen for row in rows):
            before = slowest.get(step, (0.0, False))
            slowest[step] = (max(before[0], ms), before[1] or bool(wave))
        # A step that only one rank has told yet counts with the next call.
        last = min((rows[-1][0] for rows in seen if rows), default=self._since)
        if all(seen):
            self._since = last
        kept = [value for step, value in slowest.items() if step <= self._since]
        return [ms for ms, wave in kept if not wave], [ms for ms, wave in kept if wave]


def full_speed_s(size: Size) -> float:
    """Seconds in which one core of this machine copies and digests what a rank receives: no stall can be shorter."""
    source, target = np.zeros(size.bundle_bytes, np.uint8), np.empty(size.bundle_bytes, np.uint8)
    start = time.monotonic()
    for _ in range(size.moved):
        target[:] = source
        blake2b(target.data, digest_size=16).digest()
    return time.monotonic() - start


async def measure(size: Size, rounds: int, steps: int, folder: Path) -> dict[str, Any]:
    me = asyncio.current_task()
    if me is not None:  # The world is a process of its own and must not outlive a benchmark that is told to end.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    write_checkpoint(size, folder / "model")
    options = ("--slots", str(EXPERTS // RANKS), "--spare-cells", str(size.moved), "--placement", "linear")
    with serving(str(folder / "model"), folder / "run", RANKS, *options) as serve:
        mover = await Mover.connect(serve)
        async with httpx.AsyncClient(timeout=60) as http, Traffic(serve.url, size.clients) as traffic:
            bench = Bench(serve, size, mover, traffic, http)
            await bench.quiet(50, 0.1)
            ms, seconds = await bench.quiet(steps // 2, 0.05)
            pace_s = seconds / len(ms)
            limit = size.moved * size.bundle_bytes / (steps * pace_s)
            before = os.getloadavg()
            for number in range(rounds):
                await bench.round(number, steps, pace_s, limit)
                print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        await mover.close()
    return _result(size, bench, limit, before, traffic.answered)


def _result(size: Size, bench: Bench, limit: float, before: tuple[float, ...], answered: int) -> dict[str, Any]:
    kinds = bench.kinds
    live, without = kinds["live"], kinds["without"]
    return {
        "bundle_bytes": size.bundle_bytes,
        "bundles_per_rank_and_wave": size.moved,
        "bytes_per_wave": RANKS * size.moved * size.bundle_bytes,
        "bytes_per_s_limit_of_a_rank": round(limit),
        "requests_in_flight": size.clients,
        "requests_answered": answered,
        "fewest_steps_of_a_live_wave": min(len(r) for r in live.rounds),
        "ratio_p50": round(live.percentile(50) / without.percentile(50), 3),
        "ratio_p99": round(live.percentile(99) / without.percentile(99), 3),
        "stall_s_longest": round(max(kinds["stopped"].stalls), 3),
        "stall_s_one_core_at_full_speed": round(full_speed_s(size), 3),
        "load_average": {"before": before, "after": os.getloadavg()},
        "cores": os.cpu_count(),
        "kinds": {kind: steps.to_json() for kind, steps in kinds.items()},
    }


def show(result: dict[str, Any]) -> None:
    mb = 1e6
    print(
        f"{RANKS} ranks, bundles of {result['bundle_bytes'] / mb:.2f} MB, {result['bundles_per_rank_and_wave']} to each"
        f" rank a wave ({result['bytes_per_wave'] / mb:.0f} MB in all), limit"
        f" {result['bytes_per_s_limit_of_a_rank'] / mb:.1f} MB/s a rank, {result['requests_in_flight']} requests in flight"
    )
    load = result["load_average"]
    print(f"load average {load['before'][0]:.1f} before, {load['after'][0]:.1f} after, on {result['cores']} cores\n")
    print(f"{'':<10} {'steps':>6} {'p50 ms':>9} {'p99 ms':>9} {'max ms':>10} {'s a round':>10}   p99 of each round")
    for kind, row in result["kinds"].items():
        each = " ".join(f"{p:.0f}" for p in row["p99_ms_of_round"])
        seconds = float(np.mean(row["seconds_of_round"]))
        print(
            f"{kind:<10} {row['steps']:>6} {row['p50_ms']:>9.1f} {row['p99_ms']:>9.1f} {row['max_ms']:>10.1f}"
            f" {seconds:>10.2f}   {each}"
        )
    print(
        f"\nlive against without: p50 x {result['ratio_p50']:.2f}, p99 x {result['ratio_p99']:.2f}"
        f" (asked: at most {LIMIT}); a live wave lasted at least {result['fewest_steps_of_a_live_wave']} steps"
    )
    print(
        f"stop-the-world: no step for up to {result['stall_s_longest']:.2f} s;"
        f" one core at full speed would need {result['stall_s_one_core_at_full_speed']:.2f} s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.migration", description="What a wave costs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=260, help="steps that a phase lasts (default 260)")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=1368, help="expert width; a bundle has 12 x hidden x width bytes")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=4, help="experts that trade places, a layer (1 to 4)")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    size = Size(given.hidden, given.width, given.layers, given.clients, given.pairs)
    with tempfile.TemporaryDirectory(prefix="eplane-bench-") as folder:
        try:
            result = asyncio.run(measure(size, given.rounds, given.steps, Path(folder)))
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
    show(result)
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
