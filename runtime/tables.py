"""The live table: what a step needs to know of placement, shares and cells, immutable, swapped as one pointer.

Also the header that each rank sends with every counts exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eplane.errors import TableError
from eplane.placement import FloatTable, IntTable, Placement, check_shares
from runtime.cells import CellPool, CellState

HEADER = 4
"""int64 words that open each rank's counts exchange:"""
HEADER_DIGEST, HEADER_ARMED, HEADER_TOKENS, HEADER_STEP = range(HEADER)
"""digest64 of the live table; hash of the armed identity (0: none); tokens of this rank in this step; step."""

_ONE = 1 << 32
_GOLDEN = 2654435769  # 2**32 / golden ratio: the step whose multiples fill a circle most evenly.


@dataclass(frozen=True, slots=True, eq=False)
class LiveTable:
    """Placement, shares and own cells of one rank for the length of a step. Built by `build`, never changed.

    `cell_of [L, K]`: own cell of each own slot, -1 = empty. `shares [L, P]`, float64.
    `_cursor [L, E]` counts the tokens split so far. It is the one thing that moves, only the engine thread moves it,
    and no answer depends on it: every replica of an expert gives the same result.
    """

    placement: Placement
    shares: FloatTable
    epoch: int | None
    rank: int
    cell_of: IntTable
    local_first: bool
    _slots: torch.Tensor
    _bounds: torch.Tensor
    _offset: torch.Tensor
    _cursor: torch.Tensor

    @property
    def digest64(self) -> int:
        return self.placement.digest64

    @property
    def digest(self) -> str:
        return self.placement.digest

    @property
    def device(self) -> torch.device:
        return self._slots.device

    @property
    def max_replicas(self) -> int:
        return int(self._slots.shape[2])

    def slots_of(self, layer: int) -> torch.Tensor:
        """`[E, max_replicas]` int64: the slots of each expert, ascending; the last one is repeated as padding."""
        return self._slots[layer]

    def choose(self, layer: int, expert_ids: torch.Tensor) -> torch.Tensor:
        """Slot ids `[n]` int64 for the logical experts `expert_ids [n]` of this step's real tokens, in order.

        The t-th token that this rank sends to an expert goes to the replica in whose stretch of [0, 1) the fraction
        of `offset + t / golden ratio` lies (an additive recurrence, Weyl 1916): over any run of tokens each replica
        gets its share to within a few tokens, at one token a step as well as at thousands, and ranks start spread.
        """
        slots = self._slots[layer]
        if self.max_replicas == 1:
            return slots[:, 0][expert_ids]
        experts = slots.shape[0]
        order = torch.argsort(expert_ids, stable=True)
        counts = torch.bincount(expert_ids, minlength=experts)
        first = torch.cumsum(counts, 0) - counts
        place = torch.empty_like(order)
        grouped = expert_ids[order]
        place[order] = torch.arange(order.numel(), device=order.device) - first[grouped]
        turn = place + self._cursor[layer][expert_ids]
        point = (turn * _GOLDEN + self._offset[layer][expert_ids]) & (_ONE - 1)
        replica = (point[:, None] >= self._bounds[layer][expert_ids]).sum(1)
        self._cursor[layer] += counts
        return slots[expert_ids, replica]

    def with_shares(self, shares: FloatTable) -> LiveTable:
        """The same table with other shares; the running remainders go on. Raises PlacementError."""
        return build_table(
            self.placement,
            self.rank,
            self.cell_of,
            shares,
            self.epoch,
            self.device,
            local_first=self.local_first,
            cursor=self._cursor,
        )

    def with_epoch(self, epoch: int) -> LiveTable:
        """The same table under another epoch number."""
        return LiveTable(
            self.placement, self.shares, epoch, self.rank, self.cell_of, self.local_first,
            self._slots, self._bounds, self._offset, self._cursor,
        )  # fmt: skip


def build_table(
    placement: Placement,
    rank: int,
    cell_of: IntTable,
    shares: FloatTable | None = None,
    epoch: int | None = None,
    device: torch.device | str = "cpu",
    *,
    local_first: bool = False,
    cursor: torch.Tensor | None = None,
) -> LiveTable:
    """The live table of `rank`. `shares` default to even ones.

    With `local_first`, a rank prefers its own replica as far as the shares allow if all ranks send alike (see
    `source_shares`); without, each rank splits by the shares themselves, so they hold whatever the ranks send.
    """
    split = check_shares(placement, placement.even_shares() if shares is None else shares)
    cells = np.array(cell_of, dtype=np.int32)
    if cells.shape != (placement.layers, placement.slots):
        raise TableError(f"cells have shape {cells.shape}, the placement {(placement.layers, placement.slots)}")
    if ((cells >= 0) != (placement.by_rank()[:, rank] >= 0)).any():
        raise TableError(f"rank {rank}: the cells do not match the slots that hold an expert")
    cells.setflags(write=False)
    slots, bounds = _replica_tables(placement, source_shares(placement, split, rank) if local_first else split)
    shape = (placement.layers, placement.experts)
    return LiveTable(
        placement, split, epoch, rank, cells, local_first,
        torch.from_numpy(slots).to(device), torch.from_numpy(bounds).to(device),
        torch.from_numpy(_offsets(shape, rank)).to(device),
        torch.zeros(shape, dtype=torch.int64, device=device) if cursor is None else cursor,
    )  # fmt: skip


def check_cells(table: LiveTable, pool: CellPool) -> None:
    """Raises TableError unless each cell that `table` names is VERIFIED or LIVE for the expert of its slot."""
    own = table.placement.by_rank()[:, table.rank]
    for layer, k in zip(*np.nonzero(own >= 0), strict=True):
        cell = int(table.cell_of[layer, k])
        wanted = (int(layer), int(own[layer, k]))
        if not 0 <= cell < pool.cells:
            raise TableError(f"layer {layer}, slot {k}: there is no cell {cell}")
        state, owner = pool.state(cell), pool.owner(cell)
        if state not in (CellState.VERIFIED, CellState.LIVE) or owner != wanted:
            raise TableError(f"layer {layer}, slot {k} needs expert {wanted[1]}; cell {cell} is {state} for {owner}")


def source_shares(placement: Placement, shares: FloatTable, rank: int) -> FloatTable:
    """`[L, P]`: how `rank` splits its own tokens so that, if all R ranks send alike, every replica gets its share.

    A replica takes `share * R` ranks' worth of tokens, its own rank's first; what ranks have left over is spread
    over what replicas have left.
    """
    ranks = placement.ranks
    held = placement.p2l >= 0
    local = np.minimum(1.0, shares * ranks)
    rest = shares * ranks - local
    expert = np.where(held, placement.p2l, 0)
    rest_sum = np.zeros((placement.layers, placement.experts))
    layer, slot = np.nonzero(held)
    np.add.at(rest_sum, (layer, placement.p2l[layer, slot]), rest[layer, slot])
    mine = np.zeros_like(shares)
    own = slice(rank * placement.slots, (rank + 1) * placement.slots)
    mine[:, own] = local[:, own] * held[:, own]
    taken = np.zeros_like(rest_sum)
    layer, slot = np.nonzero(mine)
    np.add.at(taken, (layer, placement.p2l[layer, slot]), mine[layer, slot])
    left = np.take_along_axis(1.0 - taken, expert, axis=1)
    pool = np.take_along_axis(rest_sum, expert, axis=1)
    spread = np.divide(left * rest, pool, out=np.zeros_like(rest), where=pool > 0)
    result: FloatTable = np.where(held, mine + spread, 0.0)
    return result


def _replica_tables(placement: Placement, shares: FloatTable) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Slots `[L, E, M]` and, in units of 2**-32, the upper bounds `[L, E, M-1]` of all replicas but the last."""
    layer, slot = np.nonzero(placement.p2l >= 0)
    expert = placement.p2l[layer, slot]
    order = np.lexsort((slot, expert, layer))
    layer, slot, expert = layer[order], slot[order], expert[order]
    group = layer * placement.experts + expert
    place = np.arange(group.size) - np.searchsorted(group, group, side="left")
    most = int(place.max()) + 1
    slots = np.full((placement.layers, placement.experts, most), -1, dtype=np.int64)
    weight = np.zeros((placement.layers, placement.experts, most))
    slots[layer, expert, place] = slot
    weight[layer, expert, place] = shares[layer, slot]
    slots = np.maximum.accumulate(slots, axis=2)  # Ascending, so this repeats the last slot as padding.
    bounds = np.rint(np.cumsum(weight, axis=2) * _ONE).astype(np.int64)
    # From the last replica with a share on, rounding must leave no gap that a replica without one would fill.
    from_here = np.logical_or.accumulate(weight[:, :, ::-1] > 0, axis=2)[:, :, ::-1]
    bounds[:, :, -1] = _ONE
    bounds[:, :, :-1][~from_here[:, :, 1:]] = _ONE
    return slots, np.ascontiguousarray(bounds[:, :, : most - 1])


def _offsets(shape: tuple[int, int], rank: int) -> NDArray[np.int64]:
    """`[L, E]`: where a rank's walk round the circle starts.

    Ranks are spread by bit reversal (van der Corput), so that ranks that send one token each split it by the shares;
    each (layer, expert) turns all ranks by the same angle, so that first tokens do not all meet first replicas.
    """
    start = int(f"{rank & (_ONE - 1):032b}"[::-1], 2)
    cell = np.arange(shape[0] * shape[1], dtype=np.int64).reshape(shape)
    result: NDArray[np.int64] = (start + cell * 0x61C88647) & (_ONE - 1)
    return result
