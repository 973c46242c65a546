"""The routing samples of a node's ranks, kept beside the load windows they belong to, and told with them."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from eplane.errors import LoadReportError
from eplane.load import SubWindow
from eplane.routing import RankSample, fitted
from eplane.topology import ModelShape
from runtime.link.messages import Describe
from runtime.link.samples import SamplesReply

log = logging.getLogger("eplane.agent")


class Samples:
    """Keeps the last `keep` samples of each rank. What is wrong is dropped and counted, and costs no load window."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._world: str | None = None
        self._kept: dict[int, OrderedDict[tuple[int, int, int], RankSample]] = {}
        self.refused = 0

    def wanted(self, fresh: Sequence[SubWindow]) -> dict[int, int]:
        """For each rank with fresh windows, the step after which the windows of the samples to ask for end."""
        wanted: dict[int, int] = {}
        for window in fresh:
            wanted[window.rank] = min(window.first_step, wanted.get(window.rank, window.first_step))
        return wanted

    def take(self, world: str | None, replies: Mapping[int, tuple[Describe, SamplesReply]]) -> None:
        """What ranks answered. A new world begins with nothing."""
        if world != self._world:
            self._kept.clear()
            self._world = world
        for rank, (said, reply) in replies.items():
            self._refuse(rank, *reply.refused)
            if reply.world == world:
                for one in reply.samples:
                    self._keep_one(rank, said, one)

    def of(self, windows: Sequence[SubWindow]) -> tuple[RankSample, ...]:
        """The samples of these windows, newest last, cut to what a report may hold."""
        kept = {key: one for of_rank in self._kept.values() for key, one in of_rank.items()}
        keys = [(w.rank, w.first_step, w.last_step) for w in windows if w.world == self._world]
        found = [kept[key] for key in keys if key in kept]
        return fitted(sorted(found, key=lambda one: (one.last_step, one.rank)))

    def _keep_one(self, rank: int, said: Describe, one: RankSample) -> None:
        try:
            one.check(ModelShape(said.model, said.layers, said.experts, said.top_k, said.bundle_bytes))
            if one.rank != rank:
                raise LoadReportError("rank", f"is {one.rank}")
        except LoadReportError as error:
            self._refuse(rank, str(error))
            return
        kept = self._kept.setdefault(rank, OrderedDict())
        kept[one.key] = one
        while len(kept) > self._keep:
            kept.popitem(last=False)

    def _refuse(self, rank: int, *sentences: str) -> None:
        self.refused += len(sentences)
        for sentence in sentences[:3]:
            log.debug("a routing sample of rank %d is dropped: %s", rank, sentence)
