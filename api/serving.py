"""Serving: one process that runs a controller and its API until it is asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Awaitable, Callable

import uvicorn
from fastapi import FastAPI

from api.auth import AuthSettings
from eplane.errors import BadInput, EPlaneError

STOP_GRACE_S = 3


def address_of(text: str, option: str) -> tuple[str, int]:
    """`HOST:PORT` as its parts, `[::1]:80` too. Raises BadInput that names the option."""
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise BadInput(f"{option} {text!r}: expected HOST:PORT, as in 127.0.0.1:7070")
    return host.strip("[]"), int(port)


def listening_socket(host: str, port: int) -> socket.socket:
    """Bind at once, so that a port in use is one sentence and not a half-started controller."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind((host, port))
        one.listen(1024)
    except (OSError, OverflowError) as error:
        one.close()
        raise BadInput(f"can not listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from None
    one.setblocking(False)
    return one


class _Server(uvicorn.Server):
    """Signals belong to the process as a whole, not to its HTTP part."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


async def serve(app: FastAPI, listener: socket.socket, auth: AuthSettings, run: Callable[[], Awaitable[None]]) -> None:
    """Run the controller and its API until SIGTERM or SIGINT. When one of them ends by itself the process ends."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=STOP_GRACE_S,
        ssl_certfile=auth.tls_cert,
        ssl_keyfile=auth.tls_key,
    )
    server = _Server(config)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked.set)
    controller = asyncio.ensure_future(run())
    http = asyncio.ensure_future(server.serve(sockets=[listener]))
    stop = asyncio.ensure_future(asked.wait())
    await asyncio.wait({controller, http, stop}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    by_itself = not stop.done()
    stop.cancel()
    await asyncio.wait({http}, timeout=STOP_GRACE_S + 2)
    controller.cancel()
    http.cancel()
    for result in await asyncio.gather(controller, http, return_exceptions=True):
        if isinstance(result, Exception):
            raise _first(result)
    if by_itself:
        raise EPlaneError("a part of the controller ended without having been asked to")


def _first(error: Exception) -> Exception:
    """Of errors that came as a group the first that says what to do; a person reads one sentence, not a tree."""
    leaves = [error]
    while any(isinstance(one, ExceptionGroup) for one in leaves):
        leaves = [leaf for one in leaves for leaf in (one.exceptions if isinstance(one, ExceptionGroup) else (one,))]
    return next((one for one in leaves if isinstance(one, EPlaneError)), leaves[0])
