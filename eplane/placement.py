"""Placement: which logical expert every slot holds, and how tokens are split over replicas.

`p2l [L, P]` maps slot to logical expert, `slot = rank * K + k`, with `K` the same for all ranks of a world; a slot
that a rank does not have, or that holds nothing, is -1. A placement is immutable and named by a 64-bit digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplane.errors import PlacementError

EMPTY = -1
IntTable = NDArray[np.int32]
FloatTable = NDArray[np.float64]


@dataclass(frozen=True)
class Placement:
    """An immutable table `p2l [layers, ranks * slots]`, int32, -1 = empty, for `experts` logical experts a layer.

    Raises PlacementError when an entry is out of range, an expert of a layer has no replica, or a rank holds the
    same expert twice in a layer (a second copy on one rank is never wanted: it costs a slot and gains nothing).
    """

    p2l: IntTable
    ranks: int
    experts: int

    def __post_init__(self) -> None:
        given = np.asarray(self.p2l)
        if given.dtype.kind not in "iu":
            raise PlacementError(f"a placement holds whole numbers, got {given.dtype}")
        # Judged before it is narrowed, so that no number wraps into the range of the experts; copied, so that no one
        # who still holds the given array can change the table.
        _check(given, self.ranks, self.experts)
        table = np.array(given, dtype=np.int32, order="C")
        table.setflags(write=False)
        object.__setattr__(self, "p2l", table)

    @property
    def layers(self) -> int:
        return int(self.p2l.shape[0])

    @property
    def slots(self) -> int:
        """K: slots of one rank in one layer."""
        return int(self.p2l.shape[1]) // self.ranks

    def by_rank(self) -> IntTable:
        """`[L, R, K]` view."""
        return self.p2l.reshape(self.layers, self.ranks, self.slots)

    def rank_of(self, slot: int) -> int:
        return slot // self.slots

    def replicas(self, layer: int, expert: int) -> tuple[int, ...]:
        """Slots of `expert` in `layer`, ascending."""
        return tuple(int(s) for s in np.flatnonzero(self.p2l[layer] == expert))

    @cached_property
    def replica_count(self) -> IntTable:
        """`[L, E]`: replicas of each logical expert."""
        counts = np.zeros((self.layers, self.experts), dtype=np.int32)
        layer, slot = np.nonzero(self.p2l >= 0)
        np.add.at(counts, (layer, self.p2l[layer, slot]), 1)
        return counts

    @cached_property
    def digest64(self) -> int:
        """Signed 64-bit name of the table, carried by every counts exchange."""
        head = np.array([self.layers, self.p2l.shape[1], self.ranks, self.experts], dtype="<i8").tobytes()
        raw = hashlib.blake2b(head + self.p2l.astype("<i4").tobytes(), digest_size=8).digest()
        return int.from_bytes(raw, "little", signed=True)

    @property
    def digest(self) -> str:
        """The same name as 16 hexadecimal digits, as stored and shown."""
        return f"{self.digest64 & (2**64 - 1):016x}"

    def even_shares(self) -> FloatTable:
        """`[L, P]`: each replica of an expert takes the same share; empty slots 0."""
        held = self.p2l >= 0
        count = np.take_along_axis(self.replica_count, np.where(held, self.p2l, 0), axis=1)
        return np.where(held, 1.0 / np.maximum(count, 1), 0.0)

    def rank_load(self, load: ArrayLike, shares: FloatTable | None = None) -> FloatTable:
        """`[L, R]` tokens each rank gets when experts get `load [L, E]` tokens and replicas split by `shares`."""
        weights = np.asarray(load, dtype=np.float64)
        split = self.even_shares() if shares is None else shares
        held = self.p2l >= 0
        per_slot = np.where(held, np.take_along_axis(weights, np.where(held, self.p2l, 0), axis=1) * split, 0.0)
        per_rank: FloatTable = per_slot.reshape(self.layers, self.ranks, self.slots).sum(axis=2)
        return per_rank

    def delta(self, target: Placement) -> tuple[Change, ...]:
        """The slots that differ in `target`, ascending by (layer, slot)."""
        if target.p2l.shape != self.p2l.shape or target.ranks != self.ranks or target.experts != self.experts:
            raise PlacementError(
                f"placements of different worlds: {self.p2l.shape} on {self.ranks} ranks against "
                f"{target.p2l.shape} on {target.ranks}"
            )
        layer, slot = np.nonzero(self.p2l != target.p2l)
        return tuple(Change(int(a), int(b), int(target.p2l[a, b])) for a, b in zip(layer, slot, strict=True))

    def apply(self, changes: Sequence[Change]) -> Placement:
        """The placement with `changes` made. Raises PlacementError if the result is not a valid placement."""
        table = self.p2l.copy()
        for change in changes:
            if not (0 <= change.layer < self.layers and 0 <= change.slot < table.shape[1]):
                raise PlacementError(f"change names layer {change.layer}, slot {change.slot}: outside {table.shape}")
            table[change.layer, change.slot] = change.expert
        return Placement(table, self.ranks, self.experts)

    def moves(self, target: Placement) -> tuple[tuple[int, int, int], ...]:
        """`(layer, expert, rank)` that `target` has and this placement has not: bundles that must travel.

        The order of slots inside a rank is free, so a swap of two slots of one rank is no move.
        """
        result: list[tuple[int, int, int]] = []
        mine, theirs = self.by_rank(), target.by_rank()
        for layer, rank in zip(*np.nonzero((mine != theirs).any(axis=2)), strict=True):
            missing = set(theirs[layer, rank].tolist()) - set(mine[layer, rank].tolist()) - {EMPTY}
            result.extend((int(layer), int(expert), int(rank)) for expert in sorted(missing))
        return tuple(result)


@dataclass(frozen=True, slots=True)
class Change:
    """One entry of a table's delta: `slot` of `layer` is to hold `expert` (-1: nothing)."""

    layer: int
    slot: int
    expert: int


def linear(layers: int, experts: int, ranks: int, slots: int) -> Placement:
    """The usual start: experts in order over the ranks, then redundant copies spread round robin.

    Rank r first gets experts r*E/R .. (r+1)*E/R-1; each free slot then takes the next expert, in order, that the
    rank does not hold. Raises PlacementError if `ranks * slots < experts` or a rank would need more than E experts.
    """
    if ranks < 1 or slots < 1 or experts < 1 or layers < 1:
        raise PlacementError(
            f"layers, experts, ranks and slots must be at least 1, got {layers, experts, ranks, slots}"
        )
    if ranks * slots < experts:
        raise PlacementError(f"{experts} experts do not fit {ranks} ranks x {slots} slots = {ranks * slots}")
    row = np.full((ranks, slots), EMPTY, dtype=np.int32)
    bounds = [experts * r // ranks for r in range(ranks + 1)]
    for rank in range(ranks):
        own = range(bounds[rank], bounds[rank + 1])
        row[rank, : len(own)] = own
    following = 0
    for rank in range(ranks):
        for k in range(bounds[rank + 1] - bounds[rank], slots):
            held = set(row[rank].tolist())
            if len(held - {EMPTY}) == experts:
                break
            while following % experts in held:
                following += 1
            row[rank, k] = following % experts
            following += 1
    return Placement(np.tile(row.reshape(1, -1), (layers, 1)), ranks, experts)


def check_shares(placement: Placement, shares: FloatTable) -> FloatTable:
    """`shares [L, P]` as a fresh read-only float64 table. Raises PlacementError unless they fit `placement`:

    finite, not negative, 0 on empty slots, and summing to 1 over the replicas of every expert (within 1e-6).
    """
    table = np.array(shares, dtype=np.float64)
    if table.shape != placement.p2l.shape:
        raise PlacementError(f"shares have shape {table.shape}, the placement has {placement.p2l.shape}")
    held = placement.p2l >= 0
    if not np.isfinite(table).all() or (table < 0).any() or (table[~held] != 0).any():
        raise PlacementError("shares must be finite, not negative, and 0 on empty slots")
    sums = np.zeros((placement.layers, placement.experts))
    layer, slot = np.nonzero(held)
    np.add.at(sums, (layer, placement.p2l[layer, slot]), table[layer, slot])
    worst = np.abs(sums - 1).max()
    if worst > 1e-6:
        raise PlacementError(f"the shares of every expert must sum to 1; one is off by {worst:.3g}")
    table.setflags(write=False)
    return table


def _check(table: NDArray[np.integer[Any]], ranks: int, experts: int) -> None:
    if table.ndim != 2 or ranks < 1 or table.shape[0] < 1 or table.shape[1] < 1 or table.shape[1] % ranks:
        raise PlacementError(f"a placement needs shape [layers, ranks * slots], got {table.shape} for {ranks} ranks")
    if int(table.min()) < EMPTY or int(table.max()) >= experts:
        raise PlacementError(
            f"a slot names expert {int(table.max())} or {int(table.min())}; known are 0..{experts - 1}"
        )
    for layer in range(table.shape[0]):
        held = table[layer][table[layer] >= 0]
        missing = np.setdiff1d(np.arange(experts), held)
        if missing.size:
            raise PlacementError(f"layer {layer}: expert {int(missing[0])} has no replica")
    blocks = np.sort(table.reshape(table.shape[0], ranks, -1), axis=2)
    twice = (blocks[:, :, 1:] == blocks[:, :, :-1]) & (blocks[:, :, 1:] >= 0)
    if twice.any():
        layer, rank, at = (int(i[0]) for i in np.nonzero(twice))
        raise PlacementError(f"layer {layer}: rank {rank} holds expert {int(blocks[layer, rank, at])} twice")
