"""What a leader is told: once, in order, again after an outage, all of it to a new leader; and the hint that comes back."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from agent.reporter import Leader as LeaderSeen
from agent.reporter import Reporter
from agent.settings import AgentSettings
from eplane.load import LoadReport, SubWindow
from tests.agent.rig import NODE, Engine, Leader, new_store, running_agent, until

WORLD = "ab" * 8


class Ear:
    """A leader that listens over real HTTP. `status` and `shares` say what it answers."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.status = 200
        self.shares: dict[str, object] | None = None
        self.want_describe = False
        ear = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if ear.status == 200:
                    ear.bodies.append(body)
                reply = {"accepted": 1, "refused": [], "shares": ear.shares, "want_describe": ear.want_describe}
                raw = json.dumps(reply).encode()
                self.send_response(ear.status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *args: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def told(self) -> list[tuple[int, int]]:
        """(rank, seq) of every sub-window that arrived, in order."""
        result: list[tuple[int, int]] = []
        for body in self.bodies:
            report, refused = LoadReport.from_json(body["report"])
            assert not refused
            result.extend((w.rank, w.seq) for w in report.subwindows)
        return result


@pytest.fixture
def ear() -> Iterator[Ear]:
    made = Ear()
    yield made
    made.close()


def window(seq: int, rank: int = 0) -> SubWindow:
    counts = np.ones((2, 4), dtype=np.int64)
    return SubWindow(WORLD, "cd" * 8, seq * 4, seq * 4 + 4, rank, counts, counts, seq)


def reporter(clock: list[float], **options: int) -> Reporter:
    settings = AgentSettings("g", NODE, Path("nowhere"), **options)  # type: ignore[arg-type]
    return Reporter(settings, "ef" * 8, lambda: clock[0])


async def test_each_window_is_told_once(ear: Ear) -> None:
    clock = [0.0]
    one = reporter(clock)
    leader = LeaderSeen(ear.url, 5)
    one.add([window(0), window(1)])
    await one.report(leader, WORLD, [window(0), window(1)], None, ())
    one.add([window(2)])
    await one.report(leader, WORLD, [window(0), window(1), window(2)], None, ())
    assert ear.told() == [(0, 0), (0, 1), (0, 2)]
    await one.close()


async def test_an_outage_loses_nothing_and_is_not_hammered(ear: Ear) -> None:
    clock = [0.0]
    one = reporter(clock)
    leader = LeaderSeen(ear.url, 5)
    await one.report(leader, WORLD, [], None, ())
    ear.status = 503
    one.add([window(0)])
    await one.report(leader, WORLD, [], None, ())
    ear.status = 200
    one.add([window(1)])
    await one.report(leader, WORLD, [], None, ())
    assert ear.told() == [], "asked again before the back-off was over"
    clock[0] = 60.0
    await one.report(leader, WORLD, [], None, ())
    assert ear.told() == [(0, 0), (0, 1)]
    await one.close()


async def test_a_new_leader_is_told_the_last_windows_again(ear: Ear) -> None:
    clock = [0.0]
    one = reporter(clock)
    kept = [window(n) for n in range(3)]
    one.add(kept)
    await one.report(LeaderSeen(ear.url, 5), WORLD, kept, None, ())
    one.add([window(3)])
    await one.report(LeaderSeen(ear.url, 9), WORLD, [*kept, window(3)], None, ())
    assert ear.told() == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1), (0, 2), (0, 3)]
    await one.close()


async def test_the_queue_is_bounded_and_what_falls_off_is_counted(ear: Ear) -> None:
    one = reporter([0.0], queue_windows=20, replay_windows=4)
    one.add([window(n) for n in range(50)])
    assert one.dropped == 30
    await one.report(LeaderSeen(ear.url, 1), WORLD, [], None, ())
    assert ear.told() == [(0, n) for n in range(30, 50)]
    await one.close()


async def test_a_running_agent_reports_every_step_and_hands_shares_to_the_ranks(ear: Ear, tmp_path: Path) -> None:
    engine, store = Engine(tmp_path), new_store()
    leader = Leader(store, engine)
    await leader.lead(ear.url)
    start = engine.group.start
    shares = start.even_shares()
    twice = next(e for e in range(start.experts) if start.replica_count[0, e] > 1)
    slots = start.replicas(0, twice)
    shares[0, slots[0]] += 0.25
    shares[0, slots[1]] -= 0.25
    ear.shares = {"digest": start.digest, "shares": shares.tolist()}
    try:
        async with running_agent(store, engine.folder):
            await until(lambda: len(ear.told()) > 20)
            await until(lambda: all(np.allclose(rank.shares, shares) for rank in engine.group.ranks))
        told = ear.told()
        for rank in (0, 1):
            seqs = [seq for r, seq in told if r == rank]
            assert seqs == sorted(set(seqs)), "a window was told twice or out of order"
        first = ear.bodies[0]
        assert len(first["describe"]) == 2  # type: ignore[arg-type]
        assert first["placement"]["digest"] == start.digest  # type: ignore[index]
        assert len(first["statuses"]) == 2  # type: ignore[arg-type]
        ear.shares = {"digest": "00" * 8, "shares": start.even_shares().tolist()}
        before = len(ear.bodies)
        async with running_agent(store, engine.folder):
            await until(lambda: len(ear.bodies) > before + 3)
        assert all(np.allclose(rank.shares, shares) for rank in engine.group.ranks), "a late hint was applied"
    finally:
        engine.close()
        await store.close()


async def test_a_leader_that_asks_is_described_to_again(ear: Ear, tmp_path: Path) -> None:
    engine, store = Engine(tmp_path), new_store()
    await Leader(store, engine).lead(ear.url)
    ear.want_describe = True
    try:
        async with running_agent(store, engine.folder):
            await until(lambda: sum(bool(body["describe"]) for body in ear.bodies) >= 3)
    finally:
        engine.close()
        await store.close()
    await asyncio.sleep(0)
