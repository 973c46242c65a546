"""The key/value cache: pages of a fixed number of tokens, a stated capacity, no eviction.

A sequence gets all the pages it can ever need (prompt and `max_tokens`) when it is admitted, so a running request
never has to stop for want of memory; requests that do not fit wait.
"""

from __future__ import annotations

from collections import deque

import torch

from eplane.errors import BadInput

PAGE_TOKENS = 64
"""Tokens of a page; the fixed key tile of attention."""


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Which pages are free. Engine thread only."""

    def __init__(self, tokens: int) -> None:
        if tokens < PAGE_TOKENS:
            raise BadInput(f"a key/value cache needs at least {PAGE_TOKENS} tokens, got {tokens}")
        self.pages = tokens // PAGE_TOKENS
        self._free = deque(range(self.pages))

    @property
    def capacity_tokens(self) -> int:
        return self.pages * PAGE_TOKENS

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, pages: int) -> tuple[int, ...] | None:
        """`pages` free pages, or None when there are fewer."""
        if pages > len(self._free):
            return None
        return tuple(self._free.popleft() for _ in range(pages))

    def give_back(self, pages: tuple[int, ...]) -> None:
        self._free.extend(pages)


class KeyValueStore:
    """The memory of the pages: for each layer `keys [pages, Hkv, PAGE, d]` and `values [pages, Hkv, PAGE, dv]`.

    Made at a layer's first use, in the shapes that the model then shows (latent attention is kept expanded).
    """

    def __init__(self, pages: int, device: torch.device) -> None:
        self._pages = pages
        self._device = device
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[layer]

    def put(
        self, layer: int, pages: torch.Tensor, places: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Keep `key [Hkv, T, d]` and `value [Hkv, T, dv]` of T tokens at `pages [T]`, `places [T]`."""
        if layer not in self._layers:
            self._layers[layer] = (self._make(key), self._make(value))
        keys, values = self._layers[layer]
        keys[pages, :, places] = key.transpose(0, 1).float()
        values[pages, :, places] = value.transpose(0, 1).float()

    def _make(self, sample: torch.Tensor) -> torch.Tensor:
        heads, _, depth = sample.shape
        return torch.zeros((self._pages, heads, PAGE_TOKENS, depth), dtype=torch.float32, device=self._device)
