"""The solver in a process of its own, so that a long solve can not cost the lease; it dies with its parent.

`python -m controller.solving PARENT` reads requests on stdin and answers on stdout. A frame is two big-endian 32-bit
lengths, then a JSON head, then the raw little-endian arrays that the head describes. One request at a time; a request
that runs past its time ends the process, and the next one starts a new process.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import os
import signal
import struct
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from typing import Any, BinaryIO

import numpy as np

from controller.sharing import level_shares
from controller.solver import Answer, Problem, solve
from eplane.errors import EPlaneError, Infeasible, ProblemError, SolverFailed
from eplane.load import FloatLoad
from eplane.placement import FloatTable, IntTable

MAX_FRAME = 1 << 30
_ARRAYS = {"<i4", "<i8", "<f8", "|b1"}
_PR_SET_PDEATHSIG = 1


def encode(head: Mapping[str, Any]) -> bytes:
    """One frame. Arrays may stand anywhere at the top level of `head`."""
    plain: dict[str, Any] = {}
    blobs: list[bytes] = []
    arrays: list[list[Any]] = []
    for name, value in head.items():
        if isinstance(value, np.ndarray):
            kind = value.dtype.newbyteorder("<") if value.dtype.byteorder != "|" else value.dtype
            arrays.append([name, kind.str, list(value.shape)])
            blobs.append(np.ascontiguousarray(value, dtype=kind).tobytes())
        else:
            plain[name] = value
    text = json.dumps({"plain": plain, "arrays": arrays}).encode()
    return struct.pack(">II", len(text), sum(map(len, blobs))) + text + b"".join(blobs)


def decode(text: bytes, blob: bytes) -> dict[str, Any]:
    """The head of a frame with its arrays in place (read-only). Raises SolverFailed for anything malformed."""
    try:
        head = json.loads(text)
        result = dict(head["plain"])
        at = 0
        for name, kind, shape in head["arrays"]:
            if kind not in _ARRAYS or any(not isinstance(n, int) or n < 0 for n in shape):
                raise SolverFailed(f"the solver's frame has an array of kind {kind!r:.20} and shape {shape!r:.60}")
            size = math.prod(shape) * np.dtype(kind).itemsize
            if at + size > len(blob):
                raise SolverFailed("the solver's frame is shorter than its arrays")
            result[name] = np.frombuffer(blob[at : at + size], dtype=kind).reshape(shape)
            at += size
    except (ValueError, KeyError, TypeError) as error:
        raise SolverFailed(f"the solver's frame can not be read: {error}") from error
    return result


def _lengths(raw: bytes) -> tuple[int, int]:
    head, blob = struct.unpack(">II", raw)
    if head > MAX_FRAME or blob > MAX_FRAME:
        raise SolverFailed(f"a frame of {head} + {blob} bytes is beyond any problem")
    return head, blob


class SolverProcess:
    """Solves in a child that is started when first needed and kept, so that compiled kernels stay warm."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._busy = asyncio.Lock()
        self.started = 0

    async def solve(self, problem: Mapping[str, Any], timeout_s: float) -> Answer:
        """The answer to a problem in its JSON form, arrays allowed (see `Problem.from_dict`).

        Raises ProblemError, Infeasible as the solver did; SolverFailed when it took longer than `timeout_s` or died.
        """
        return read_answer(await self._call({"task": "solve", **problem}, timeout_s))

    async def shares(self, p2l: IntTable, ranks: int, load: FloatLoad, timeout_s: float) -> FloatTable:
        """`[L, P]` the best split of `load [L, E]` over the replicas of a placement. Raises SolverFailed."""
        reply = await self._call({"task": "shares", "p2l": p2l, "ranks": ranks, "load": load}, timeout_s)
        found = reply.get("shares")
        if not isinstance(found, np.ndarray) or found.shape != p2l.shape:
            raise SolverFailed(f"the solver failed: {reply.get('error', 'no shares came back')}")
        return found

    async def _call(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        async with self._busy:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._ask(request)
            except TimeoutError:
                await self._end()
                raise SolverFailed(f"the solver gave no answer in {timeout_s:g} s and was ended") from None
            except (OSError, asyncio.IncompleteReadError) as error:
                code = await self._end()
                raise SolverFailed(f"the solver's process ended while it solved (exit {code}): {error}") from error
            except BaseException:
                # Cancelled half-way through a frame: what comes next on the pipe would be the wrong answer.
                await self._end()
                raise

    async def warm(self, timeout_s: float = 120.0) -> None:
        """Start the process and have it compile (or load) what every solve needs, before the first one is wanted."""
        two = np.array([[0, 1, 0, 2]], dtype=np.int32)
        load = np.array([[3.0, 2.0, 1.0]])
        routings = np.tile(np.array([[0, 1], [1, 2]], dtype=np.int32), (1, 64, 1))
        await self.shares(two, 2, load, timeout_s)
        problem = {"load": load, "ranks": 2, "nodes": 2, "slots_per_rank": 2, "prior": two, "policy": "eplane"}
        await self.solve({**problem, "routing_sample": routings}, timeout_s)

    async def close(self) -> None:
        await self._end()

    async def _ask(self, problem: Mapping[str, Any]) -> dict[str, Any]:
        child = self._child
        if child is None or child.returncode is not None:
            child = self._child = await self._start()
        if child.stdin is None or child.stdout is None:
            raise SolverFailed("the solver's process has no pipes")
        child.stdin.write(encode(problem))
        await child.stdin.drain()
        head, blob = _lengths(await child.stdout.readexactly(8))
        return decode(await child.stdout.readexactly(head), await child.stdout.readexactly(blob))

    async def _start(self) -> asyncio.subprocess.Process:
        self.started += 1
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "controller.solving",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )

    async def _end(self) -> int | None:
        child, self._child = self._child, None
        if child is None:
            return None
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.kill()
        if child.stdin is not None:
            child.stdin.close()
        # The pipe's reader sees the end only after what is buffered is taken.
        await child.communicate()
        return child.returncode


def read_answer(reply: dict[str, Any]) -> Answer:
    """The answer in a reply, or the error that it carries, raised."""
    error = reply.get("error")
    if isinstance(error, dict):
        kind, first, second = (str(error.get(name, "")) for name in ("kind", "first", "second"))
        if kind == "Infeasible":
            raise Infeasible(first, second)
        if kind == "ProblemError":
            raise ProblemError(first, second)
        raise SolverFailed(f"the solver failed: {first}")
    try:
        values = {f.name: reply[f.name] for f in fields(Answer)}
        values["decisions"] = tuple(values["decisions"])
        steps = values["predicted_step_us"]
        values["predicted_step_us"] = None if steps is None else (float(steps[0]), float(steps[1]))
        nodes = values["nodes_per_token"]
        if nodes is not None:
            values["nodes_per_token"] = (None if nodes[0] is None else float(nodes[0]), float(nodes[1]))
    except (KeyError, TypeError, IndexError) as wrong:
        raise SolverFailed(f"the solver's answer lacks {wrong}") from wrong
    return Answer(**values)


def answer_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """What the child answers to one request."""
    raw = dict(request)
    if raw.pop("task", "solve") == "shares":
        return {"shares": level_shares(raw["p2l"], int(raw["ranks"]), raw["load"])}
    try:
        answer = solve(Problem.from_dict(raw))
    except Infeasible as error:
        reason = str(error).removeprefix(f"goal {error.goal} cannot be met: ")
        return {"error": {"kind": "Infeasible", "first": error.goal, "second": reason}}
    except ProblemError as error:
        return {
            "error": {
                "kind": "ProblemError",
                "first": error.field,
                "second": str(error).removeprefix(f"{error.field}: "),
            }
        }
    except EPlaneError as error:
        return {"error": {"kind": type(error).__name__, "first": str(error)}}
    return {f.name: getattr(answer, f.name) for f in fields(Answer)}


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Answer requests until the pipe closes."""
    while len(lengths := source.read(8)) == 8:
        head, blob = _lengths(lengths)
        request = decode(source.read(head), source.read(blob))
        sink.write(encode(answer_of(request)))
        sink.flush()


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` ends; end at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    # Ctrl-C in a terminal goes to the whole group; the parent ends this process in its own order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(5)
    # Nothing but frames may reach stdout.
    frames = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, frames)


if __name__ == "__main__":
    main()
