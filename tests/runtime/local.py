"""A rank in the test's own process, and placements to put it through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from eplane.placement import Placement
from runtime.attention import Span
from runtime.cells import CellPool
from runtime.collective import Alone, Exchange
from runtime.dispatch import DECODE, PREFILL, Dispatcher
from runtime.forward import Forward
from runtime.model import ServedModel, attach, load_model
from runtime.rank import fill_cells
from runtime.switch import check_headers
from runtime.tables import LiveTable, build_table

CPU = torch.device("cpu")
PAGES = 48


def random_placement(seed: int, layers: int, experts: int, ranks: int, slots: int) -> Placement:
    """Every expert somewhere, the rest of the slots random copies, in random order; some slots stay empty."""
    rng = np.random.default_rng(seed)
    table = np.full((layers, ranks, slots), -1, dtype=np.int32)
    for layer in range(layers):
        free = [(r, k) for r in range(ranks) for k in range(slots)]
        rng.shuffle(free)
        for at, expert in zip(free, rng.permutation(experts), strict=False):
            table[layer, *at] = expert
        for r, k in free[experts:]:
            others = np.setdiff1d(np.arange(experts), table[layer, r])
            if others.size and rng.random() < 0.9:
                table[layer, r, k] = rng.choice(others)
    return Placement(table.reshape(layers, -1), ranks, experts)


@dataclass(frozen=True, slots=True)
class LocalRank:
    """One rank's model, tables and dispatcher, without engine or scheduler."""

    model: ServedModel
    pool: CellPool
    table: LiveTable
    dispatcher: Dispatcher
    forward: Forward

    def logits(self, step: int, parts: Sequence[tuple[list[int], Span]], *, decode: bool = False) -> torch.Tensor:
        """All rows of logits of one step over these (tokens, span) parts."""
        tokens = [t for part, _ in parts for t in part]
        phases = torch.full((len(tokens),), DECODE if decode else PREFILL, dtype=torch.int64)
        self.dispatcher.begin(self.table, step, 0, phases)
        return self.forward.logits(tokens, [span for _, span in parts], list(range(len(tokens))))


def local_rank(
    folder: Path,
    placement_seed: int | None = 0,
    *,
    slots: int | None = None,
    exchange: Exchange | None = None,
    deterministic: bool = True,
    model: ServedModel | None = None,
) -> LocalRank:
    """A rank of the world that `exchange` stands for (alone by default) under a random placement."""
    served = model or load_model(folder, "test", torch.float32, CPU)
    peers = exchange or Alone()
    shape = served.shape
    count = slots or -(-shape.experts // peers.ranks) + 1
    placement = random_placement(placement_seed or 0, shape.layers, shape.experts, peers.ranks, count)
    pool = CellPool(served.manifest, shape.layers * count)
    cell_of, _ = fill_cells(pool, served, placement, peers.rank)
    table = build_table(placement, peers.rank, cell_of)
    steps: dict[str, int] = {"step": -1}

    def check(headers: torch.Tensor) -> None:
        steps["step"] = max(steps["step"], int(headers[0, -1]))
        check_headers(table, headers, steps["step"])

    dispatcher = Dispatcher(
        peers, pool, served.experts, int(served.network.config.hidden_size), torch.float32, shape.top_k,
        check, lambda vector: None, fixed_tiles=deterministic,
    )  # fmt: skip
    forward = Forward(served, PAGES, CPU, deterministic=deterministic)
    attach(served, dispatcher.layer, forward.context)
    return LocalRank(served, pool, table, dispatcher, forward)
