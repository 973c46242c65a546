"""RankPort: the engine link's end in the embedded runtime. It ties cells, tables, switch, staging and transfers.

The engine thread never comes here; it only talks to the Switch. What an agent may do, in order:

    adopt .. stage(1) .. arm(1) .. stage(2) while 1 is armed .. [all ranks switch] .. arm(2) ..
                |            '-- from here on there is no way back: abort is refused
                '-- abort, or a stage for a newer migration: the cells are free again

Each of these calls can be repeated: it then changes nothing and answers the present status.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from eplane.errors import LinkRefused, PlacementError, TableError
from eplane.placement import FloatTable
from eplane.plan import Identity, LeaderEpoch
from eplane.routing import RankSample
from eplane.topology import Capabilities
from runtime.cells import CellPool, CellState
from runtime.faults import NO_FAULTS, Faults
from runtime.link.fence import LeaderFence
from runtime.link.manifest import manifest_digest
from runtime.link.messages import (
    Describe,
    ErrorCode,
    Live,
    ManifestReply,
    PlacementReply,
    RankStatus,
    StageCommand,
    StagedState,
)
from runtime.link.samples import SamplesReply
from runtime.staging import Checkpoint, Origin, Staging
from runtime.switch import Switch
from runtime.transfer import TransferServer

ALL_CAPABILITIES = Capabilities()
NO_ADDRESSES: Mapping[int, str] = MappingProxyType({})
GIVE_UP_S = 2.0
REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What does not change in the life of a rank. `node_of_rank[r]`: node of rank r. `layers`: MoE layers."""

    world: str
    group: str
    rank: int
    node_of_rank: tuple[str, ...]
    model: str
    layers: int
    experts: int
    top_k: int
    slots: int
    capabilities: Capabilities = ALL_CAPABILITIES


class RankPort:
    """Implements EnginePort for one rank.

    `digests [L][E]`: of every bundle, in resident form. `addresses`: transfer address of each rank, as known when
    the world began; a stage command may name newer ones. `transfer_deadline_s`: for one bundle, before what a rate
    limit adds. `samples(step)`: the routing samples of windows that end after a step; None: this rank keeps none.
    """

    def __init__(
        self,
        facts: RankFacts,
        pool: CellPool,
        switch: Switch,
        transfer: TransferServer,
        digests: Sequence[Sequence[str]],
        load_from_checkpoint: Checkpoint,
        *,
        addresses: Mapping[int, str] = NO_ADDRESSES,
        faults: Faults = NO_FAULTS,
        transfer_deadline_s: float = 30.0,
        samples: Callable[[int], tuple[RankSample, ...]] | None = None,
    ) -> None:
        can = dataclasses.replace(facts.capabilities, routing_sample=samples is not None)
        self._facts = dataclasses.replace(facts, capabilities=can)
        self._samples = samples
        self._pool = pool
        self._switch = switch
        self._transfer = transfer
        self._manifest = ManifestReply(pool.manifest, tuple(tuple(row) for row in digests))
        self._manifest_digest = manifest_digest(pool.manifest, digests)
        self._origin = Origin(digests, load_from_checkpoint, transfer_deadline_s)
        self._addresses = dict(addresses)
        self._faults = faults
        self._lock = threading.RLock()
        self._fence = LeaderFence()
        self._staging: Staging | None = None
        self._stopping: list[Staging] = []
        self._aborted: OrderedDict[Identity, None] = OrderedDict()

    def close(self) -> None:
        """Gives up what is staged and stops serving transfers."""
        with self._lock:
            self._drop()
        self._transfer.close()

    def hello(self, leader_epoch: LeaderEpoch | None) -> None:
        with self._lock:
            if leader_epoch is not None:
                self._fence.hear(leader_epoch)

    def describe(self) -> Describe:
        facts, live = self._facts, self._switch.live
        return Describe(
            world=facts.world,
            group=facts.group,
            rank=facts.rank,
            node=facts.node_of_rank[facts.rank],
            node_of_rank=facts.node_of_rank,
            model=facts.model,
            layers=facts.layers,
            experts=facts.experts,
            top_k=facts.top_k,
            slots=facts.slots,
            cells=self._pool.cells,
            cells_free=self._pool.count(CellState.FREE),
            bundle_bytes=self._pool.manifest.bundle_bytes,
            capabilities=facts.capabilities,
            digest=live.digest,
            epoch=live.epoch,
            manifest_digest=self._manifest_digest,
            transfer_address=self._transfer.address,
            step=self._switch.step,
        )

    def manifest(self) -> ManifestReply:
        return self._manifest

    def placement(self) -> PlacementReply:
        live = self._switch.live
        return PlacementReply(live.digest, live.epoch, live.placement.p2l, live.shares)

    def adopt(self, world: str, epoch: int, digest: str, leader_epoch: LeaderEpoch) -> None:
        with self._lock:
            self._check_world(world)
            if self._fence.is_new_cluster(leader_epoch) and self._switch.armed is not None:
                raise LinkRefused(ErrorCode.ALREADY_ARMED, "a wave of the old store is armed and has not switched")
            if self._switch.live.digest != digest:
                raise LinkRefused(ErrorCode.DIGEST_MISMATCH, f"{self._switch.live.digest} is live, not {digest}")
            new_cluster = self._fence.is_new_cluster(leader_epoch)
            self._fence.adopt(leader_epoch)
            if new_cluster:
                self._drop()
            if not self._switch.set_epoch(digest, epoch):
                raise LinkRefused(ErrorCode.DIGEST_MISMATCH, f"{digest} is no longer live")

    def stage(self, command: StageCommand) -> RankStatus:
        with self._lock:
            identity = command.identity
            self._check(identity, command.leader_epoch)
            if self._switch.is_committed(identity) or self._is_staged(identity):
                return self.status()
            if identity in self._aborted:
                raise LinkRefused(ErrorCode.UNKNOWN_IDENTITY, f"wave {identity.wave} was aborted here")
            base = self._switch.newest
            if base.digest != command.base_digest:
                raise LinkRefused(
                    ErrorCode.WRONG_BASE, f"the wave starts from {command.base_digest}, this rank from {base.digest}"
                )
            if base.epoch is not None and identity.epoch <= base.epoch:
                raise LinkRefused(ErrorCode.WRONG_BASE, f"epoch {identity.epoch} does not follow epoch {base.epoch}")
            self._make_room(identity)
            command = dataclasses.replace(command, peers={**self._addresses, **command.peers})
            self._staging = Staging.begin(command, base, self._pool, self._origin, self._faults)
            return self.status()

    def status(self) -> RankStatus:
        with self._lock:
            self._stopping = [staging for staging in self._stopping if not staging.stopped]
            now = self._switch.standing()
            idle = self._staging is None and not self._stopping
            return RankStatus(
                world=self._facts.world,
                rank=self._facts.rank,
                step=now.step,
                live=Live(now.live.epoch, now.live.digest),
                leader_epoch=self._fence.current,
                armed=now.armed,
                staged=None if self._staging is None else self._staging.status(),
                last_switched=now.last_switched,
                last_step_under_old=now.last_step_under_old,
                clean=idle and now.armed is None and now.retired == 0,
                cells_free=self._pool.count(CellState.FREE),
                cells_retired=now.retired,
                waits=self._waits(),
            )

    def arm(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus:
        with self._lock:
            self._check(identity, leader_epoch)
            if self._switch.is_committed(identity):
                return self.status()
            staging = self._staging
            if staging is None or staging.identity != identity:
                raise LinkRefused(ErrorCode.UNKNOWN_IDENTITY, f"wave {identity.wave} is not staged here")
            if staging.status().state is not StagedState.VERIFIED:
                raise LinkRefused(ErrorCode.NOT_VERIFIED, f"wave {identity.wave} is not verified here yet")
            try:
                self._switch.arm(identity, staging.table, staging.base_digest)
            except TableError as error:
                raise LinkRefused(ErrorCode.NOT_VERIFIED, str(error)) from error
            staging.hand_over()
            self._staging = None
            return self.status()

    def abort(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus:
        with self._lock:
            self._check(identity, leader_epoch)
            if self._switch.is_committed(identity):
                raise LinkRefused(
                    ErrorCode.ALREADY_ARMED, f"wave {identity.wave} is armed or live: there is no way back"
                )
            self._aborted[identity] = None
            while len(self._aborted) > REMEMBERED:
                self._aborted.popitem(last=False)
            if self._is_staged(identity, failed_too=True):
                self._drop()
            return self.status()

    def set_shares(self, digest: str, shares: FloatTable) -> bool:
        try:
            return self._switch.set_shares(digest, shares)
        except PlacementError as error:
            raise LinkRefused(ErrorCode.BAD_REQUEST, str(error)) from error

    def samples(self, after_step: int) -> SamplesReply:
        found = () if self._samples is None else self._samples(after_step)
        return SamplesReply(self._facts.world, found)

    def _check(self, identity: Identity, leader_epoch: LeaderEpoch) -> None:
        self._check_world(identity.world)
        self._fence.check(leader_epoch)

    def _check_world(self, world: str) -> None:
        if world != self._facts.world:
            raise LinkRefused(ErrorCode.UNKNOWN_WORLD, f"this rank lives in world {self._facts.world}, not in {world}")

    def _is_staged(self, identity: Identity, failed_too: bool = False) -> bool:
        if self._staging is None or self._staging.identity != identity:
            return False
        return failed_too or self._staging.status().state is not StagedState.FAILED

    def _make_room(self, identity: Identity) -> None:
        """One staging at a time: a newer migration drops an older one's; a failed one may be tried again."""
        old = self._staging
        if old is not None:
            if old.identity.migration == identity.migration and old.identity != identity:
                raise LinkRefused(ErrorCode.BUSY, f"wave {old.identity.wave} of the same migration is staged here")
            self._drop()
        if any(not staging.wait_stopped(GIVE_UP_S) for staging in self._stopping):
            why = self._waits()
            raise LinkRefused(
                ErrorCode.BUSY, "the cells of a given-up wave are not free yet" + (f": {why}" if why else "")
            )

    def _waits(self) -> str | None:
        """Why cells of a wave that failed or was given up are not free, if so."""
        ending = [*self._stopping, *([] if self._staging is None else [self._staging])]
        return next((why for staging in ending if (why := staging.waits)), None)

    def _drop(self) -> None:
        """Gives up the unarmed staging; its cells are free when its thread has ended."""
        if self._staging is None:
            return
        self._staging.give_up()
        self._staging.wait_stopped(GIVE_UP_S)
        self._stopping.append(self._staging)
        self._staging = None
