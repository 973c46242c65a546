"""The expert matmuls of one rank: rows sorted by slot, one product per cell. Weights are never gathered."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from eplane.errors import CheckpointError
from runtime.cells import CellPool
from runtime.deterministic import TILE_ROWS

GATE_UP = "gate_up_proj"
DOWN = "down_proj"


def check_supported(module: Any, name: str) -> None:
    """Raises CheckpointError unless the experts are gated matrices in the library's usual layout."""
    odd = [word for word in ("has_bias", "is_transposed", "has_post_expert_norm") if getattr(module, word, False)]
    if odd or not module.has_gate:
        raise CheckpointError(f"{name}: experts with {', '.join(odd) or 'no gate'} are not supported")
    names = tuple(n for n, _ in module.named_parameters(recurse=False))
    if set(names) != {GATE_UP, DOWN}:
        raise CheckpointError(f"{name}: experts hold {', '.join(names)}; supported are {GATE_UP} and {DOWN}")


def run_experts(
    module: Any, pool: CellPool, cells: list[int], rows: torch.Tensor, sizes: list[int], *, fixed_tiles: bool
) -> torch.Tensor:
    """`rows [N, D]`, grouped: the first `sizes[0]` for the cell `cells[0]`, and so on. Returns `[N, D]`.

    `module` gives the activation; the weights are `pool.tensors[name][cell]`.
    """
    if rows.shape[0] == 0:
        return rows
    if not fixed_tiles:
        hidden = _products(pool.tensors[GATE_UP], cells, rows, sizes, max(sizes))
        return _products(pool.tensors[DOWN], cells, module._apply_gate(hidden), sizes, max(sizes))
    whole = [-(-size // TILE_ROWS) * TILE_ROWS for size in sizes]
    place = _places(sizes, whole, rows.device)
    spread = torch.zeros((sum(whole), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    spread[place] = rows
    hidden = _products(pool.tensors[GATE_UP], cells, spread, whole, TILE_ROWS)
    return _products(pool.tensors[DOWN], cells, module._apply_gate(hidden).contiguous(), whole, TILE_ROWS)[place]


def _products(weight: torch.Tensor, cells: list[int], rows: torch.Tensor, sizes: list[int], tile: int) -> torch.Tensor:
    """`rows @ weight[cell].T` for each group, at most `tile` rows a product."""
    result = torch.empty((rows.shape[0], weight.shape[1]), dtype=rows.dtype, device=rows.device)
    start = 0
    for cell, size in zip(cells, sizes, strict=True):
        matrix = weight[cell].t()
        for at in range(start, start + size, tile):
            part = slice(at, min(at + tile, start + size))
            torch.mm(rows[part], matrix, out=result[part])
        start += size
    return result


def _places(sizes: list[int], whole: list[int], device: torch.device) -> torch.Tensor:
    """Where each row goes when every group is widened from `sizes` to `whole` rows."""
    gap = torch.tensor([w - s for w, s in zip(whole, sizes, strict=True)])
    shift = functional.pad(torch.cumsum(gap, 0)[:-1], (1, 0))
    count = torch.tensor(sizes)
    return (torch.arange(int(count.sum())) + torch.repeat_interleave(shift, count)).to(device)
