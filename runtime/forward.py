"""One forward pass of the dense model over the tokens of a step, flattened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from runtime.attention import AttentionContext, Span, plan_attention
from runtime.deterministic import fixed_tiles, padded
from runtime.kvcache import KeyValueStore
from runtime.model import ServedModel


class Forward:
    """Runs `model` on one rank. In deterministic mode the tokens are padded to whole tiles."""

    def __init__(self, model: ServedModel, pages: int, device: torch.device, *, deterministic: bool) -> None:
        self.model = model
        self.device = device
        self.context = AttentionContext(KeyValueStore(pages, device))
        self._deterministic = deterministic

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], spans: Sequence[Span], rows: Sequence[int]) -> torch.Tensor:
        """Float32 logits `[len(rows), V]`, on CPU, of the tokens at `rows` among the flattened `tokens` of `spans`."""
        count = len(tokens)
        whole = padded(count) if self._deterministic else count
        positions = [p for span in spans for p in range(span.start, span.start + span.count)]
        ids = torch.zeros((1, whole), dtype=torch.int64)
        ids[0, :count] = torch.tensor(tokens)
        places = torch.zeros((1, whole), dtype=torch.int64)
        places[0, :count] = torch.tensor(positions)
        self.context.plan = plan_attention(spans, self.device)
        try:
            with fixed_tiles() if self._deterministic else nullcontext():
                out = self.model.network(
                    input_ids=ids.to(self.device),
                    position_ids=places.to(self.device),
                    use_cache=False,
                    logits_to_keep=torch.tensor(list(rows), dtype=torch.int64, device=self.device),
                )
        finally:
            self.context.plan = None
        result: torch.Tensor = out.logits[0].float().cpu()
        return result
