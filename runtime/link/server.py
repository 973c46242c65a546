"""The engine's end of the link: a Unix socket served by one side thread, one call at a time.

One session at a time. A session is an agent's incarnation, told by `hello`; a later incarnation supersedes it, its
connection is closed, and it can never come back: an agent that was stopped and goes on after its successor took over
commands nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from eplane.errors import EPlaneError, FieldError, LinkError, LinkRefused, MessageError
from eplane.fields import Fields
from eplane.plan import Identity, LeaderEpoch
from runtime.link.messages import MAX_FRAME, ErrorCode, Json, StageCommand, decode, encode, read_table
from runtime.link.port import EnginePort

REMEMBERED = 4096
_log = logging.getLogger(__name__)


class LinkServer:
    """Serves `port` at `path` until `close`. Its thread never touches the device and starts no collective.

    `on_death` is called, from the thread, if the thread ends by an error; by default the process ends with code 71,
    for a rank that nobody can reach any more would keep its group from ever moving.
    """

    def __init__(
        self, port: EnginePort, path: Path | str, on_death: Callable[[BaseException], None] | None = None
    ) -> None:
        self._port = port
        self._path = Path(path)
        self._on_death = on_death or _end_process
        self._session: tuple[str, asyncio.StreamWriter] | None = None
        self._superseded: OrderedDict[str, None] = OrderedDict()
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._ready = threading.Event()
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._path))
            self._path.chmod(0o600)  # Who may write to this socket commands the rank.
            listener.listen(16)
        except OSError as error:
            listener.close()
            raise LinkError(f"the engine link cannot listen at {self._path}: {error}") from error
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="engine-link", daemon=True)
        self._thread.start()
        self._ready.wait()

    def close(self) -> None:
        """Ends the session and the thread, and removes the socket."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(timeout=10.0)
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            _log.critical("the engine link at %s died: %s", self._path, error)
            self._on_death(error)
        finally:
            self._listener.close()
            self._ready.set()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        server = await asyncio.start_unix_server(self._connected, sock=self._listener)
        self._ready.set()
        await self._stop.wait()
        server.close()
        for writer in self._connections.values():
            writer.close()
        if self._connections:  # They end by themselves now; a cancelled one would be reported as an error.
            await asyncio.wait(list(self._connections), timeout=5.0)
        await server.wait_closed()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections[task] = writer
        try:
            while True:
                head = await reader.readexactly(4)
                size = int.from_bytes(head, "big")
                if size > MAX_FRAME:
                    _log.warning("engine link %s: a frame of %d bytes is over the limit", self._path, size)
                    return
                reply = self._reply(await reader.readexactly(size), writer)
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            _log.debug("engine link %s: a connection ended: %s", self._path, error)
        finally:
            if task is not None:
                self._connections.pop(task, None)
            writer.close()

    def _reply(self, body: bytes, writer: asyncio.StreamWriter) -> bytes:
        """Runs one call; without an await, so calls never overlap and a superseded session cannot slip in between."""
        number = 0
        try:
            request = decode(body)
            fields = Fields(request, "request", MessageError)
            number = fields.integer("id")
            result = self._call(fields.text("call"), fields.within("args"), writer)
            return encode({"id": number, "ok": result})
        except LinkRefused as error:
            return _refusal(number, error.code, str(error))
        except (FieldError, LinkError) as error:
            return _refusal(number, ErrorCode.BAD_REQUEST, str(error))
        except EPlaneError as error:
            _log.warning("engine link %s: %s", self._path, error)
            return _refusal(number, ErrorCode.BAD_REQUEST, str(error))

    def _call(self, call: str, args: Fields, writer: asyncio.StreamWriter) -> Json:
        if call == "hello":
            return self._hello(args, writer)
        if self._session is None or self._session[1] is not writer:
            raise LinkRefused(
                ErrorCode.SUPERSEDED, "this connection has no session, or a newer agent has taken it over"
            )
        known = _CALLS.get(call)
        if known is None:
            raise LinkRefused(ErrorCode.BAD_REQUEST, f"there is no call {call!r}")
        return known(self._port, args)

    def _hello(self, args: Fields, writer: asyncio.StreamWriter) -> Json:
        incarnation = args.text("agent_incarnation", most=128)
        leader = args.maybe("leader_epoch", lambda name: LeaderEpoch.read(args.within(name)))
        if incarnation in self._superseded:
            raise LinkRefused(ErrorCode.SUPERSEDED, f"agent incarnation {incarnation} was superseded")
        if self._session is not None:
            old, old_writer = self._session
            if old != incarnation:
                self._superseded[old] = None
                while len(self._superseded) > REMEMBERED:
                    self._superseded.popitem(last=False)
            if old_writer is not writer:
                old_writer.close()
        self._session = (incarnation, writer)
        self._port.hello(leader)
        return self._port.describe().to_json()


def _stage(port: EnginePort, args: Fields) -> Json:
    return port.stage(StageCommand.read(args)).to_json()


def _arm(port: EnginePort, args: Fields) -> Json:
    return port.arm(*_order(args)).to_json()


def _abort(port: EnginePort, args: Fields) -> Json:
    return port.abort(*_order(args)).to_json()


def _adopt(port: EnginePort, args: Fields) -> Json:
    leader = LeaderEpoch.read(args.within("leader_epoch"))
    port.adopt(args.hexes("world", 16), args.integer("epoch", low=1), args.hexes("digest", 16), leader)
    return {}


def _set_shares(port: EnginePort, args: Fields) -> Json:
    return {"applied": port.set_shares(args.hexes("digest", 16), read_table(args, "shares"))}


def _samples(port: EnginePort, args: Fields) -> Json:
    # An engine that samples nothing needs no such call, and one that is made all the same must not end its link.
    if not port.describe().capabilities.routing_sample:
        raise LinkRefused(ErrorCode.BAD_REQUEST, "this engine samples no routing")
    return port.samples(args.integer("after_step")).to_json()


def _order(args: Fields) -> tuple[Identity, LeaderEpoch]:
    return Identity.read(args.within("identity")), LeaderEpoch.read(args.within("leader_epoch"))


_CALLS: dict[str, Callable[[EnginePort, Fields], Json]] = {
    "describe": lambda port, _: port.describe().to_json(),
    "manifest": lambda port, _: port.manifest().to_json(),
    "placement": lambda port, _: port.placement().to_json(),
    "status": lambda port, _: port.status().to_json(),
    "adopt": _adopt,
    "stage": _stage,
    "arm": _arm,
    "abort": _abort,
    "set_shares": _set_shares,
    "samples": _samples,
}


def _refusal(number: int, code: str, sentence: str) -> bytes:
    return encode({"id": number, "error": {"code": code, "message": sentence}})


def _end_process(error: BaseException) -> None:
    os._exit(71)
