"""The links of one node: a connection to every rank whose socket lies in the link directory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from eplane.errors import LinkError, LinkRefused, MessageError
from eplane.placement import FloatTable
from eplane.plan import LeaderEpoch
from runtime.link.client import LinkClient
from runtime.link.messages import Describe, ErrorCode, PlacementReply, RankStatus
from runtime.link.samples import SamplesReply

log = logging.getLogger("eplane.agent")
LINK_ERRORS = (LinkError, OSError, TimeoutError)
T = TypeVar("T")


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
        paths = {path.stem.removeprefix("rank"): path for path in sorted(self._directory.glob("rank*.sock"))}
        new = {int(name): path for name, path in paths.items() if name.isdecimal() and int(name) not in self._links}
        await asyncio.gather(*(self._connect(rank, path, leader_epoch) for rank, path in new.items()))

    async def _connect(self, rank: int, path: Path, leader_epoch: LeaderEpoch | None) -> None:
        client = LinkClient(path)
        try:
            async with asyncio.timeout(self._timeout_s):
                describe = await client.connect(self._incarnation, leader_epoch)
        except LINK_ERRORS as error:
            log.debug("rank %d does not answer yet: %s", rank, error)
            await client.close()
            return
        self._links[rank] = Link(client, describe, path.with_suffix(".counters"))
        log.info("linked to rank %d of world %s", rank, describe.world)

    async def drop(self, rank: int, link: Link, why: object) -> None:
        """Give `link` up, unless the rank has been linked anew already."""
        if self._links.get(rank) is link:
            del self._links[rank]
            log.warning("the link to rank %d is lost: %s", rank, why)
        await link.client.close()

    async def _ask(self, asked: Mapping[int, Link], call: Callable[[Link], Awaitable[T]]) -> dict[int, T]:
        """Ask ranks all at once, so that several that stand still cost no more time than one.

        Those that do not answer are dropped; a refusal is an answer, and is told to the log.
        """

        async def one(rank: int, link: Link) -> tuple[int, T] | None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return rank, await call(link)
            except LinkRefused as error:
                log.info("rank %d refuses: %s", rank, error)
                if error.code == ErrorCode.SUPERSEDED:
                    await self.drop(rank, link, error)
            except LINK_ERRORS as error:
                await self.drop(rank, link, error)
            return None

        answers = await asyncio.gather(*(one(rank, link) for rank, link in asked.items()))
        return dict(answer for answer in answers if answer is not None)

    async def statuses(self) -> dict[int, RankStatus]:
        """What every rank says of itself now; ranks that do not answer are dropped."""
        return await self._ask(dict(self._links), lambda link: link.client.status())

    async def describe(self) -> list[Describe]:
        return list((await self._ask(dict(self._links), lambda link: link.client.describe())).values())

    async def placement(self) -> PlacementReply | None:
        """The table that this node's ranks serve, as the first of them that answers says it."""
        for rank, link in list(self._links.items()):
            found = await self._ask({rank: link}, lambda link: link.client.placement())
            if found:
                return found[rank]
        return None

    async def samples(self, wanted: Mapping[int, int]) -> dict[int, tuple[Describe, SamplesReply]]:
        """Routing samples of windows that end after the step wanted, of the ranks that offer any, with who they are.

        An answer that is none is told as a refused one: a sample is not worth a link.
        """

        async def ask(link: Link) -> tuple[Describe, SamplesReply]:
            said = link.describe
            try:
                return said, await link.client.samples(wanted[said.rank])
            except MessageError as error:
                return said, SamplesReply(said.world, (), (str(error),))

        offer = {
            rank: link
            for rank, link in self._links.items()
            if rank in wanted and rank == link.describe.rank and link.describe.capabilities.routing_sample
        }
        return await self._ask(offer, ask)

    async def hint(self, digest: str, shares: FloatTable) -> None:
        """Hand shares to every rank. Each drops them unless `digest` is what it serves, so a late hint is harmless."""
        await self._ask(dict(self._links), lambda link: link.client.set_shares(digest, shares))

    async def adopt(self, adoption: Adoption | None, statuses: Mapping[int, RankStatus]) -> None:
        """Tell each rank that serves the adopted placement its epoch number, unless it knows it."""
        if adoption is None:
            return
        told = adoption.world, adoption.epoch, adoption.digest, adoption.leader_epoch
        wanting = {
            rank: self._links[rank]
            for rank, status in statuses.items()
            if rank in self._links
            and (status.world, status.live.digest) == (adoption.world, adoption.digest)
            and status.live.epoch != adoption.epoch
        }
        await self._ask(wanting, lambda link: link.client.adopt(*told))

    async def close(self) -> None:
        for link in self._links.values():
            await link.client.close()
        self._links.clear()
