"""A real rank that stands still in the middle of a wave: for less than the collective time-out, and for more.

One stack with the runtime and its shipped model: etcd, a controller, an agent, two ranks on one node. The rate limit
holds the wave open in STAGING while the rank stands still.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.client import Client, ClientSettings, path_of
from api.stack import Stack, StackSettings
from tests.cluster.rig import until

COLLECTIVE_TIMEOUT_S = 5.0
STACK = {"ranks": 2, "nodes": 1, "slots": 18, "window_steps": 4, "mode": "observe", "ttl_s": 2.0}
# A bundle has 25 KB, so a wave is held open for seconds.
HELD_OPEN = {"bytes_per_s": 80_000}
SETTINGS = {"policy": "eplb", "cooldown_s": 0, "max_moves_per_wave": 16, **HELD_OPEN}

pytestmark = pytest.mark.timeout(400)


class Deployment:
    def __init__(self, stack: Stack, client: Client) -> None:
        self._stack = stack
        self._client = client

    def ask(self, *path: str) -> Any:
        return self._client.get(path_of("v1", "groups", "default", *path))

    def set(self, settings: Mapping[str, object]) -> None:
        body = {"settings": settings, "reason": "the test's next step"}
        self._client.change("PATCH", path_of("v1", "groups", "default", "config"), body)

    def serve(self, count: int = 4) -> list[int]:
        """Requests that make load; their status codes."""
        body = {"prompt": "def main(argv: list[str]) -> int:", "max_tokens": 24, "ignore_eos": True}

        def one(_: int) -> int:
            return httpx.post(f"{self._stack.runtime_urls[0]}/v1/completions", json=body, timeout=60).status_code

        with ThreadPoolExecutor(count) as pool:
            return list(pool.map(one, range(count)))

    def begin(self) -> str:
        """A migration with a wave in STAGING that stays there for a while; its id."""
        self.set(HELD_OPEN)

        def plan() -> dict[str, Any] | None:
            self.serve()
            body = {"reason": "the load is tilted", "options": {"anyway": True}}
            found: dict[str, Any] | None = self._client.change("POST", "/v1/groups/default/plans", body)["plan"]
            return found

        found = until(plan, "a plan")
        path = path_of("v1", "groups", "default", "plans", found["id"], "execute")
        migration = str(self._client.change("POST", path, {"reason": "go"}, if_match=found["base_epoch"])["id"])
        until(lambda: self.ask("migrations", migration)["waves"][0]["state"] == "STAGING", "a wave in STAGING")
        return migration

    def ended(self, migration: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found: dict[str, Any] = self.ask("migrations", migration)
            return found if found["outcome"] is not None else None

        return until(look, f"the end of {migration}", 150)

    def rank_pid(self, rank: int) -> int:
        """The process that has the rank's counters mapped, and is no agent."""
        wanted = str(self._stack.link_dir("n0") / f"rank{rank}.counters")
        agent = self._stack.supervisor.pid("agent-n0")
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != agent and wanted in _maps(entry):
                return int(entry.name)
        raise LookupError(f"no process is rank {rank}")

    def world(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self._stack.runtime_urls[0]}/v1/world", timeout=10).json()
        return found


def _maps(process: Path) -> str:
    try:
        return (process / "maps").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = StackSettings(
        tmp_path_factory.mktemp("ranks") / "run",
        **STACK,  # type: ignore[arg-type]
        group_settings=SETTINGS,
        runtime_options=("--collective-timeout-s", f"{COLLECTIVE_TIMEOUT_S}", "--device", "cpu"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EPLANE_ETCD", raising=False)
        with Stack(settings) as stack, Client(ClientSettings(stack.controller_urls, patience_s=60)) as client:
            yield Deployment(stack, client)


def test_a_rank_stopped_for_less_than_the_time_out_costs_nothing(deployment: Deployment) -> None:
    world = deployment.world()["world"]
    migration = deployment.begin()
    pid = deployment.rank_pid(1)
    os.kill(pid, signal.SIGSTOP)
    time.sleep(COLLECTIVE_TIMEOUT_S / 3)
    os.kill(pid, signal.SIGCONT)
    deployment.set({"bytes_per_s": None})
    assert deployment.serve() == [200] * 4
    assert deployment.ended(migration)["outcome"] == "DONE"
    status = deployment.ask("status")
    assert (deployment.world()["world"], deployment.world()["digest"]) == (world, status["digest"])
    assert deployment.world()["epoch"] == status["epoch"] > 1


def test_a_rank_stopped_for_longer_ends_its_world_and_the_next_one_is_adopted(deployment: Deployment) -> None:
    before = deployment.ask("status")
    migration = deployment.begin()
    os.kill(deployment.rank_pid(1), signal.SIGSTOP)
    ended = deployment.ended(migration)
    assert (ended["outcome"], "world lost" in ended["sentence"]) == ("ABORTED", True)
    history = deployment.ask("history")
    newest = history[0]
    assert newest["kind"] == "adoption"
    assert newest["world"] not in (before["world"]["world"], None)
    assert [h["epoch"] for h in history] == list(range(newest["epoch"], 0, -1))
    after = until(lambda: _told(deployment, newest), "the new world told of its epoch")
    assert after["world"] == newest["world"]
    assert deployment.serve() == [200] * 4


def _told(deployment: Deployment, newest: dict[str, Any]) -> dict[str, Any] | None:
    try:
        found = deployment.world()
    except httpx.HTTPError:
        return None
    return found if (found.get("digest"), found.get("epoch")) == (newest["digest"], newest["epoch"]) else None
