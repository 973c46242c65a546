"""The links of one node: a connection to every rank whose socket lies in the link directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eplane.errors import LinkError, LinkRefused
from eplane.placement import FloatTable
from eplane.plan import LeaderEpoch
from runtime.link.client import LinkClient
from runtime.link.messages import Describe, PlacementReply, RankStatus

log = logging.getLogger("eplane.agent")
LINK_ERRORS = (LinkError, OSError, TimeoutError)


@dataclass(frozen=True, slots=True)
class Adoption:
    """What the leader made of a new world: the placement it serves is epoch `epoch`."""

    world: str
    epoch: int
    digest: str
    leader_epoch: LeaderEpoch


@dataclass(frozen=True, slots=True)
class Link:
    """A rank that answers: its connection, and what it said of itself when the connection was made."""

    client: LinkClient
    describe: Describe
    counters: Path


class Links:
    """Keeps one link a rank. A rank that stops answering is dropped and tried again at the next `refresh`."""

    def __init__(self, directory: Path, incarnation: str, timeout_s: float = 2.0) -> None:
        self._directory = directory
        self._incarnation = incarnation
        self._timeout_s = timeout_s
        self._links: dict[int, Link] = {}

    @property
    def ranks(self) -> Mapping[int, Link]:
        return self._links

    @property
    def world(self) -> str | None:
        """The world of this node's ranks, or None while there are none or they are not of one world."""
        worlds = {link.describe.world for link in self._links.values()}
        return worlds.pop() if len(worlds) == 1 else None

    def complete(self) -> bool:
        """Whether every rank that its world places on this node is linked."""
        if self.world is None:
            return False
        any_link = next(iter(self._links.values())).describe
        expected = {r for r, node in enumerate(any_link.node_of_rank) if node == any_link.node}
        return expected == set(self._links)

    async def refresh(self, leader_epoch: LeaderEpoch | None) -> None:
        """Connect to sockets that are new; a socket that refuses is a rank that is starting or gone."""
        for path in sorted(self._directory.glob("rank*.sock")):
            name = path.stem.removeprefix("rank")
            if not name.isdecimal() or int(name) in self._links:
                continue
            client = LinkClient(path)
            try:
                async with asyncio.timeout(self._timeout_s):
                    describe = await client.connect(self._incarnation, leader_epoch)
            except LINK_ERRORS as error:
                log.debug("rank %s does not answer yet: %s", name, error)
                await client.close()
                continue
            self._links[int(name)] = Link(client, describe, path.with_suffix(".counters"))
            log.info("linked to rank %s of world %s", name, describe.world)

    async def drop(self, rank: int, why: object) -> None:
        link = self._links.pop(rank, None)
        if link is not None:
            log.warning("the link to rank %d is lost: %s", rank, why)
            await link.client.close()

    async def statuses(self) -> dict[int, RankStatus]:
        """What every rank says of itself now; ranks that do not answer are dropped."""
        result: dict[int, RankStatus] = {}
        for rank, link in list(self._links.items()):
            try:
                async with asyncio.timeout(self._timeout_s):
                    result[rank] = await link.client.status()
            except LINK_ERRORS as error:
                await self.drop(rank, error)
        return result

    async def describe(self) -> list[Describe]:
        result: list[Describe] = []
        for rank, link in list(self._links.items()):
            try:
                async with asyncio.timeout(self._timeout_s):
                    result.append(await link.client.describe())
            except LINK_ERRORS as error:
                await self.drop(rank, error)
        return result

    async def placement(self) -> PlacementReply | None:
        """The table that this node's ranks serve, as the first of them that answers says it."""
        for rank, link in list(self._links.items()):
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await link.client.placement()
            except LINK_ERRORS as error:
                await self.drop(rank, error)
        return None

    async def hint(self, digest: str, shares: FloatTable) -> None:
        """Hand shares to every rank. Each drops them unless `digest` is what it serves, so a late hint is harmless."""
        for rank, link in list(self._links.items()):
            try:
                async with asyncio.timeout(self._timeout_s):
                    await link.client.set_shares(digest, shares)
            except LinkRefused as error:
                log.info("rank %d refuses shares: %s", rank, error)
            except LINK_ERRORS as error:
                await self.drop(rank, error)

    async def adopt(self, adoption: Adoption | None, statuses: Mapping[int, RankStatus]) -> None:
        """Tell each rank that serves the adopted placement its epoch number, unless it knows it."""
        for rank, status in statuses.items():
            link = self._links.get(rank)
            if adoption is None or link is None or status.world != adoption.world:
                continue
            if status.live.digest != adoption.digest or status.live.epoch == adoption.epoch:
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    await link.client.adopt(adoption.world, adoption.epoch, adoption.digest, adoption.leader_epoch)
            except LinkRefused as error:
                log.info("rank %d does not adopt epoch %d: %s", rank, adoption.epoch, error)
            except LINK_ERRORS as error:
                await self.drop(rank, error)

    async def close(self) -> None:
        for link in self._links.values():
            await link.client.close()
        self._links.clear()
