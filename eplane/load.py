"""Load: how many tokens every expert got over a span of steps, and how reports of it are judged before they count.

A rank counts the tokens that ARRIVE at each of its slots, with prefill and decode apart; padding, warm-up and tick
tokens are no load. All ranks cut their counts at the same step numbers (multiples of the window length, and each
switch), so that a sub-window is counted under one placement. Spans are half-open: steps `first_step <= s < last_step`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from eplane.errors import LoadReportError
from eplane.fields import MAX_INT, Fields, pack
from eplane.placement import EMPTY, Placement
from eplane.plan import DIGEST_DIGITS, WORLD_DIGITS
from eplane.topology import World

IntCounts = NDArray[np.int64]
FloatLoad = NDArray[np.float64]

MAX_COUNT = 2**31 - 1
MAX_RANKS = 1 << 16
MAX_SUBWINDOWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class SubWindow:
    """Tokens that arrived at the slots of one rank in steps `first_step <= s < last_step` of one world.

    `prefill`, `decode`: int64 `[L, K]`, read-only. `digest`: the placement they were counted under. `seq` grows with
    every sub-window of the rank in its world. Raises LoadReportError for what can not have been counted.
    """

    world: str
    digest: str
    first_step: int
    last_step: int
    rank: int
    prefill: IntCounts
    decode: IntCounts
    seq: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_step < self.last_step <= MAX_INT:
            raise LoadReportError("last_step", f"steps {self.first_step} to {self.last_step} are no span")
        if not 0 <= self.rank < MAX_RANKS or self.seq < 0:
            raise LoadReportError("rank", f"rank {self.rank} with seq {self.seq} can not be")
        object.__setattr__(self, "prefill", _counts("prefill", self.prefill))
        object.__setattr__(self, "decode", _counts("decode", self.decode))
        if self.prefill.shape != self.decode.shape:
            raise LoadReportError("decode", f"has shape {self.decode.shape}, prefill has {self.prefill.shape}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SubWindow):
            return NotImplemented
        return self._head() == other._head() and all(
            np.array_equal(a, b) for a, b in ((self.prefill, other.prefill), (self.decode, other.decode))
        )

    def __hash__(self) -> int:
        return hash(self._head())

    @property
    def tokens(self) -> int:
        return int(self.prefill.sum() + self.decode.sum())

    def _head(self) -> tuple[object, ...]:
        return self.world, self.digest, self.first_step, self.last_step, self.rank, self.seq

    def to_json(self) -> dict[str, object]:
        return {
            "world": self.world,
            "digest": self.digest,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "rank": self.rank,
            "prefill": pack(self.prefill.astype(np.int32)),
            "decode": pack(self.decode.astype(np.int32)),
            "seq": self.seq,
        }

    @classmethod
    def read(cls, fields: Fields) -> SubWindow:
        parts = (
            fields.hexes("world", WORLD_DIGITS),
            fields.hexes("digest", DIGEST_DIGITS),
            fields.integer("first_step"),
            fields.integer("last_step"),
            fields.integer("rank", high=MAX_RANKS - 1),
            fields.packed("prefill", (-1, -1)).astype(np.int64),
            fields.packed("decode", (-1, -1)).astype(np.int64),
            fields.integer("seq"),
        )
        fields.done()
        try:
            return cls(*parts)
        except LoadReportError as error:
            raise fields.wrong(error.field, error.reason) from error

    @classmethod
    def from_json(cls, data: object, path: str = "subwindow") -> SubWindow:
        return cls.read(Fields(data, path, LoadReportError))


@dataclass(frozen=True, slots=True)
class Refusal:
    """A sub-window that was not taken, and the one sentence why. Rank and seq are -1 where they could not be read."""

    rank: int
    seq: int
    reason: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What an agent posts: the new sub-windows of its node's ranks."""

    group: str
    node: str
    incarnation: str
    world: str
    subwindows: tuple[SubWindow, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "v": 1,
            "group": self.group,
            "node": self.node,
            "incarnation": self.incarnation,
            "world": self.world,
            "subwindows": [item.to_json() for item in self.subwindows],
        }

    @classmethod
    def from_json(cls, data: object, path: str = "report") -> tuple[LoadReport, tuple[Refusal, ...]]:
        """The report with every sub-window that can be read, and a refusal for each that can not.

        Raises LoadReportError where the report as a whole can not be read.
        """
        fields = Fields(data, path, LoadReportError)
        fields.version()
        head = (
            fields.text("group", most=128),
            fields.text("node", most=128),
            fields.hexes("incarnation", WORLD_DIGITS),
            fields.hexes("world", WORLD_DIGITS),
        )
        items = fields.items("subwindows", most=MAX_SUBWINDOWS)
        fields.done()
        good: list[SubWindow] = []
        bad: list[Refusal] = []
        for at, item in enumerate(items):
            try:
                sub = SubWindow.from_json(item, f"{path}.subwindows[{at}]")
                if sub.world != head[3]:
                    raise LoadReportError(
                        f"{path}.subwindows[{at}].world", f"is {sub.world}, the report's is {head[3]}"
                    )
                good.append(sub)
            except LoadReportError as error:
                bad.append(Refusal(_small(item, "rank"), _small(item, "seq"), str(error)))
        return cls(*head, tuple(good)), tuple(bad)


@dataclass(frozen=True, slots=True)
class Taken:
    """Where one rank's taken sub-windows end."""

    seq: int
    last_step: int


@dataclass(frozen=True, slots=True)
class Intake:
    """What has been taken of one world, so that nothing is counted twice. `taken` by rank.

    `closed_before`: sub-windows that start at an earlier step are late: their windows have been judged already.
    """

    world: World
    taken: Mapping[int, Taken] = field(default_factory=lambda: MappingProxyType({}))
    closed_before: int = 0

    def take(self, sub: SubWindow) -> Intake:
        """The intake with `sub` taken. Raises LoadReportError (duplicate, late, other world, ...) and takes nothing."""
        if sub.world != self.world.world:
            raise LoadReportError("world", f"{sub.world} is not the life of the group that serves now")
        if sub.rank >= self.world.ranks:
            raise LoadReportError("rank", f"rank {sub.rank} is outside 0..{self.world.ranks - 1}")
        expected = (self.world.shape.layers, self.world.slots)
        if sub.prefill.shape != expected:
            raise LoadReportError("prefill", f"has shape {sub.prefill.shape}, this world has {expected}")
        before = self.taken.get(sub.rank)
        if before is not None and sub.seq <= before.seq:
            raise LoadReportError("seq", f"rank {sub.rank}: {sub.seq} is a duplicate, {before.seq} was taken")
        if before is not None and sub.first_step < before.last_step:
            raise LoadReportError(
                "first_step", f"rank {sub.rank}: {sub.first_step} overlaps what was taken up to step {before.last_step}"
            )
        if sub.first_step < self.closed_before:
            raise LoadReportError(
                "first_step",
                f"rank {sub.rank}: {sub.first_step} is late, windows before {self.closed_before} are closed",
            )
        taken = {**self.taken, sub.rank: Taken(sub.seq, sub.last_step)}
        return Intake(self.world, MappingProxyType(taken), self.closed_before)

    def close(self, before: int) -> Intake:
        """The intake that takes nothing any more that starts before step `before`."""
        return Intake(self.world, self.taken, max(self.closed_before, before))


@dataclass(frozen=True, slots=True, eq=False)
class LoadWindow:
    """Tokens that each expert got in steps `first_step <= s < last_step`, over the ranks that were seen.

    `prefill`, `decode`: float64 `[L, E]`, read-only, finite, not negative. `complete`: every rank of the placement
    reported every step of the span.
    """

    world: str
    digest: str
    first_step: int
    last_step: int
    prefill: FloatLoad
    decode: FloatLoad
    complete: bool
    ranks_seen: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            table = np.array(getattr(self, name), dtype=np.float64)
            if table.ndim != 2 or not np.isfinite(table).all() or (table < 0).any():
                raise LoadReportError(name, f"must be [layers, experts], finite and not negative, got {table.shape}")
            table.setflags(write=False)
            object.__setattr__(self, name, table)
        if self.prefill.shape != self.decode.shape:
            raise LoadReportError("decode", f"has shape {self.decode.shape}, prefill has {self.prefill.shape}")

    @property
    def total(self) -> FloatLoad:
        """`[L, E]` tokens of both phases."""
        return self.prefill + self.decode

    @property
    def tokens(self) -> float:
        return float(self.prefill.sum() + self.decode.sum())


def fold(placement: Placement, subwindows: Sequence[SubWindow]) -> LoadWindow:
    """Sub-windows of any ranks and steps, counted under `placement`, as one window per expert.

    Raises LoadReportError when there are none, worlds differ, a digest is not the placement's, a shape or rank does
    not fit it, tokens were counted on an empty slot, or two sub-windows of a rank overlap. No token is lost or made.
    """
    if not subwindows:
        raise LoadReportError("subwindows", "there is none to fold")
    counts = np.zeros((2, placement.layers, placement.ranks * placement.slots), dtype=np.int64)
    by_slot = counts.reshape(2, placement.layers, placement.ranks, placement.slots)
    for sub in subwindows:
        _check_fits(placement, subwindows[0].world, sub)
        by_slot[0, :, sub.rank] += sub.prefill
        by_slot[1, :, sub.rank] += sub.decode
    empty = placement.p2l == EMPTY
    if counts[:, empty].any():
        layer, slot = (int(at[0]) for at in np.nonzero(counts.sum(axis=0) * empty))
        raise LoadReportError("prefill", f"layer {layer}: tokens at slot {slot}, which holds no expert")
    load = np.zeros((2, placement.layers, placement.experts))
    layers, slots = np.nonzero(~empty)
    for phase in range(2):
        np.add.at(load[phase], (layers, placement.p2l[layers, slots]), counts[phase, layers, slots])
    first, last, complete = _span(placement.ranks, subwindows)
    seen = tuple(sorted({sub.rank for sub in subwindows}))
    return LoadWindow(subwindows[0].world, placement.digest, first, last, load[0], load[1], complete, seen)


def _check_fits(placement: Placement, world: str, sub: SubWindow) -> None:
    if sub.world != world:
        raise LoadReportError("world", f"{sub.world} and {world} are different lives of the group")
    if sub.digest != placement.digest:
        raise LoadReportError("digest", f"rank {sub.rank} counted under {sub.digest}, not under {placement.digest}")
    if sub.rank >= placement.ranks:
        raise LoadReportError("rank", f"rank {sub.rank} is outside 0..{placement.ranks - 1}")
    if sub.prefill.shape != (placement.layers, placement.slots):
        expected = (placement.layers, placement.slots)
        raise LoadReportError("prefill", f"rank {sub.rank} has shape {sub.prefill.shape}, the placement has {expected}")


def _span(ranks: int, subwindows: Iterable[SubWindow]) -> tuple[int, int, bool]:
    """First step, last step, and whether all `ranks` cover all steps between. Refuses overlaps of one rank."""
    spans: dict[int, list[tuple[int, int]]] = {}
    for sub in subwindows:
        spans.setdefault(sub.rank, []).append((sub.first_step, sub.last_step))
    ends: set[tuple[int, int]] = set()
    gap = False
    for rank, own in spans.items():
        own.sort()
        for (_, before), (after, _) in pairwise(own):
            if after < before:
                raise LoadReportError("first_step", f"rank {rank} reported step {after} twice")
            gap = gap or after > before
        ends.add((own[0][0], own[-1][1]))
    first, last = min(first for first, _ in ends), max(last for _, last in ends)
    return first, last, not gap and len(ends) == 1 and len(spans) == ranks


def _counts(name: str, table: IntCounts) -> IntCounts:
    given = np.asarray(table)
    if given.ndim != 2 or 0 in given.shape:
        raise LoadReportError(name, f"must be [layers, slots], got shape {given.shape}")
    if given.dtype.kind not in "iu":
        raise LoadReportError(name, f"must hold whole numbers, got {given.dtype}")
    if (given < 0).any():
        raise LoadReportError(name, f"must not be negative, got {int(given.min())}")
    if (given > MAX_COUNT).any():
        raise LoadReportError(name, f"{int(given.max())} tokens at one slot overflow {MAX_COUNT}")
    counts = np.array(given, dtype=np.int64)
    counts.setflags(write=False)
    return counts


def _small(item: object, name: str) -> int:
    """`item[name]` for a refusal's label, -1 where it is no plain small number."""
    value = item.get(name) if isinstance(item, Mapping) else None
    plain = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT
    return value if plain and isinstance(value, int) else -1
