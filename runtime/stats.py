"""How long steps take: a histogram and the latest steps one by one, kept on the rank and sent in portions."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence

from runtime.engine import StepReport
from runtime.wire import BOUNDS_MS

EVERY_S = 0.25
"""At most this often a rank tells its launcher."""

_PORTION = 512


class StepStats:
    """Totals since the rank began. Only steps in which some rank had tokens are timed: ticks are no work."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_MS) + 1)
        self._sum_ms = 0.0
        self._steps = 0
        self._ticks = 0
        self._prefill = 0
        self._decode = 0
        self._switches = 0
        self._recent: list[Sequence[object]] = []
        self._told = 0.0
        self._step = -1

    def note(self, report: StepReport, wave: bool) -> None:
        """Take in a step; `wave`: a wave was in progress (staging, armed, or old cells waiting) on this rank."""
        self._step = report.step
        self._switches += report.switched
        if not report.total:
            self._ticks += 1
            return
        ms = report.seconds * 1000.0
        self._steps += 1
        self._sum_ms += ms
        self._counts[bisect_left(BOUNDS_MS, ms)] += 1
        self._prefill += report.prefill
        self._decode += report.decode
        if len(self._recent) < _PORTION:
            self._recent.append((report.step, round(ms, 3), report.own, report.total, int(wave)))

    def due(self) -> bool:
        return time.monotonic() - self._told >= EVERY_S

    def take(self) -> dict[str, object]:
        """The totals, and the steps since the last call: (step, ms, own tokens, all tokens, wave in progress)."""
        self._told = time.monotonic()
        recent, self._recent = self._recent, []
        return {
            "step": self._step,
            "steps": self._steps,
            "ticks": self._ticks,
            "switches": self._switches,
            "prefill": self._prefill,
            "decode": self._decode,
            "sum_ms": self._sum_ms,
            "counts": list(self._counts),
            "recent": recent,
        }
