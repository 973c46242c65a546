"""Fixed row tiles: what makes one token's result independent of its neighbours, bit for bit.

A matrix product gives other last bits for the same row when the number of rows changes, because the library picks
another kernel or another order of summing. With a fixed number of rows it does not, wherever in the tile the row
stands and whatever stands beside it. So every linear layer, router and head runs in tiles of TILE_ROWS rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import functional

TILE_ROWS = 16
"""Rows of a tile. Measured on CPU: small enough that a lone decode token wastes little, large enough that the number
of calls stays low in a full step. A multiple of 16 keeps elementwise kernels off their scalar tails as well."""


def padded(rows: int) -> int:
    """`rows` rounded up to whole tiles, at least one."""
    return max(1, -(-rows // TILE_ROWS)) * TILE_ROWS


def tiled_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`input [..., K] @ weight [N, K].T + bias [N]`, tile by tile of TILE_ROWS rows."""
    x = input  # The name is that of the function which this replaces.
    flat = x.reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    whole = padded(rows)
    if whole != rows:
        flat = functional.pad(flat, (0, 0, 0, whole - rows))
    flat = flat.contiguous()
    transposed = weight.t()
    result = torch.empty((whole, weight.shape[0]), dtype=x.dtype, device=x.device)
    for start in range(0, whole, TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        torch.mm(flat[tile], transposed, out=result[tile])
    if bias is not None:
        result += bias
    return result[:rows].reshape(*x.shape[:-1], weight.shape[0])


@contextmanager
def fixed_tiles() -> Iterator[None]:
    """While open, every `linear` of the process runs in fixed tiles, in whatever module of a model it stands.

    It replaces the function itself, because routers call it on a bare parameter: so no code per model. (A torch
    function mode would do the same, but it sees every attribute of every tensor: measured, it doubles a step's time.)
    Engine thread only.
    """
    usual = functional.linear
    functional.linear = tiled_linear
    try:
        yield
    finally:
        functional.linear = usual
