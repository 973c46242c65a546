"""Carries out the leader's orders on this node's ranks: stage, arm, abort; and says so once the engines confirmed it.

What is due follows from the stored wave and from what the ranks report, so every pass can be repeated by anyone:

    wave        done on each rank                              acknowledged when
    STAGING     stage (again is harmless)                      VERIFIED: all ranks of the node hold verified bundles
    SWITCHING   arm (again is harmless)                        SWITCHED: all ranks serve the target
                                                               CLEAN: and the cells that it freed are free
    ABORTED     abort, unless the wave was cut over            CLEAN: no rank has anything of it staged or armed
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from agent.links import LINK_ERRORS, Link, Links
from agent.orders import Order
from eplane.clock import Clock
from eplane.crash import crash_point
from eplane.errors import LinkRefused
from eplane.keys import AckKind, GroupKeys
from eplane.plan import Identity
from eplane.records import AckRecord, new_nonce
from eplane.store.base import CreateRevision, Store
from eplane.transactions import acknowledge
from eplane.wave import WaveState
from runtime.link.messages import ErrorCode, RankStatus, StageCommand, StagedState

log = logging.getLogger("eplane.agent")
RankCall = Callable[[int, Link], Awaitable[RankStatus]]
# A rank that says one of these may say yes a moment later: cells become free, the wave before gets live.
NOT_YET = frozenset({ErrorCode.CAPACITY, ErrorCode.BUSY, ErrorCode.WRONG_BASE, ErrorCode.NOT_VERIFIED})


@dataclass(frozen=True, slots=True)
class Said:
    """An acknowledgement that the store has taken."""

    identity: Identity
    kind: AckKind


class Mover:
    """Acts for one node. `acknowledge` writes are guarded by this agent's own presence key: an older life writes nothing."""

    def __init__(
        self, store: Store, keys: GroupKeys, node: str, incarnation: str, timeout_s: float, clock: Clock
    ) -> None:
        self._store = store
        self._keys = keys
        self._node = node
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._clock = clock
        self._said: set[Said] = set()
        self._passed: set[tuple[Identity, str]] = set()

    async def carry_out(self, orders: Iterable[Order], links: Links, presence: CreateRevision) -> None:
        """One pass over the waves of the active migration, in their order."""
        orders = list(orders)
        self._said = {said for said in self._said if any(o.identity == said.identity for o in orders)}
        self._passed = {mark for mark in self._passed if any(o.identity == mark[0] for o in orders)}
        for order in orders:
            if links.world != order.identity.world or not links.complete():
                continue
            match order.state:
                case WaveState.STAGING:
                    await self._stage(order, links, presence)
                case WaveState.SWITCHING:
                    await self._switch(order, links, presence)
                case WaveState.ABORTED:
                    await self._abort(order, links, presence)
                case WaveState.PENDING | WaveState.VERIFIED | WaveState.RETIRED:
                    continue

    async def _stage(self, order: Order, links: Links, presence: CreateRevision) -> None:
        if self._has_said(order, AckKind.VERIFIED, AckKind.FAILED):
            return
        self._pass(order, "agent.stage.before")
        statuses = await self._on_every_rank(links, lambda rank, link: self._stage_rank(order, rank, link))
        self._pass(order, "agent.stage.after")
        if statuses is None:
            return
        failed = [s for s in statuses.values() if s.staged is not None and s.staged.state is StagedState.FAILED]
        if failed:
            reason = "; ".join(f"rank {s.rank}: {s.staged.reason}" for s in failed if s.staged is not None)
            await self._acknowledge(order, AckKind.FAILED, presence, reason)
        elif all(_holds(s, order.identity) for s in statuses.values()):
            self._pass(order, "agent.verified.before")
            await self._acknowledge(order, AckKind.VERIFIED, presence)
            self._pass(order, "agent.verified.after")

    async def _stage_rank(self, order: Order, rank: int, link: Link) -> RankStatus:
        status = await link.client.status()
        if status.staged is not None and status.staged.identity == order.identity:
            # Asked again, an engine would begin a failed staging anew, and its reason would be lost.
            return status
        record = order.record
        command = StageCommand(
            identity=record.identity,
            leader_epoch=record.leader,
            base_digest=record.work.base_digest,
            changes=record.work.changes,
            shares=record.shares,
            loads=record.loads_of([rank], link.describe.slots),
            # The ranks know each other's transfer addresses since their world began.
            peers={},
            bytes_per_s=record.bytes_per_s,
        )
        return await link.client.stage(command)

    async def _switch(self, order: Order, links: Links, presence: CreateRevision) -> None:
        if self._has_said(order, AckKind.CLEAN):
            return
        self._pass(order, "agent.arm.before")
        statuses = await self._on_every_rank(
            links, lambda rank, link: link.client.arm(order.identity, order.record.leader)
        )
        self._pass(order, "agent.arm.after")
        if statuses is None or not all(_serves(s, order.identity) for s in statuses.values()):
            return
        if not self._has_said(order, AckKind.SWITCHED):
            self._pass(order, "agent.switched.before")
            steps = [s.last_step_under_old for s in statuses.values() if s.last_step_under_old is not None]
            await self._acknowledge(order, AckKind.SWITCHED, presence, last_step=max(steps, default=None))
            self._pass(order, "agent.switched.after")
        if all(s.cells_retired == 0 for s in statuses.values()):
            await self._clean(order, presence)

    async def _abort(self, order: Order, links: Links, presence: CreateRevision) -> None:
        if self._has_said(order, AckKind.CLEAN):
            return
        if order.cut:
            # Past its cutover a wave is aborted only because its world ended, and its memory with it.
            return
        self._pass(order, "agent.abort.before")
        statuses = await self._on_every_rank(
            links, lambda rank, link: link.client.abort(order.identity, order.record.leader)
        )
        self._pass(order, "agent.abort.after")
        if statuses is not None and all(_dropped(s, order.identity) for s in statuses.values()):
            await self._clean(order, presence)

    async def _clean(self, order: Order, presence: CreateRevision) -> None:
        self._pass(order, "agent.clean.before")
        await self._acknowledge(order, AckKind.CLEAN, presence)
        self._pass(order, "agent.clean.after")

    async def _on_every_rank(self, links: Links, call: RankCall) -> dict[int, RankStatus] | None:
        """The answers of all ranks of the node, or None if one did not answer, or said not yet."""
        asked = dict(links.ranks)
        answers = await asyncio.gather(
            *(self._ask(rank, link, call) for rank, link in asked.items()), return_exceptions=True
        )
        result: dict[int, RankStatus] = {}
        for (rank, link), answer in zip(asked.items(), answers, strict=True):
            if isinstance(answer, RankStatus):
                result[rank] = answer
            elif isinstance(answer, LinkRefused):
                level = logging.DEBUG if answer.code in NOT_YET else logging.WARNING
                log.log(level, "rank %d refuses (%s): %s", rank, answer.code, answer)
            elif isinstance(answer, LINK_ERRORS):
                await links.drop(rank, link, answer)
            elif isinstance(answer, BaseException):
                raise answer
        return result if len(result) == len(asked) else None

    async def _ask(self, rank: int, link: Link, call: RankCall) -> RankStatus:
        async with asyncio.timeout(self._timeout_s):
            return await call(rank, link)

    async def _acknowledge(
        self,
        order: Order,
        kind: AckKind,
        presence: CreateRevision,
        reason: str = "",
        last_step: int | None = None,
    ) -> None:
        """Write the ack once. If it is there already, an earlier life or an earlier try of ours wrote it."""
        identity = order.identity
        key = self._keys.ack(identity.migration, identity.wave, kind, self._node)
        record = AckRecord(
            kind, identity, self._node, self._incarnation, self._clock.now(), new_nonce(), reason, last_step
        )
        (write,) = acknowledge(self._keys, presence.revision, [record])
        result = await self._store.transact(write.compares, write.ops)
        if result.succeeded or result.found.get(key) is not None:
            self._said.add(Said(identity, kind))
            log.info("wave %d of %s: %s %s", identity.wave, identity.migration, kind.value, reason)

    def _has_said(self, order: Order, *kinds: AckKind) -> bool:
        return any(Said(order.identity, kind) in self._said or kind in order.acked for kind in kinds)

    def _pass(self, order: Order, point: str) -> None:
        """A crash point is passed once a wave, however often its step is repeated."""
        if (order.identity, point) not in self._passed:
            self._passed.add((order.identity, point))
            crash_point(point)


def _holds(status: RankStatus, identity: Identity) -> bool:
    if _serves(status, identity) or status.armed == identity:
        return True
    staged = status.staged
    return staged is not None and staged.identity == identity and staged.state is StagedState.VERIFIED


def _serves(status: RankStatus, identity: Identity) -> bool:
    return status.live.digest == identity.digest and status.live.epoch == identity.epoch


def _dropped(status: RankStatus, identity: Identity) -> bool:
    staged = status.staged
    return (staged is None or staged.identity != identity) and status.armed != identity
