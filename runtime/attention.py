"""Attention over a paged key/value cache, for all sequences of a step at once, each row as if it were alone.

Registered with `transformers` under the name EPLANE, so any model that uses its attention interface runs on it.
Tokens of all sequences lie flattened in one row of the batch. Queries are cut into tiles of TILE_ROWS rows of one
sequence, keys into the cache's pages; a softmax is accumulated page by page in ascending order (the online softmax
of Milakov and Gimelshein 2018, tiled as in FlashAttention, Dao et al. 2022). Every product has one fixed shape, so a
row's bits depend on its own sequence alone: not on its neighbours, nor on how the prompt was chunked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eplane.errors import CheckpointError
from runtime.deterministic import TILE_ROWS
from runtime.kvcache import PAGE_TOKENS, KeyValueStore

EPLANE = "eplane"
_LOWEST = -1e30  # Finite, so that a page without a visible key leaves a row unchanged instead of making it NaN.


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive new tokens of one sequence: `count` from position `start`; `pages` hold it all, in order."""

    start: int
    count: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the tokens of a step go. B query tiles, those with most pages first; T flattened tokens.

    `rows [B, TILE]` token of each query row (row 0 as padding), `real [B, TILE]`, `positions [B, TILE]`,
    `pages [B, most]`, `active[p]` = tiles that need page p, `masked[p]` = page p is not wholly visible to them all;
    `token_page [T]`, `token_place [T]`: where each new token's key and value are kept.
    """

    rows: torch.Tensor
    real: torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    active: tuple[int, ...]
    masked: tuple[bool, ...]
    token_page: torch.Tensor
    token_place: torch.Tensor
    tokens: int


def plan_attention(spans: Sequence[Span], device: torch.device) -> AttentionPlan:
    """The plan of one step; spans in the order in which their tokens are flattened."""
    tiles: list[tuple[int, int, int, int, int]] = []  # (pages needed, span, first token, first position, rows)
    token_page: list[int] = []
    token_place: list[int] = []
    offset = 0
    for number, span in enumerate(spans):
        for first in range(0, span.count, TILE_ROWS):
            rows = min(TILE_ROWS, span.count - first)
            last = span.start + first + rows - 1
            tiles.append((last // PAGE_TOKENS + 1, number, offset + first, span.start + first, rows))
        for position in range(span.start, span.start + span.count):
            token_page.append(span.pages[position // PAGE_TOKENS])
            token_place.append(position % PAGE_TOKENS)
        offset += span.count
    tiles.sort(key=lambda tile: -tile[0])
    most = tiles[0][0] if tiles else 0
    row = np.zeros((len(tiles), TILE_ROWS), dtype=np.int64)
    position_of = np.zeros_like(row)
    real = np.zeros((len(tiles), TILE_ROWS), dtype=bool)
    pages = np.zeros((len(tiles), max(most, 1)), dtype=np.int64)
    for at, (needed, number, token, position, rows) in enumerate(tiles):
        row[at, :rows] = np.arange(token, token + rows)
        position_of[at, :rows] = np.arange(position, position + rows)
        real[at, :rows] = True
        pages[at, :needed] = spans[number].pages[:needed]
    active = tuple(sum(1 for tile in tiles if tile[0] > page) for page in range(most))
    lowest = np.where(real, position_of, np.iinfo(np.int64).max).min(axis=1) if tiles else np.zeros(0)
    masked = tuple(bool((lowest[: active[p]] < (p + 1) * PAGE_TOKENS - 1).any()) for p in range(most))
    rows_on, real_on, positions_on, pages_on = (torch.from_numpy(a).to(device) for a in (row, real, position_of, pages))
    page_on, place_on = (torch.tensor(a, dtype=torch.int64, device=device) for a in (token_page, token_place))
    return AttentionPlan(rows_on, real_on, positions_on, pages_on, active, masked, page_on, place_on, offset)


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    plan: AttentionPlan,
    scaling: float,
    window: int | None,
) -> torch.Tensor:
    """`query [T, H, d]`, `keys [pages, Hkv, PAGE, d]`, `values [pages, Hkv, PAGE, dv]` -> `[T, H, dv]`, float32."""
    heads, depth = query.shape[1], query.shape[2]
    kv_heads, value_depth = keys.shape[1], values.shape[3]
    group = heads // kv_heads
    tiles = plan.rows.shape[0]
    rows = group * TILE_ROWS
    q = query[plan.rows].float() * scaling  # [B, TILE, H, d]
    q = q.view(tiles, TILE_ROWS, kv_heads, group, depth).permute(0, 2, 3, 1, 4).reshape(tiles * kv_heads, rows, depth)
    best = torch.full((tiles * kv_heads, rows, 1), _LOWEST, device=q.device)
    total = torch.zeros_like(best)
    mixed = torch.zeros((tiles * kv_heads, rows, value_depth), device=q.device)
    for page, live in enumerate(plan.active):
        some = slice(0, live * kv_heads)
        key = keys[plan.pages[:live, page]].view(-1, PAGE_TOKENS, depth)
        score = torch.bmm(q[some], key.transpose(1, 2))
        if plan.masked[page] or window is not None:
            hidden = _hidden(plan.positions[:live], page, window)
            score.view(live, kv_heads, group, TILE_ROWS, PAGE_TOKENS).masked_fill_(hidden, float("-inf"))
        new_best = torch.maximum(best[some], score.amax(-1, keepdim=True))
        weight = torch.exp(score - new_best)
        decay = torch.exp(best[some] - new_best)
        value = values[plan.pages[:live, page]].view(-1, PAGE_TOKENS, value_depth)
        total[some] = total[some] * decay + weight.sum(-1, keepdim=True)
        mixed[some] = mixed[some] * decay + torch.bmm(weight, value)
        best[some] = new_best
    out = (mixed / total).view(tiles, kv_heads, group, TILE_ROWS, value_depth).permute(0, 3, 1, 2, 4)
    result = torch.zeros((query.shape[0], heads, value_depth), device=q.device)
    result[plan.rows[plan.real]] = out.reshape(tiles, TILE_ROWS, heads, value_depth)[plan.real]
    return result


def _hidden(positions: torch.Tensor, page: int, window: int | None) -> torch.Tensor:
    """`[B, 1, 1, TILE, PAGE]`: keys that a query row must not see."""
    key = torch.arange(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS, device=positions.device)
    distance = positions[:, None, None, :, None] - key
    hidden = distance < 0
    return hidden if window is None else hidden | (distance >= window)


@dataclass(slots=True)
class AttentionContext:
    """What the attention of every layer needs in a step; one object hangs on all attention modules of a model."""

    store: KeyValueStore
    plan: AttentionPlan | None = None


def eplane_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function that `transformers` calls: `query [1, H, T', d]`, `key`, `value [1, Hkv, T', d]` -> `[1, T', H, dv]`.

    T' may be more than the plan's tokens (padding to whole tiles); the rest of the result is zero.
    """
    for name in ("s_aux", "softcap"):
        if kwargs.get(name) is not None:
            raise CheckpointError(f"attention with {name} is not supported")
    context: AttentionContext = module.eplane_attention_context
    plan = context.plan
    if plan is None:
        raise CheckpointError("attention was called outside a step")
    layer = int(module.layer_idx)
    context.store.put(layer, plan.token_page, plan.token_place, key[0, :, : plan.tokens], value[0, :, : plan.tokens])
    keys, values = context.store.layer(layer)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    result = attend(query[0].transpose(0, 1), keys, values, plan, scale, sliding_window)
    return result.to(query.dtype).unsqueeze(0), None
