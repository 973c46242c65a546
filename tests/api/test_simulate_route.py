"""/v1/groups/{g}/simulations: recorded windows through policies, one at a time, nothing of the group touched."""

from __future__ import annotations

import asyncio
import copy
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from api.app import create_app
from api.auth import Auth
from api.routes.simulations import KEPT, Simulation, Simulations
from api.simulating import compare
from controller.simulate import SimulationSettings
from eplane.clock import ManualClock
from eplane.store.memory import MemoryStore
from tests.api.desk import LEADER_URL, SmallController, SmallDesk
from tests.controller.rig import Nodes, seat, start_placement, tilted

SIMULATIONS = "/v1/groups/g/simulations"
ASK: dict[str, Any] = {"reason": "which is best", "actor": "me", "policies": ["static", "eplb"]}


@pytest.fixture
def app(controller: SmallController) -> FastAPI:
    controller.small.recorded = 4
    return create_app(controller, Auth())


@pytest.fixture
async def api(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client


async def ended(api: httpx.AsyncClient, location: str) -> dict[str, Any]:
    while True:
        answer = await api.get(location)
        assert answer.status_code == 200
        value: dict[str, Any] = answer.json()
        if value["state"] != "RUNNING":
            return value
        await asyncio.sleep(0.02)


async def test_a_simulation_of_what_was_recorded(api: httpx.AsyncClient, desk: SmallDesk) -> None:
    before = copy.deepcopy(vars(desk))
    answer = await api.post(SIMULATIONS, json=ASK)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"{SIMULATIONS}/{answer.json()['id']}"
    assert (answer.json()["state"], answer.json()["results"]) == ("RUNNING", None)
    # One runs at a time in a controller.
    busy = await api.post(SIMULATIONS, json=ASK)
    assert (busy.status_code, busy.json()["code"], busy.headers["retry-after"]) == (429, "busy", "1")
    value = await ended(api, answer.headers["location"])
    assert (value["state"], value["done"], value["total"], value["sentence"]) == ("DONE", 6, 6, None)
    assert (value["windows"], value["first_step"], value["last_step"]) == (4, 0, 32)
    load = np.asarray([w["load"] for w in await desk.windows()])
    expected = compare(load, ("static", "eplb"), SimulationSettings(2, 2, 1, fields={"node_of_rank": [0, 0]}))
    for got, want in zip(value["results"], expected, strict=True):
        assert got["policy"] == want.policy
        assert [row["next_mean"] for row in got["windows_detail"]] == [row.next_mean for row in want.windows]
        assert (got["moves"], got["bytes"]) == (want.summary()["moves"], want.summary()["bytes"])
    (line,) = (await api.get(SIMULATIONS)).json()
    assert line == {k: v for k, v in value.items() if k != "results"}
    assert (await api.post(SIMULATIONS, json=ASK)).status_code == 202
    assert vars(desk) == before


async def test_what_is_asked_for_instead_of_the_groups_own(api: httpx.AsyncClient) -> None:
    asked = {"ranks": 3, "slots": 2, "hardware": "h800", "gate": True, "options": {"max_moves": 1}}
    value = (await api.post(SIMULATIONS, json={**ASK, **asked})).json()
    assert (value["ranks"], value["slots_per_rank"], value["hardware"], value["gate"]) == (3, 2, "h800", True)
    assert (value["actor"], value["reason"]) == ("me", "which is best")
    value = await ended(api, f"{SIMULATIONS}/{value['id']}")
    assert value["results"][1]["step_us"] > 0


async def test_as_the_groups_controller(api: httpx.AsyncClient, desk: SmallDesk) -> None:
    """With gate: its settings, its live placement, and what is asked for instead of either."""
    desk.recorded = 6
    desk.settings = {"policy": "eplb", "window": 2, "confirm": False, "min_window_tokens": 1, "hardware": "cpu"}
    started = (await api.post(SIMULATIONS, json={**ASK, "gate": True, "every": 1})).json()
    assert (started["window"], started["every"], started["prior"], started["hardware"]) == (2, 1, "live", "cpu")
    value = await ended(api, f"{SIMULATIONS}/{started['id']}")
    static, eplb = value["results"]
    assert static["verdicts"] == {"static": 4}
    assert sum(eplb["verdicts"].values()) == eplb["windows"] == 4
    calm = {**ASK, "gate": True, "settings": {"min_window_tokens": 10**9}, "prior": "linear", "delay": 1}
    value = await ended(api, (await api.post(SIMULATIONS, json=calm)).headers["location"])
    assert value["prior"] == "linear"
    assert set(value["results"][1]["verdicts"]) == {"no_load"}


async def test_a_repeated_key_starts_one(api: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    first, again = [await api.post(SIMULATIONS, json=ASK, headers=headers) for _ in range(2)]
    assert (first.status_code, again.status_code) == (202, 202)
    assert again.headers["location"] == first.headers["location"]
    assert len((await api.get(SIMULATIONS)).json()) == 1


async def test_only_the_leader_simulates(api: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.leads, desk.leader = False, LEADER_URL
    for answer in (await api.post(SIMULATIONS, json=ASK), await api.get(f"{SIMULATIONS}/other")):
        assert answer.status_code == 307
        assert answer.headers["location"].startswith(LEADER_URL + SIMULATIONS)
    desk.leader = None
    assert (await api.post(SIMULATIONS, json=ASK)).status_code == 503
    assert (await api.get(f"{SIMULATIONS}/other")).status_code == 404


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        ({"policies": []}, 422, "policies"),
        ({"policies": ["best"]}, 422, "policy"),
        ({"policies": ["eplb", "eplb"]}, 422, "policies"),
        ({"window": 0}, 422, "window"),
        ({"window": 2}, 422, "window"),
        ({"hardware": "abacus"}, 422, "hardware"),
        ({"options": {"prior": []}}, 422, "options.prior"),
        ({"options": {"max_moves": -1}}, 422, "max_moves"),
        ({"settings": {"min_gain": 0.1}}, 422, "settings: are looked at with gate only"),
        ({"gate": True, "settings": {"min_gain": 7}, "window": 1}, 422, "min_gain"),
        ({"gate": True, "settings": {"drained": ["n0"]}, "window": 1}, 422, "drained"),
        ({"gate": True, "settings": {"min_replicas": 2}, "window": 1}, 409, "goal min_replicas cannot be met"),
        ({"prior": "old"}, 422, "prior"),
        ({"prior": "live", "slots": 3}, 422, "prior: live is a placement of other ranks or slots"),
        ({"every": 0}, 422, "every"),
        ({"speed": 1}, 422, "speed"),
        ({"slots": 1}, 409, "capacity"),
    ],
)
async def test_what_can_not_be_simulated(api: httpx.AsyncClient, more: dict[str, Any], status: int, says: str) -> None:
    answer = await api.post(SIMULATIONS, json={**ASK, **more})
    assert answer.status_code == status, answer.text
    assert says in answer.json()["detail"]
    assert (await api.get(SIMULATIONS)).json() == []


async def test_nothing_recorded_is_a_conflict(api: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.recorded = 0
    answer = await api.post(SIMULATIONS, json=ASK)
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert (await api.get("/v1/groups/other/simulations")).status_code == 404


async def test_one_that_takes_too_long_is_ended(api: httpx.AsyncClient, app: FastAPI) -> None:
    app.state.simulations = Simulations(limit_s=0.01)
    value = await ended(api, (await api.post(SIMULATIONS, json=ASK)).headers["location"])
    assert value["state"] == "FAILED"
    assert "not done after 0.01 s" in value["sentence"]


async def test_a_process_that_fails_is_told(api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    value = await ended(api, (await api.post(SIMULATIONS, json=ASK)).headers["location"])
    assert (value["state"], value["sentence"]) == (
        "FAILED",
        "the simulation's process failed: it ended with exit code 1 and no result",
    )
    monkeypatch.setattr("sys.executable", "/no/such/python")
    value = await ended(api, (await api.post(SIMULATIONS, json=ASK)).headers["location"])
    assert "No such file" in value["sentence"]


async def test_the_process_ends_with_its_task(
    api: httpx.AsyncClient, app: FastAPI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named, script = tmp_path / "pid", tmp_path / "endless"
    script.write_text(f"#!/bin/sh\necho $$ > {named}.new; mv {named}.new {named}; exec sleep 1000\n")
    script.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(script))
    assert (await api.post(SIMULATIONS, json=ASK)).status_code == 202
    while not named.exists():
        await asyncio.sleep(0.02)
    task = app.state.simulations._task
    task.cancel()
    await asyncio.wait([task])
    with pytest.raises(ProcessLookupError):
        os.kill(int(named.read_text()), 0)


async def test_only_so_many_are_kept(api: httpx.AsyncClient, app: FastAPI) -> None:
    for number in range(KEPT + 3):
        app.state.simulations.keep(Simulation("g", {}, id=f"s{number}"))
    assert [s["id"] for s in (await api.get(SIMULATIONS)).json()] == [f"s{n}" for n in range(KEPT + 2, 2, -1)]
    assert (await api.get(f"{SIMULATIONS}/s0")).status_code == 404


async def test_on_a_real_desk() -> None:
    """The controller's own desk, with a world that was adopted and load that was reported."""
    clock, small = ManualClock(), SmallController()
    store = MemoryStore(clock)
    nodes = Nodes(store, clock, start_placement())
    await nodes.appear()
    seated = await seat(store.connect(), clock, "c0")
    try:
        await nodes.report(seated.desk)
        await seated.turns()
        await nodes.report(seated.desk, tilted(), 5)
        small.desk = lambda group: seated.desk  # type: ignore[method-assign,assignment,return-value]
        transport = httpx.ASGITransport(create_app(small, Auth()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as api:
            recorded = (await api.get("/v1/groups/g/windows")).json()["windows"]
            answer = await api.post(SIMULATIONS, json=ASK)
            assert answer.status_code == 202, answer.text
            value = await ended(api, answer.headers["location"])
            asked = {**ASK, "gate": True, "window": 1, "settings": {"confirm": False, "min_window_tokens": 10}}
            again = await api.post(SIMULATIONS, json=asked)
            assert again.status_code == 202, again.text
            decided = await ended(api, again.headers["location"])
        assert (decided["prior"], decided["state"]) == ("live", "DONE")
        assert [r["verdicts"] for r in decided["results"]] == [{"static": 4}, {"level": 3, "started": 1}]
        status = await seated.desk.status()
        assert (value["ranks"], value["hardware"]) == (status["world"]["ranks"], "demo")
        assert (value["windows"], value["slots_per_rank"]) == (len(recorded), 3)
        static, eplb = value["results"]
        assert eplb["bytes"] == eplb["moves"] * status["world"]["bundle_bytes"]
        assert eplb["next"] > static["next"]
    finally:
        await seated.group.mirror.close()
