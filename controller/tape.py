"""A load trace, read forward: whatever can be cut into slices of entries, in memory or not."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_BLOCK = 64
"""Entries that are read at once of what is no array."""


class Trace(Protocol):
    """`[W, L, E]` tokens, read by slices of entries; an array, or what reads a file piece by piece, always forward."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, part: slice) -> NDArray[Any]: ...


class Tape:
    """A trace read forward. Of one that is no array only the newest `keep` entries are held."""

    def __init__(self, trace: Trace, keep: int) -> None:
        self._trace = trace
        self._keep = keep
        self._held: NDArray[Any] = np.zeros((0, *trace.shape[1:]))
        self._end = 0

    def read(self, first: int, end: int) -> NDArray[Any]:
        if isinstance(self._trace, np.ndarray):
            return self._trace[first:end]
        if end > self._end:
            upto = min(int(self._trace.shape[0]), max(end, self._end + _BLOCK))
            kept = self._held[max(0, len(self._held) - self._keep) :]
            fresh = self._trace[self._end : upto]
            self._held = np.concatenate([kept, fresh]) if len(kept) else fresh
            self._end = upto
        base = self._end - len(self._held)
        return self._held[first - base : end - base]
