"""Dispatch and combine: tokens travel to the ranks that hold their experts, and their results travel back.

In the first MoE layer of a step every rank sends every other, first its header (live placement, armed wave, number of
its tokens, step) and how many rows and tokens for each slot will follow; then the rows; then results go back. What
the headers say is checked before a row is looked at. If no rank has a token, the step ends there: a tick.

From the second layer on all ranks know how many tokens each has, hence the most rows that it can send to one peer.
While that is little (FUSED_BYTES), counts and rows travel in one message of that size: in small steps the time of an
exchange is its latency, so two exchanges a layer instead of three. Big steps send exact counts first.

A token goes to a rank once, with the slots that it wants there. Results come back one for each (token, expert) and
are summed at the source in the order of the token's top-k, in float32: a sum that no placement can change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from eplane.errors import WorldEnded
from runtime.cells import CellPool
from runtime.collective import Exchange
from runtime.experts import run_experts
from runtime.tables import HEADER, HEADER_ARMED, HEADER_DIGEST, HEADER_STEP, HEADER_TOKENS, LiveTable

FUSED_BYTES = 128 * 1024
"""Most bytes to a peer in a message of counts and rows together."""

PREFILL, DECODE = 0, 1
"""Phases of a token, and rows of the counters."""


@dataclass(slots=True)
class StepState:
    """One step of this rank: its table and tokens, and what the first exchange told of the others."""

    table: LiveTable
    step: int
    armed: int
    phases: torch.Tensor  # [T] PREFILL or DECODE of each own token
    sampled: torch.Tensor | None = None  # [n] own tokens whose routing is wanted
    routed: list[torch.Tensor] = field(default_factory=list)  # [T', k] experts as each layer got them, if any is wanted
    tokens_of: list[int] | None = None  # of each rank, from the headers
    arrived: torch.Tensor | None = None  # [2, L, K] tokens that came to each own slot


class Dispatcher:
    """One rank's side of the exchanges. Engine thread only.

    `check(headers [R, HEADER])` is called for every exchange before its rows are looked at and raises WorldEnded;
    `agree(armed of all ranks)` once a step, after the first exchange.
    """

    def __init__(
        self,
        exchange: Exchange,
        pool: CellPool,
        modules: Sequence[Any],
        width: int,
        dtype: torch.dtype,
        top_k: int,
        check: Callable[[torch.Tensor], object],
        agree: Callable[[Sequence[int]], object],
        *,
        fixed_tiles: bool,
    ) -> None:
        self._exchange = exchange
        self._pool = pool
        self._modules = tuple(modules)
        self._width, self._dtype, self._top_k = width, dtype, top_k
        self._check, self._agree = check, agree
        self._fixed_tiles = fixed_tiles
        self._wide = width * torch.empty((), dtype=dtype).element_size()
        self._row_bytes = -(-(self._wide + 2 * top_k) // 8) * 8
        self._state: StepState | None = None

    def begin(self, table: LiveTable, step: int, armed: int, phases: torch.Tensor, sampled: Sequence[int] = ()) -> None:
        """Start a step with own tokens of `phases [T]`; keep the experts of the tokens `sampled`, rows in 0..T-1."""
        arrived = torch.zeros((2, len(self._modules), table.placement.slots), dtype=torch.int64)
        rows = torch.tensor(sampled, device=self._pool.device) if sampled else None
        self._state = StepState(table, step, armed, phases, rows, arrived=arrived)

    def join(self) -> int:
        """The step of a rank without tokens: it computes for the others. Returns the tokens of all ranks (0: a tick)."""
        device = self._pool.device
        empty = torch.zeros((0, self._width), dtype=self._dtype, device=device)
        index = torch.zeros((0, self._top_k), dtype=torch.int64, device=device)
        for layer in range(len(self._modules)):
            self.layer(layer, empty, index, torch.zeros((0, self._top_k), device=device))
            if layer == 0 and self.tokens == 0:
                break
        return self.tokens

    @property
    def tokens(self) -> int:
        """Tokens of all ranks in this step, once the first exchange is done."""
        return sum(self._running().tokens_of or ())

    @property
    def arrived(self) -> torch.Tensor:
        """`[2, L, K]` tokens that came to each own slot in this step, by phase; on CPU."""
        arrived = self._running().arrived
        return torch.zeros(0) if arrived is None else arrived

    @property
    def routed(self) -> torch.Tensor:
        """`[n, L, k]` experts of the sampled tokens of this step, on CPU: two operations and a copy for all layers."""
        state = self._running()
        return torch.stack(state.routed)[:, state.sampled].transpose(0, 1).cpu()

    def layer(
        self, layer: int, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The experts of one MoE layer: `hidden [T', D]`, `top_k_index`, `top_k_weights [T', k]` -> `[T', D]`.

        T' may exceed the step's T tokens (padding to whole tiles): the rest is no load, and comes back as zeros.
        """
        state = self._running()
        tokens = state.phases.shape[0]
        if state.sampled is not None:
            state.routed.append(top_k_index)
        own = hidden[:tokens]
        slots = state.table.choose(layer, top_k_index[:tokens].reshape(-1)).view(tokens, self._top_k)
        sent = self._pack(state, own, slots)
        received, sizes = self._send_rows(state, layer, sent)
        if received is None:
            return torch.zeros_like(hidden)
        results, pairs_from = self._compute(state, layer, received, sizes)
        back = self._exchange.all_to_all(results, pairs_from, sent.pairs)
        return self._combine(hidden, top_k_weights, sent.where, back, tokens)

    # Sending

    def _pack(self, state: StepState, hidden: torch.Tensor, slots: torch.Tensor) -> _Sent:
        """Rows for each rank in turn: the token's hidden state and, for each of its top-k, the slot there or -1."""
        ranks, per_rank = self._exchange.ranks, state.table.placement.slots
        top_k = slots.shape[1]
        target = slots // per_rank
        here = target[None] == torch.arange(ranks, device=slots.device)[:, None, None]  # [R, T, k]
        rank, token = here.any(2).nonzero(as_tuple=True)
        local = torch.where(here[rank, token], slots[token] % per_rank, -1).to(torch.int16)
        raw = torch.zeros((rank.shape[0], self._row_bytes), dtype=torch.uint8, device=hidden.device)
        raw[:, : self._wide] = hidden[token].contiguous().view(torch.uint8).view(-1, self._wide)
        raw[:, self._wide : self._wide + 2 * top_k] = local.view(torch.uint8).view(-1, 2 * top_k)
        phase = state.phases.to(slots.device)[:, None] * (ranks * per_rank)
        counts = torch.bincount((slots + phase).reshape(-1), minlength=2 * ranks * per_rank)
        by_rank = counts.view(2, ranks, per_rank).transpose(0, 1).reshape(ranks, 2 * per_rank)
        _, where_token, where_k = here.nonzero(as_tuple=True)
        rows = torch.bincount(rank, minlength=ranks).tolist()
        pairs = here.sum((1, 2)).tolist()
        return _Sent(raw, rows, by_rank, where_token * top_k + where_k, pairs)

    def _send_rows(self, state: StepState, layer: int, sent: _Sent) -> tuple[torch.Tensor | None, list[int]]:
        """The rows that came `[N, row_bytes]` and how many from each rank; None when no rank has a token."""
        if state.tokens_of is not None:
            longest = [self._longest(state, t) for t in state.tokens_of]
            if max(longest) <= FUSED_BYTES:
                return self._fused(state, layer, sent, longest)
        words = self._words(state, sent)
        ones = [1] * self._exchange.ranks
        heads = self._exchange.all_to_all(words, ones, ones)
        sizes = self._read(state, layer, heads)
        if sum(state.tokens_of or ()) == 0:
            return None, sizes
        return self._exchange.all_to_all(sent.raw, sent.rows, sizes), sizes

    def _fused(self, state: StepState, layer: int, sent: _Sent, longest: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Counts and rows in one message; `longest[r]` is its size in bytes when it comes from rank r."""
        ranks, mine = self._exchange.ranks, longest[self._exchange.rank]
        words = self._words(state, sent)
        head = words.shape[1] * 8
        message = torch.zeros((ranks, mine), dtype=torch.uint8, device=words.device)
        message[:, :head] = words.view(torch.uint8)
        start = 0
        for rank, rows in enumerate(sent.rows):
            body = sent.raw[start : start + rows].view(-1)
            message[rank, head : head + body.shape[0]] = body
            start += rows
        came = self._exchange.all_to_all(message.view(-1), [mine] * ranks, longest)
        blocks = torch.split(came, longest)
        heads = torch.stack([b[:head] for b in blocks]).view(torch.int64)
        sizes = self._read(state, layer, heads)
        bodies = [b[head : head + n * self._row_bytes] for b, n in zip(blocks, sizes, strict=True)]
        return torch.cat(bodies).view(-1, self._row_bytes), sizes

    def _longest(self, state: StepState, tokens: int) -> int:
        return 8 * (HEADER + 1 + 2 * state.table.placement.slots) + tokens * self._row_bytes

    def _words(self, state: StepState, sent: _Sent) -> torch.Tensor:
        """`[R, HEADER + 1 + 2K]` int64: header, rows to that rank, tokens for each of its slots by phase."""
        head = torch.zeros(HEADER, dtype=torch.int64)
        head[HEADER_DIGEST] = state.table.digest64
        head[HEADER_ARMED] = state.armed
        head[HEADER_TOKENS] = state.phases.shape[0]
        head[HEADER_STEP] = state.step
        ranks, device = self._exchange.ranks, sent.by_rank.device
        rows = torch.tensor(sent.rows, device=device)[:, None]
        return torch.cat([head.to(device).expand(ranks, -1), rows, sent.by_rank], 1)

    # Receiving

    def _read(self, state: StepState, layer: int, heads: torch.Tensor) -> list[int]:
        """Check the headers, note what they say, return the rows that come from each rank."""
        table = heads.cpu()
        self._check(table[:, :HEADER])
        if state.tokens_of is None:
            state.tokens_of = [int(t) for t in table[:, HEADER_TOKENS].tolist()]
            self._agree([int(a) for a in table[:, HEADER_ARMED].tolist()])
        if state.arrived is not None:
            state.arrived[:, layer] = table[:, HEADER + 1 :].sum(0).view(2, -1)
        return [int(n) for n in table[:, HEADER].tolist()]

    def _compute(
        self, state: StepState, layer: int, received: torch.Tensor, sizes: list[int]
    ) -> tuple[torch.Tensor, list[int]]:
        """Results `[pairs, D]` in the order (row, k), and how many of them go back to each rank."""
        rows = received[:, : self._wide].contiguous().view(self._dtype).view(-1, self._width)
        packed = received[:, self._wide : self._wide + 2 * self._top_k].contiguous()
        slots = packed.view(torch.int16).view(-1, self._top_k)
        row, place = (slots >= 0).nonzero(as_tuple=True)
        slot = slots[row, place].long()
        order = torch.argsort(slot, stable=True)
        counts = torch.bincount(slot, minlength=state.table.placement.slots).tolist()
        cells, groups = [], []
        for k, count in enumerate(counts):
            if count:
                cells.append(int(state.table.cell_of[layer, k]))
                groups.append(int(count))
        made = run_experts(
            self._modules[layer], self._pool, cells, rows[row[order]], groups, fixed_tiles=self._fixed_tiles
        )
        results = torch.empty_like(made)
        results[order] = made
        per_row = (slots >= 0).sum(1)
        return results, [int(block.sum()) for block in torch.split(per_row, sizes)]

    def _combine(
        self, hidden: torch.Tensor, weights: torch.Tensor, where: torch.Tensor, back: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        single = torch.empty((tokens * self._top_k, self._width), dtype=torch.float32, device=hidden.device)
        single[where] = back.float()
        each = single.view(tokens, self._top_k, self._width)
        scale = weights[:tokens].float()
        total = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        for k in range(self._top_k):
            total[:tokens] += each[:, k] * scale[:, k, None]
        return total.to(hidden.dtype)

    def _running(self) -> StepState:
        if self._state is None:
            raise WorldEnded("experts were called outside a step")
        return self._state


@dataclass(frozen=True, slots=True)
class _Sent:
    """What a layer sends: `raw [N, row_bytes]`, `rows` to each rank, counts `by_rank [R, 2K]`,

    `where`: the flat (token, k) of each result in the order in which they come back, `pairs` from each rank.
    """

    raw: torch.Tensor
    rows: list[int]
    by_rank: torch.Tensor
    where: torch.Tensor
    pairs: list[int]
