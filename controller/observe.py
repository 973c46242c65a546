"""What the group's ranks counted, as load windows: complete ones for deciding, the rest counted and shown.

A window is complete when every rank of the world reported the same span of steps under the same placement. Reports may
come late, twice, out of order between nodes, from a dead world or not at all; none of it reaches a complete window.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from eplane.errors import LoadReportError
from eplane.load import FloatLoad, Intake, LoadReport, LoadWindow, Refusal, SubWindow, fold
from eplane.placement import Placement
from eplane.routing import RankSample, TokenSample, merge
from eplane.topology import World

# More than any replay: an agent sends its last 16 to a new leader, and nodes do not do it at the same moment.
PENDING_SPANS = 96
KNOWN_PLACEMENTS = 16
# Routed tuples of a window that are kept: about as many bytes as its counts take.
WINDOW_TUPLES = 256
# Refusals by cause: a closed set, for metrics.
CAUSES = ("world", "rank", "shape", "duplicate", "late", "digest", "span", "counts", "sample", "other")

Span = tuple[int, int, str]


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One complete window. `rank_load [L, R]`: tokens that truly reached each rank, whatever the shares were.

    `sample`: routed tuples of its tokens, if any rank told some. `at`: second at which the last rank's counts came, on a
    clock that only runs forward; None where nobody looked.
    """

    window: LoadWindow
    rank_load: FloatLoad
    sample: TokenSample | None = None
    at: float | None = None

    @property
    def sampled(self) -> int:
        return len(self.sample) if self.sample else 0

    @property
    def balancedness(self) -> NDArray[np.float64]:
        """`[L]` mean / max over ranks; NaN for a layer without tokens."""
        return balancedness(self.rank_load)


@dataclass(frozen=True, slots=True)
class Took:
    """What became of one report."""

    accepted: int
    refused: tuple[Refusal, ...]


def balancedness(rank_load: FloatLoad, speeds: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
    """`[L]` mean / max of `rank_load [L, R]`, 1 is perfect; NaN for a layer without tokens.

    `speeds [R]`: relative ones of the ranks, None: all alike. Then it is the time of a perfect split over that of the
    slowest rank.
    """
    even = np.ones(rank_load.shape[1]) if speeds is None else speeds
    peak = (rank_load / even).max(axis=1)
    return np.where(peak > 0, rank_load.sum(axis=1) / even.sum() / np.where(peak > 0, peak, 1.0), np.nan)


def mean_balancedness(per_layer: NDArray[np.float64]) -> float | None:
    """Averaged over the layers that had tokens; None if none had."""
    held = per_layer[np.isfinite(per_layer)]
    return float(held.mean()) if held.size else None


class WindowBook:
    """The load of one group. One world at a time: entering another forgets the load of the last."""

    def __init__(self, keep: int = 128) -> None:
        self._keep = keep
        self._intake: Intake | None = None
        self._placements: OrderedDict[str, Placement] = OrderedDict()
        self._pending: OrderedDict[Span, dict[int, SubWindow]] = OrderedDict()
        self._samples: dict[Span, dict[int, TokenSample]] = {}
        self._seen: deque[Seen] = deque(maxlen=keep)
        self._lately: deque[bool] = deque(maxlen=64)
        self.accepted = 0
        self.refused: Counter[str] = Counter()
        self.incomplete = 0

    @property
    def world(self) -> World | None:
        return self._intake.world if self._intake else None

    @property
    def completeness(self) -> float | None:
        """Part of the last 64 spans that became complete windows; None before the first."""
        return sum(self._lately) / len(self._lately) if self._lately else None

    @property
    def last_step(self) -> int:
        return self._seen[-1].window.last_step if self._seen else 0

    def enter(self, world: World) -> None:
        """Count for this world from now on. The same world again changes nothing."""
        if self._intake is not None and self._intake.world == world:
            return
        self._intake = Intake(world)
        for kept in (self._placements, self._pending, self._samples, self._seen, self._lately):
            kept.clear()

    def leave(self) -> None:
        self._intake = None
        self._pending.clear()
        self._samples.clear()
        self._seen.clear()

    def know(self, placement: Placement) -> None:
        """A placement that counts may be made under. The newest few are kept: late counts of old epochs still fold."""
        self._placements[placement.digest] = placement
        self._placements.move_to_end(placement.digest)
        while len(self._placements) > KNOWN_PLACEMENTS:
            self._placements.popitem(last=False)

    def keep(self, windows: int) -> None:
        """Change how many complete windows are kept."""
        if windows != self._keep:
            self._keep = windows
            self._seen = deque(self._seen, maxlen=windows)

    def newest(self, count: int) -> tuple[Seen, ...]:
        """Up to `count` complete windows, oldest first."""
        return tuple(islice(self._seen, max(0, len(self._seen) - count), None))

    def seq_of(self, ranks: Iterable[int]) -> int:
        """The newest seq that was taken of all these ranks; -1 if one of them never reported."""
        taken = self._intake.taken if self._intake else {}
        return min((taken[rank].seq if rank in taken else -1 for rank in ranks), default=-1)

    def take(
        self,
        report: LoadReport,
        unreadable: tuple[Refusal, ...] = (),
        samples: Iterable[RankSample] = (),
        at: float | None = None,
    ) -> Took:
        """Take what is good of a report that came at second `at`; every refusal is counted by cause and returned with
        its sentence.

        A sample is taken with the counts of its rank and steps, or not at all; a bad one takes nothing with it.
        """
        refused = list(unreadable)
        self.refused["counts"] += len(unreadable)
        accepted = 0
        beside = {sample.key: sample for sample in samples}
        for sub in sorted(report.subwindows, key=lambda s: s.seq):
            sample = beside.pop((sub.rank, sub.first_step, sub.last_step), None)
            try:
                placement = self._take(report, sub)
            except LoadReportError as error:
                self.refused[_cause(error)] += 1
                refused.append(Refusal(sub.rank, sub.seq, str(error)))
                continue
            accepted += 1
            if sample is not None:
                refused.extend(self._attach(sub, sample))
            self._file(placement, sub, at)
        strays = [
            Refusal(s.rank, -1, f"samples: no counts of steps {s.first_step} on came along") for s in beside.values()
        ]
        self.refused["sample"] += len(strays)
        self.accepted += accepted
        return Took(accepted, (*refused, *strays))

    def _take(self, report: LoadReport, sub: SubWindow) -> Placement:
        if self._intake is None:
            raise LoadReportError("world", "the group has no world that is known here yet")
        owner = self._intake.world.node_of_rank[sub.rank] if sub.rank < self._intake.world.ranks else None
        if owner is not None and owner != report.node:
            raise LoadReportError("rank", f"rank {sub.rank} runs on node {owner}, not on {report.node}")
        intake = self._intake.take(sub)
        placement = self._placements.get(sub.digest)
        if placement is None:
            raise LoadReportError("digest", f"no placement {sub.digest} is known in this world")
        empty = placement.by_rank()[:, sub.rank] < 0
        if (sub.prefill[empty] + sub.decode[empty]).any():
            raise LoadReportError("prefill", f"rank {sub.rank} counted tokens on a slot that holds no expert")
        self._intake = intake
        return placement

    def _attach(self, sub: SubWindow, sample: RankSample) -> Iterable[Refusal]:
        """Have `sample` wait for the window of `sub` to be whole."""
        if self._intake is None:
            return
        try:
            sample.check(self._intake.world.shape)
            self._samples.setdefault((sub.first_step, sub.last_step, sub.digest), {})[sub.rank] = sample.sample
        except LoadReportError as error:
            self.refused["sample"] += 1
            yield Refusal(sub.rank, sub.seq, f"samples: {error}")

    def _file(self, placement: Placement, sub: SubWindow, at: float | None) -> None:
        span = (sub.first_step, sub.last_step, sub.digest)
        parts = self._pending.setdefault(span, {})
        parts[sub.rank] = sub
        if len(parts) == placement.ranks:
            del self._pending[span]
            seen = _seen(placement, parts)
            self._insert(replace(seen, sample=self._merged(seen.window, self._samples.pop(span, {})), at=at))
            self._lately.append(True)
        while len(self._pending) > PENDING_SPANS:
            self._give_up()

    def _merged(self, window: LoadWindow, samples: dict[int, TokenSample]) -> TokenSample | None:
        """The ranks' samples as one; none of them where they tell of more tokens than the window counted."""
        parts = [samples[rank] for rank in sorted(samples)]
        routed = sum(part.tokens * part.tuples.shape[2] for part in parts)
        if routed > window.total.sum(axis=1).max():
            self.refused["sample"] += len(parts)
            return None
        return merge(parts, WINDOW_TUPLES, (window.first_step, window.last_step))

    def _insert(self, seen: Seen) -> None:
        """In the order of steps: nodes report at different moments."""
        self._seen.append(seen)
        if len(self._seen) > 1 and self._seen[-2].window.first_step > seen.window.first_step:
            ordered = sorted(self._seen, key=lambda s: s.window.first_step)
            self._seen = deque(ordered, maxlen=self._keep)

    def _give_up(self) -> None:
        """The oldest span will not be whole any more: close it, so that its parts can not come late."""
        span = min(self._pending)
        del self._pending[span]
        self._samples.pop(span, None)
        self.incomplete += 1
        self._lately.append(False)
        if self._intake is not None:
            self._intake = self._intake.close(span[1])

    def pending(self) -> tuple[tuple[Span, tuple[int, ...]], ...]:
        """Spans that wait for ranks, with the ranks that are missing; oldest first."""
        ranks = set(range(self._intake.world.ranks)) if self._intake else set()
        return tuple((span, tuple(sorted(ranks - set(parts)))) for span, parts in sorted(self._pending.items()))


def _seen(placement: Placement, parts: dict[int, SubWindow]) -> Seen:
    subs = [parts[rank] for rank in sorted(parts)]
    window = fold(placement, subs)
    rank_load = np.stack([(s.prefill + s.decode).sum(axis=1) for s in subs], axis=1).astype(np.float64)
    rank_load.setflags(write=False)
    return Seen(window, rank_load)


def _cause(error: LoadReportError) -> str:
    reason, name = error.reason, error.field
    if name == "seq" or "overlaps" in reason:
        return "duplicate"
    if name == "first_step":
        return "late"
    if name in ("prefill", "decode"):
        return "shape" if "shape" in reason else "counts"
    return name if name in CAUSES else "other"
