"""EnginePort: what an engine does when an agent calls. One implementation a kind of engine; all pass one suite."""

from __future__ import annotations

from typing import Protocol

from eplane.placement import FloatTable
from eplane.plan import Identity, LeaderEpoch
from runtime.link.messages import Describe, ManifestReply, PlacementReply, RankStatus, StageCommand
from runtime.link.samples import SamplesReply


class EnginePort(Protocol):
    """Called by the link server's thread, one call at a time. Each may raise LinkRefused, and must return soon:

    staging goes on in the background, and `status` tells how far it is.
    """

    def hello(self, leader_epoch: LeaderEpoch | None) -> None:
        """An agent has opened a session; `leader_epoch` is the highest it has seen."""

    def describe(self) -> Describe: ...

    def manifest(self) -> ManifestReply: ...

    def placement(self) -> PlacementReply: ...

    def adopt(self, world: str, epoch: int, digest: str, leader_epoch: LeaderEpoch) -> None:
        """Notes that the live placement is epoch `epoch`. The one call by which a new store's leader is accepted."""

    def stage(self, command: StageCommand) -> RankStatus: ...

    def status(self) -> RankStatus: ...

    def arm(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus: ...

    def abort(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus: ...

    def set_shares(self, digest: str, shares: FloatTable) -> bool:
        """A hint; False when `digest` is not live."""

    def samples(self, after_step: int) -> SamplesReply:
        """Routing samples of windows that end after this step. Only asked of an engine with this capability."""
