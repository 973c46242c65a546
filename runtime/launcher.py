"""The launcher of one node: starts its ranks, serves HTTP for them, and ends when they or its master end.

It imports no torch: ranks are forked from a server process that has imported it once (multiprocessing's forkserver),
so several ranks start nearly as fast as one. If the launcher dies, the forkserver and the ranks die with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import uvicorn

from eplane.errors import BadInput, CheckpointError
from runtime import wire
from runtime.entry import enter
from runtime.front import Front, WorldState
from runtime.options import ServeOptions, host_port
from runtime.server import build_app
from runtime.text import text_of
from runtime.wire import EXIT_WORLD_LOST

PRELOAD = ["torch", "torch.distributed", "runtime.preload"]
STOP_GRACE_S = 2.0
FLUSH_S = 1.0
TINY = "tiny"
LONGEST_SOCKET_PATH = 107

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set before torch is loaded. More OpenMP threads than free cores stall every parallel region (measured: 8 ms)."""


def serve(options: ServeOptions) -> int:
    """Run a node's part of a world until it ends. Returns the exit code. Raises BadInput, CheckpointError at once."""
    _check_installed()
    folder = _model_folder(options.model)
    listener = _listen(options)
    try:
        if options.link_dir is not None:
            _make_link_dir(Path(options.link_dir), max(options.ranks))
        for name, value in ONE_THREAD.items():
            os.environ.setdefault(name, value)
        with _ranks(options) as (connections, processes):
            front = Front(connections)
            name = options.model if options.model == TINY else folder.name
            app = build_app(front, text_of(options.model, folder), options.group, name)
            code = asyncio.run(_run(options, front, app, listener))
            _stop_ranks(connections, processes)
            return code
    finally:
        listener.close()


def _check_installed() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"{missing[0]} is not installed, and ranks need it: install eplane[runtime]")


def _model_folder(model: str) -> Path:
    folder = Path(__file__).parent / "tiny" / "model" if model == TINY else Path(model)
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json is there")
    return folder


def _make_link_dir(path: Path, last_rank: int) -> None:
    longest = len(os.fsencode(path / f"rank{last_rank}.sock"))
    if longest > LONGEST_SOCKET_PATH:
        raise BadInput(
            f"--link-dir {path} is too long: a socket in it would have a path of {longest} bytes, Linux allows "
            f"{LONGEST_SOCKET_PATH}"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--link-dir {path} can not be used: {error.strerror}") from error


def _listen(options: ServeOptions) -> socket.socket:
    host, port = host_port(options.http, "--http")
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise BadInput(f"--http {options.http}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def _ranks(options: ServeOptions) -> Iterator[tuple[dict[int, Connection], dict[int, ForkServerProcess]]]:
    """Start the local ranks; whatever happens, none is left behind."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    connections: dict[int, Connection] = {}
    processes: dict[int, ForkServerProcess] = {}
    text = options.to_json()
    try:
        for rank in options.ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=enter, args=(text, rank, theirs), name=f"rank{rank}", daemon=True)
            try:
                process.start()
            except EOFError as error:
                # The forkserver ended while it loaded torch and said on stderr why.
                raise CheckpointError("the process that loads torch for the ranks did not start") from error
            theirs.close()
            connections[rank], processes[rank] = ours, process
        yield connections, processes
    finally:
        for process in processes.values():
            if process.is_alive():
                process.kill()
        for process in processes.values():
            process.join(STOP_GRACE_S)
        for connection in connections.values():
            connection.close()


async def _run(options: ServeOptions, front: Front, app: object, listener: socket.socket) -> int:
    """Serve until told to stop, or until the world is lost. Returns the exit code."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, front.stop)
    front.listen()
    server = _Server(uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1))  # type: ignore[arg-type]
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: front.end(WorldState.LOST, "the HTTP server ended", EXIT_WORLD_LOST))
    try:
        async with asyncio.timeout(options.start_timeout_s):
            await front.changed.wait()
    except TimeoutError:
        front.end(WorldState.LOST, f"the ranks did not start within {options.start_timeout_s:g} s", EXIT_WORLD_LOST)
    front.changed.clear()
    if front.state is WorldState.READY:
        await front.changed.wait()
    front.deaf()
    # Open requests have just been given their 503; let it reach them.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await front.idle.wait()
    server.should_exit = True
    await serving
    if front.exit_code:
        _complain(front.reason)
    return front.exit_code


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The launcher has its own signal handlers."""
        yield


def _stop_ranks(connections: dict[int, Connection], processes: dict[int, ForkServerProcess]) -> None:
    """Ask the ranks to end; those that wait in an exchange for a rank that has ended are killed by the caller."""
    for connection in connections.values():
        with contextlib.suppress(OSError):
            wire.send(connection, wire.STOP)
    for process in processes.values():
        process.join(STOP_GRACE_S / max(1, len(processes)))


def _complain(reason: str) -> None:
    os.write(2, f"error: {reason}\n".encode())
