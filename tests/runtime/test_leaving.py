"""A client that leaves while its request is queued takes its place in the queue with it. A real server, a played rank."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from runtime import wire
from runtime.front import Front
from runtime.server import build_app
from runtime.text import Bytes


class _Quiet(uvicorn.Server):
    def install_signal_handlers(self) -> None:
        """The tests' own handlers stay."""


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[tuple[Front, Connection]]:
    ours, theirs = multiprocessing.Pipe()
    front = Front({0: ours})
    front.listen()
    wire.send(theirs, wire.READY, vocabulary=260, context=1000, digest="0" * 16, world="a" * 16, model="tiny")
    await front.changed.wait()
    app = build_app(front, Bytes(), "g", "tiny")
    server = _Quiet(uvicorn.Config(app, uds=str(path), log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield front, theirs
    finally:
        front.deaf()
        server.should_exit = True
        await task
        ours.close()
        theirs.close()


async def heard(rank: Connection) -> wire.Message:
    while not rank.poll():
        await asyncio.sleep(0.01)
    return wire.receive(rank)


async def asked(path: Path, **body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    text = json.dumps({"prompt": "long", "max_tokens": 9, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}"
    writer.write(head.encode() + b"\r\n\r\n" + text)
    await writer.drain()
    return reader, writer


@pytest.mark.parametrize("stream", [False, True])
async def test_a_queued_request_ends_when_its_client_leaves(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path / "s") as (front, rank):
        _, writer = await asked(tmp_path / "s", stream=stream)
        begun = await heard(rank)
        assert begun["is"] == wire.START
        assert front.open_requests == 1
        writer.close()
        # No token came: the leaving itself must be noticed.
        ended = await asyncio.wait_for(heard(rank), 20)
        assert (ended["is"], ended["id"]) == (wire.CANCEL, begun["id"])
        assert front.open_requests == 0
        assert front.totals.cancelled == 1


async def test_who_stays_is_answered(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (front, rank):
        reader, writer = await asked(tmp_path / "s")
        number = (await heard(rank))["id"]
        wire.send(rank, wire.TOKENS, items=[[number, 65, -1.0, None, []], [number, 66, -1.0, "length", []]])
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert b'"text":"AB"' in await reader.read(300)
        writer.close()
        assert (front.totals.ok, front.totals.cancelled) == (1, 0)


async def test_a_refusal_is_still_a_problem(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (_, rank):
        for stream in (False, True):
            reader, writer = await asked(tmp_path / "s", stream=stream)
            number = (await heard(rank))["id"]
            wire.send(rank, wire.REFUSED, id=number, code=wire.FULL, reason="9 requests wait already")
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 429")
            writer.close()
