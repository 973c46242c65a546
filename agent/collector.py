"""Folds the counters of a node's ranks into sub-windows, in order, each once."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from eplane.errors import CounterError
from eplane.load import SubWindow
from runtime.link.counters import CounterReader

log = logging.getLogger("eplane.agent")


class Collector:
    """Reads what each rank cut since the last look, and keeps the last `keep` sub-windows of each for a new leader."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._world: str | None = None
        self._readers: dict[int, CounterReader] = {}
        self._seen: dict[int, int] = {}
        self._kept: dict[int, deque[SubWindow]] = {}

    def collect(self, world: str | None, files: Mapping[int, Path]) -> list[SubWindow]:
        """New sub-windows of the ranks in `files`. A file that is not there yet, or is torn, is read next time."""
        if world != self._world:
            self._forget()
            self._world = world
        if world is None:
            return []
        fresh: list[SubWindow] = []
        for rank, path in files.items():
            try:
                reader = self._readers.get(rank) or CounterReader(path)
                self._readers[rank] = reader
                windows = reader.read_since(self._seen.get(rank, -1))
            except (CounterError, OSError) as error:
                log.debug("counters of rank %d: %s", rank, error)
                self._drop(rank)
                continue
            for window in windows:
                self._seen[rank] = max(self._seen.get(rank, -1), window.seq)
                if window.world == world:
                    self._kept.setdefault(rank, deque(maxlen=self._keep)).append(window)
                    fresh.append(window)
        return fresh

    def replay(self) -> list[SubWindow]:
        """The last sub-windows of every rank, oldest first: what a new leader is told."""
        kept = [window for windows in self._kept.values() for window in windows]
        return sorted(kept, key=lambda w: (w.first_step, w.rank))

    def close(self) -> None:
        self._forget()

    def _drop(self, rank: int) -> None:
        reader = self._readers.pop(rank, None)
        if reader is not None:
            reader.close()

    def _forget(self) -> None:
        for rank in list(self._readers):
            self._drop(rank)
        self._seen.clear()
        self._kept.clear()
