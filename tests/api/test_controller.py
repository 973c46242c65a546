"""The API over real controllers on a store in memory: a world is adopted, planned for, migrated and rolled back."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest

from api.app import create_app
from api.auth import Auth
from api.cli.migration import migration_table, migrations_table
from api.cli.plan import plan_table, plans_table
from api.cli.state import (
    history_table,
    layer_table,
    load_table,
    nodes_table,
    one_layer,
    placement_table,
    rows_table,
    status_table,
)
from controller.daemon import Controller
from controller.settings import ControllerSettings
from eplane.clock import SystemClock
from eplane.store.memory import MemoryStore
from tests.controller.rig import HereSolver, Nodes, start_placement, tilted

G = "/v1/groups/g"
WHY = {"reason": "because", "actor": "me"}
URLS = ("http://127.0.0.1:7070", "http://127.0.0.1:7071")


@dataclass
class Deployment:
    """Two controllers on one store, the first of them leading, and nodes that are played."""

    leader: httpx.AsyncClient
    follower: httpx.AsyncClient
    nodes: Nodes

    async def report(self, windows: int = 0) -> None:
        for node in self.nodes.names:
            body = self.nodes.body(node, tilted(), windows)
            answer = await self.leader.post(f"{G}/reports", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["refused"] == []
        self.nodes.step += 32 * windows

    async def get(self, path: str) -> Any:
        answer = await self.leader.get(f"{G}/{path}")
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def until_ended(self, migration: str) -> dict[str, Any]:
        async def over() -> bool:
            await self.nodes.act()
            await self.report()
            return (await self.get(f"migrations/{migration}"))["outcome"] is not None

        await until(over)
        found: dict[str, Any] = await self.get(f"migrations/{migration}")
        return found


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await holds():
            await asyncio.sleep(0.02)


@pytest.fixture
async def deployed() -> AsyncIterator[Deployment]:
    clock = SystemClock()
    store = MemoryStore(clock)
    nodes = Nodes(store, clock, start_placement())
    await nodes.appear()
    controllers, clients, tasks = [], [], []
    for at, url in enumerate(URLS):
        settings = ControllerSettings(url, ("g",), f"c{at}", tick_s=0.05)
        controllers.append(Controller(store.connect(), settings, clock, HereSolver()))
        transport = httpx.ASGITransport(create_app(controllers[at], Auth()))
        clients.append(httpx.AsyncClient(transport=transport, base_url=url))
        tasks.append(asyncio.ensure_future(controllers[at].run()))

        async def led(
            first: Controller = controllers[0], url: str = URLS[0], one: Controller = controllers[at]
        ) -> bool:
            return first.is_leader("g") and one.leader_url("g") == url

        await until(led)
    yield Deployment(clients[0], clients[1], nodes)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for client in clients:
        await client.aclose()


async def adopted(deployed: Deployment) -> Deployment:
    async def has_epoch() -> bool:
        await deployed.report()
        return (await deployed.get("status"))["epoch"] == 1

    await until(has_epoch)
    quiet = {"settings": {"confirm": False, "policy": "eplb", "cooldown_s": 0, "min_window_tokens": 10}}
    answer = await deployed.leader.patch(f"{G}/config", json={**WHY, **quiet})
    assert answer.status_code == 200, answer.text
    await deployed.report(windows=4)
    return deployed


async def test_before_there_is_a_world(deployed: Deployment) -> None:
    status = await deployed.get("status")
    assert (status["epoch"], status["world"]) == (None, None)
    assert "none" in status_table(status)
    assert load_table(await deployed.get("load")) == "no load window yet"
    for path in ("plans", "migrations", "history", "nodes"):
        assert isinstance(await deployed.get(path), list)
    answer = await deployed.leader.post(f"{G}/plans", json=WHY)
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert (await deployed.leader.get(f"{G}/placement")).status_code == 404
    assert (await deployed.leader.get(f"{G}/explain?layer=0&expert=0")).status_code == 404


async def test_plan_execute_and_roll_back(deployed: Deployment) -> None:
    await adopted(deployed)
    http = deployed.leader
    before = (await deployed.get("placement"))["digest"]
    proposed = await http.post(f"{G}/plans", json={**WHY, "policy": "eplb"})
    assert proposed.status_code == 201, proposed.text
    plan = proposed.json()["plan"]
    assert (plan["actor"], plan["reason"], plan["base_epoch"]) == ("me", "because", 1)
    assert "PROPOSED" in plan_table(plan)
    assert plan["id"] in plans_table(await deployed.get("plans"))
    assert (await deployed.get("placement"))["digest"] == before

    path = f"{G}/plans/{plan['id']}/execute"
    stale = await http.post(path, json=WHY, headers={"If-Match": "7"})
    assert (stale.status_code, stale.json()["code"]) == (412, "stale_epoch")
    started = await http.post(path, json=WHY, headers={"If-Match": proposed.headers["etag"]})
    assert started.status_code == 202, started.text
    migration = started.headers["location"].rsplit("/", 1)[1]
    ended = await deployed.until_ended(migration)
    assert ended["state"] == "DONE"
    assert "RETIRED" in migration_table(ended)
    assert migration in migrations_table(await deployed.get("migrations"))
    after = await deployed.get("placement")
    assert after["digest"] == plan["target_digest"]
    assert (await deployed.get("placement?epoch=1"))["digest"] == before

    # What is wrong with a plan that is done is that it is done, whatever epoch the request names.
    for epoch in (str(after["epoch"]), str(plan["base_epoch"]), "99"):
        again = await http.post(path, json=WHY, headers={"If-Match": epoch})
        assert (again.status_code, again.json()["code"]) == (409, "conflict")
        assert again.json()["detail"] == f"plan {plan['id']} is DONE; only a PROPOSED plan can be executed"
    back = await http.post(f"{G}/rollback", json={**WHY, "to_epoch": 1})
    assert back.status_code == 201, back.text
    assert back.json()["plan"]["target_digest"] == before
    gone = await http.post(f"{G}/plans/{back.json()['plan']['id']}/discard", json=WHY)
    assert gone.json()["state"] == "DISCARDED"
    nowhere = await http.post(f"{G}/rollback", json={**WHY, "to_epoch": after["epoch"] + 5})
    assert (nowhere.status_code, nowhere.json()["code"]) == (409, "conflict")


async def test_a_migration_can_be_aborted(deployed: Deployment) -> None:
    await adopted(deployed)
    http = deployed.leader
    plan = (await http.post(f"{G}/plans", json=WHY)).json()["plan"]
    started = await http.post(f"{G}/plans/{plan['id']}/execute", json=WHY, headers={"If-Match": "1"})
    migration = started.headers["location"].rsplit("/", 1)[1]
    stopped = await http.post(f"{G}/migrations/{migration}/abort", json=WHY)
    assert stopped.status_code == 202, stopped.text
    assert (await deployed.until_ended(migration))["state"] == "ABORTED"
    assert (await deployed.get("status"))["epoch"] == 1


async def test_everything_that_can_be_read(deployed: Deployment) -> None:
    await adopted(deployed)
    status = await deployed.get("status")
    assert 0 < status["balancedness"]["now"] < 1
    assert "n0" in status_table(status)
    load = await deployed.get("load")
    assert len(load["rank_load"]) == 2
    assert "BALANCEDNESS" in load_table(load)
    assert "routing sampled: 7 tokens" in load_table({**load, "sampled": 7})
    assert "routing" not in load_table({**load, "sampled": 0})
    assert "RANK" in layer_table(one_layer(load, 1, "rank_load"))
    assert "EXPERTS" in placement_table(one_layer(await deployed.get("placement"), 0, "p2l"))
    assert "n1" in nodes_table(await deployed.get("nodes"))
    assert "adoption" in history_table(await deployed.get("history"))
    assert "coverage" in rows_table(await deployed.get("goals"))
    assert isinstance(rows_table(await deployed.get("anomalies")), str)
    assert "expert 1" in (await deployed.get("explain?layer=0&expert=1"))["sentence"]
    windows = (await deployed.get("windows"))["windows"]
    kept = await deployed.leader.get(f"{G}/recording")
    with np.load(io.BytesIO(kept.content), allow_pickle=False) as found:
        assert found["load"].tolist() == [w["load"] for w in windows]
        assert found["last_step"].tolist() == [w["last_step"] for w in windows]
        last, world = int(found["last_step"][-1]), str(found["world"][-1])
    newer = f"{G}/recording?since_step={last}"
    assert (await deployed.leader.get(f"{newer}&world={world}")).status_code == 204
    # Steps of another world say nothing of this one's.
    assert (await deployed.leader.get(f"{newer}&world={'0' * 16}")).content[:2] == b"PK"
    assert (await deployed.follower.get(f"{G}/recording?prefer=leader")).status_code == 307
    metrics = (await deployed.leader.get("/metrics")).text
    assert 'eplane_leader{group="g"} 1.0' in metrics
    assert "eplane_api_requests_total" in metrics


async def test_modes_pauses_and_settings(deployed: Deployment) -> None:
    http = deployed.leader
    assert (await deployed.get("mode")) == {"group": "g", "mode": "propose", "paused": False}
    assert (await http.put(f"{G}/mode", json={**WHY, "mode": "off"})).json() == {"mode": "off"}
    assert (await http.post(f"{G}/pause", json=WHY)).json() == {"paused": True}
    assert (await deployed.get("mode")) == {"group": "g", "mode": "off", "paused": True}
    assert (await http.post(f"{G}/resume", json=WHY)).json() == {"paused": False}
    wrong = await http.patch(f"{G}/config", json={**WHY, "settings": {"interval_s": -1}})
    assert (wrong.status_code, wrong.json()["field"]) == (422, "interval_s")
    option = await http.post(f"{G}/plans", json={**WHY, "options": {"speed": 1}})
    assert option.status_code in (409, 422)
    right = await http.patch(f"{G}/config", json={**WHY, "settings": {"interval_s": 1.5}})
    assert right.json()["interval_s"] == 1.5
    for bad in ({"report": {}}, {"report": None}, {}):
        assert (await http.post(f"{G}/reports", json=bad)).json()["code"] == "invalid"


async def test_a_follower_reads_and_points_to_the_leader(deployed: Deployment) -> None:
    await adopted(deployed)

    async def seen() -> bool:
        return bool((await deployed.follower.get(f"{G}/status")).json()["epoch"] == 1)

    await until(seen)
    here = (await deployed.leader.get(f"{G}/placement")).json()
    assert (await deployed.follower.get(f"{G}/placement")).json()["p2l"] == here["p2l"]
    for method, path in (("POST", "pause"), ("POST", "plans"), ("PUT", "mode")):
        answer = await deployed.follower.request(
            method, f"{G}/{path}", json={**WHY, **({"mode": "off"} if path == "mode" else {})}
        )
        assert (answer.status_code, answer.headers["location"]) == (307, f"{URLS[0]}{G}/{path}")
    answer = await deployed.follower.post(f"{G}/reports", json=deployed.nodes.body("n0"))
    assert (answer.status_code, answer.json()["leader"]) == (409, URLS[0])
