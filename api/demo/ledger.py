"""What was measured: load windows on a time line, and the balance of each phase before and after EPlane acted."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from api.demo.script import Phase
from eplane.placement import Placement

FloatTable = NDArray[np.float64]
# A phase is judged on at least so many windows after its first retired wave.
LEAST_WINDOWS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """One complete load window: `rank_load [L, R]` tokens that reached each rank, `expert_load [L, E]` tokens of each
    expert, counted in steps `first_step <= s < last_step` under the placement `digest`."""

    world: str
    digest: str
    first_step: int
    last_step: int
    rank_load: FloatTable
    expert_load: FloatTable

    @property
    def tokens(self) -> float:
        return float(self.rank_load.sum())

    @property
    def balancedness(self) -> float:
        return balancedness(self.rank_load)


def balancedness(rank_load: FloatTable) -> float:
    """Mean over max of each layer, averaged over the layers that had tokens; NaN if none had."""
    peak = rank_load.max(axis=1)
    held = peak > 0
    return float((rank_load.mean(axis=1)[held] / peak[held]).mean()) if held.any() else float("nan")


@dataclass(frozen=True, slots=True)
class Timed:
    """A window on the time line of the demo: seconds after the start of the traffic."""

    at_s: float
    window: Window


@dataclass(frozen=True, slots=True)
class PhaseBalance:
    """Token-weighted mean balancedness of one phase.

    static: the start placement on the same counters as `after`; before: from the phase's start to its first retired
    wave; after: all windows from the first retired wave to the end of the phase, at least 3 (of the whole phase if no
    wave retired in time). None where there was no window.
    """

    domain: str
    start_s: float
    end_s: float
    static: float | None
    before: float | None
    after: float | None
    windows_after: int

    def to_json(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class Ledger:
    """Collects windows (each once) and the steps at which the clock was read.

    `start`: the placement at the beginning. `still`: it is served all the time, evenly split.
    """

    start: Placement | None = None
    still: bool = False
    windows: dict[tuple[str, int, int], Window] = field(default_factory=dict)
    _steps: list[tuple[float, float]] = field(default_factory=list)

    def saw_step(self, at_s: float, step: int) -> None:
        """The group was at `step` at `at_s`. Steps that run backwards belong to a new world: the time line starts anew."""
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()
        self._steps.append((at_s, float(step)))

    def add(self, windows: Iterable[Window]) -> None:
        for window in windows:
            self.windows.setdefault((window.world, window.first_step, window.last_step), window)

    def timed(self) -> list[Timed]:
        """All windows with tokens, in order, each at the time of its middle step."""
        steps = [step for _, step in self._steps]
        times = [at for at, _ in self._steps]
        if not steps:
            return []
        ordered = sorted(self.windows.values(), key=lambda w: (w.first_step, w.last_step))
        middle = [(w.first_step + w.last_step) / 2 for w in ordered]
        at = np.interp(middle, steps, times)
        return [Timed(float(t), w) for t, w in zip(at, ordered, strict=True) if w.tokens > 0]

    def phase(self, phase: Phase, retired_at: Sequence[float]) -> PhaseBalance:
        """The balance of one phase, given when waves retired."""
        inside = [t for t in self.timed() if phase.start_s <= t.at_s < phase.end_s]
        cut = bisect.bisect_left(sorted(retired_at), phase.start_s)
        first = sorted(retired_at)[cut] if cut < len(retired_at) else None
        if first is None or first >= phase.end_s:
            before, after = inside, inside
        else:
            before = [t for t in inside if t.at_s < first]
            after = [t for t in inside if t.at_s >= first]
            if len(after) < LEAST_WINDOWS:
                # Too late to show in this phase: all of it counts, as if nothing had moved.
                before, after = inside, inside
        return PhaseBalance(
            phase.domain,
            phase.start_s,
            phase.end_s,
            self._static([t.window for t in after]),
            _weighted([(t.window.tokens, t.window.balancedness) for t in before]),
            _weighted([(t.window.tokens, t.window.balancedness) for t in after]),
            len(after),
        )

    def _static(self, windows: Sequence[Window]) -> float | None:
        """The start placement, evenly split, on these counters; as measured where that is what was served."""
        if self.start is None:
            return None
        start = self.start
        return _weighted(
            [
                (w.tokens, w.balancedness if self.still else balancedness(start.rank_load(w.expert_load)))
                for w in windows
            ]
        )


def _weighted(pairs: Sequence[tuple[float, float]]) -> float | None:
    total = sum(tokens for tokens, _ in pairs)
    return sum(tokens * value for tokens, value in pairs) / total if total > 0 else None
