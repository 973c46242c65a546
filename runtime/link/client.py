"""The agent's end of the engine link."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from eplane.errors import LinkLost, LinkRefused, MessageError
from eplane.fields import Fields
from eplane.placement import FloatTable
from eplane.plan import Identity, LeaderEpoch
from runtime.link.messages import (
    MAX_FRAME,
    Describe,
    Json,
    ManifestReply,
    PlacementReply,
    RankStatus,
    StageCommand,
    decode,
    encode,
)
from runtime.link.samples import SamplesReply


class LinkClient:
    """One connection to one rank. Calls may be made from several tasks; they go one after the other.

    Every method may raise LinkRefused (the engine said no), LinkLost (connect again; the call may have been done, so
    ask for the status) and MessageError (the engine answers what is no answer).
    """

    def __init__(self, path: Path | str, timeout_s: float = 10.0) -> None:
        self._path = str(path)
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._lock = asyncio.Lock()
        self._number = 0

    @property
    def connected(self) -> bool:
        return self._streams is not None

    async def connect(self, incarnation: str, leader_epoch: LeaderEpoch | None = None) -> Describe:
        """Opens the session of agent `incarnation`; an older incarnation's session ends."""
        self._disconnect()
        try:
            async with asyncio.timeout(self._timeout_s):
                self._streams = await asyncio.open_unix_connection(self._path)
        except (OSError, TimeoutError) as error:
            raise LinkLost(f"no engine answers at {self._path}: {error}") from error
        leader = None if leader_epoch is None else leader_epoch.to_json()
        return Describe.from_json(await self._call("hello", {"agent_incarnation": incarnation, "leader_epoch": leader}))

    async def close(self) -> None:
        if self._streams is not None:
            writer = self._streams[1]
            self._disconnect()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def describe(self) -> Describe:
        return Describe.from_json(await self._call("describe", {}))

    async def manifest(self) -> ManifestReply:
        return ManifestReply.from_json(await self._call("manifest", {}))

    async def placement(self) -> PlacementReply:
        return PlacementReply.from_json(await self._call("placement", {}))

    async def adopt(self, world: str, epoch: int, digest: str, leader_epoch: LeaderEpoch) -> None:
        args: Json = {"world": world, "epoch": epoch, "digest": digest, "leader_epoch": leader_epoch.to_json()}
        await self._call("adopt", args)

    async def stage(self, command: StageCommand) -> RankStatus:
        return RankStatus.from_json(await self._call("stage", command.to_json()))

    async def status(self) -> RankStatus:
        return RankStatus.from_json(await self._call("status", {}))

    async def arm(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus:
        return RankStatus.from_json(await self._call("arm", _order(identity, leader_epoch)))

    async def abort(self, identity: Identity, leader_epoch: LeaderEpoch) -> RankStatus:
        return RankStatus.from_json(await self._call("abort", _order(identity, leader_epoch)))

    async def set_shares(self, digest: str, shares: FloatTable) -> bool:
        """Whether the shares were taken; they are dropped when `digest` is not live."""
        reply = await self._call("set_shares", {"digest": digest, "shares": shares.tolist()})
        return Fields(reply, "set_shares", MessageError).flag("applied")

    async def samples(self, after_step: int) -> SamplesReply:
        """Routing samples of windows that end after this step; LinkRefused by an engine without the capability."""
        return SamplesReply.from_json(await self._call("samples", {"after_step": after_step}))

    async def _call(self, call: str, args: Json) -> object:
        async with self._lock:
            if self._streams is None:
                raise LinkLost(f"not connected to {self._path}")
            reader, writer = self._streams
            self._number += 1
            number = self._number
            complete = False
            try:
                async with asyncio.timeout(self._timeout_s):
                    writer.write(encode({"id": number, "call": call, "args": args}))
                    await writer.drain()
                    size = int.from_bytes(await reader.readexactly(4), "big")
                    if size > MAX_FRAME:
                        raise MessageError("frame", f"of {size} bytes is over the limit of {MAX_FRAME}")
                    reply = Fields(decode(await reader.readexactly(size)), "reply", MessageError)
                complete = reply.integer("id") == number
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                raise LinkLost(f"{call}: no answer from {self._path}: {type(error).__name__} {error}") from error
            finally:
                # After a call that was cut short the next reply would be the wrong one.
                if not complete:
                    self._disconnect()
            if not complete:
                raise LinkLost(f"{call}: {self._path} answered another call")
            return _result(reply)

    def _disconnect(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def _result(reply: Fields) -> object:
    error = reply.maybe("error", reply.within)
    if error is not None:
        raise LinkRefused(error.text("code"), error.text("message"))
    return reply.value("ok")


def _order(identity: Identity, leader_epoch: LeaderEpoch) -> Json:
    return {"identity": identity.to_json(), "leader_epoch": leader_epoch.to_json()}
