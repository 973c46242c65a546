"""Every route: what it answers, what it hands to the desk, and that reading changes nothing."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import Any

import httpx
import pytest

from api.app import create_app
from api.auth import Auth
from api.idempotency import Answers
from api.routes.page import WEB
from tests.api.desk import LEADER_URL, SmallController, SmallDesk

G = "/v1/groups/g"
WHY = {"reason": "because", "actor": "me"}

READS = {
    "/v1/groups": lambda v: v["groups"] == [{"group": "g", "leads_here": True, "leader_url": LEADER_URL}],
    f"{G}/status": lambda v: v["epoch"] == 3 and v["balancedness"]["mean"] is None,
    f"{G}/load": lambda v: v["rank_load"] == [[7.0, 3.0]],
    f"{G}/windows?since_step=0": lambda v: [w["first_step"] for w in v["windows"]] == [0],
    f"{G}/windows?since_step=8": lambda v: v["windows"] == [],
    f"{G}/placement": lambda v: v["p2l"] == [[0, 1, 2, -1]] and v["epoch"] == 3,
    f"{G}/placement?epoch=2": lambda v: v["epoch"] == 2,
    f"{G}/plans": lambda v: [p["id"] for p in v] == ["p1"],
    f"{G}/plans/p1": lambda v: v["id"] == "p1",
    f"{G}/migrations": lambda v: v == [],
    f"{G}/nodes": lambda v: v[0]["node"] == "n0",
    f"{G}/goals": lambda v: v[0]["ruling"] == "NO",
    f"{G}/anomalies": lambda v: v == [],
    f"{G}/history?limit=2": lambda v: [h["epoch"] for h in v] == [3, 2],
    f"{G}/explain?layer=0&expert=1": lambda v: v["expert"] == 1,
    f"{G}/mode": lambda v: v == {"group": "g", "mode": "propose", "paused": False},
    f"{G}/config": lambda v: v["policy"] == "eplane",
    "/v1/config": lambda v: v["groups"]["g"]["policy"] == "eplane",
    "/v1/leader": lambda v: v["groups"]["g"] == {"leads_here": True, "url": LEADER_URL},
    "/health": lambda v: v == {"ok": True},
}

CHANGES: list[tuple[str, str, dict[str, Any], int, tuple[Any, ...]]] = [
    ("POST", f"{G}/plans", {"policy": "eplb", "options": {"max_moves": 4}}, 201, ("propose", "eplb", "me", "because", {"max_moves": 4})),
    ("POST", f"{G}/plans/p1/execute", {}, 202, ("execute", "p1", 3, "me", "because")),
    ("POST", f"{G}/plans/p1/discard", {}, 200, ("discard", "p1", "me", "because")),
    ("POST", f"{G}/rollback", {"to_epoch": 1}, 201, ("rollback", 1, "me", "because")),
    ("POST", f"{G}/pause", {}, 200, ("pause", "me", "because")),
    ("POST", f"{G}/resume", {}, 200, ("resume", "me", "because")),
    ("PUT", f"{G}/mode", {"mode": "auto"}, 200, ("set_mode", "auto", "me", "because")),
    ("PATCH", f"{G}/config", {"settings": {"policy": "eplb"}}, 200, ("set_settings", {"policy": "eplb"}, "me", "because")),
]  # fmt: skip


@pytest.mark.parametrize("path", READS)
async def test_reads(http: httpx.AsyncClient, desk: SmallDesk, path: str) -> None:
    before = copy.deepcopy(vars(desk))
    answer = await http.get(path)
    assert answer.status_code == 200
    assert READS[path](answer.json())
    assert answer.headers["cache-control"] == "no-store"
    assert vars(desk) == before


@pytest.mark.parametrize(("method", "path", "more", "status", "seen"), CHANGES)
async def test_changes(
    http: httpx.AsyncClient,
    desk: SmallDesk,
    method: str,
    path: str,
    more: dict[str, Any],
    status: int,
    seen: tuple[Any, ...],
) -> None:
    answer = await http.request(method, path, json={**WHY, **more}, headers={"If-Match": '"3"'})
    assert answer.status_code == status, answer.text
    assert desk.changes == [seen]
    assert answer.headers["idempotency-key"]


async def test_a_follower_reads_from_its_mirror(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.leads, desk.leader = False, LEADER_URL
    for path in READS:
        assert (await http.get(path)).status_code == 200


@pytest.mark.parametrize(("method", "path", "more", "status", "seen"), CHANGES)
async def test_a_follower_sends_changes_to_the_leader(
    http: httpx.AsyncClient,
    desk: SmallDesk,
    method: str,
    path: str,
    more: dict[str, Any],
    status: int,
    seen: tuple[Any, ...],
) -> None:
    desk.leads, desk.leader = False, LEADER_URL
    body = {**WHY, **more}
    answer = await http.request(method, path, json=body, headers={"If-Match": "3"}, follow_redirects=False)
    assert answer.status_code == 307
    assert answer.headers["location"] == LEADER_URL + path
    assert answer.json()["code"] == "not_leader"
    assert answer.json()["leader"] == LEADER_URL
    desk.leader = None
    answer = await http.request(method, path, json=body, headers={"If-Match": "3"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert desk.changes == []


async def test_what_only_the_leader_knows_can_be_asked_of_it(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    paths = [f"{G}/status", f"{G}/load", f"{G}/windows", f"{G}/anomalies", f"{G}/explain?layer=0&expert=1"]
    for leads, leader, status in ((True, None, 200), (False, LEADER_URL, 307), (False, None, 200)):
        desk.leads, desk.leader = leads, leader
        for path in paths:
            asked = f"{path}{'&' if '?' in path else '?'}prefer=leader"
            answer = await http.get(asked)
            assert answer.status_code == status
            if status == 307:
                assert answer.headers["location"] == LEADER_URL + asked
    assert (await http.get(f"{G}/status?prefer=me")).status_code == 422


async def test_work_that_takes_long_names_its_resource(http: httpx.AsyncClient) -> None:
    plan = await http.post(f"{G}/plans", json=WHY)
    assert plan.headers["location"] == f"{G}/plans/p2"
    assert plan.headers["etag"] == '"3"'
    run = await http.post(f"{G}/plans/p2/execute", json=WHY, headers={"If-Match": plan.headers["etag"]})
    assert (run.status_code, run.headers["location"]) == (202, f"{G}/migrations/m1")
    assert (await http.get(run.headers["location"])).json()["plan"] == "p2"
    stop = await http.post(f"{G}/migrations/m1/abort", json=WHY)
    assert (stop.status_code, stop.headers["location"]) == (202, f"{G}/migrations/m1")


async def test_no_plan_is_an_answer_with_its_sentence(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.no_plan = "the gain is smaller than the cost"
    answer = await http.post(f"{G}/plans", json=WHY)
    assert answer.status_code == 200
    assert answer.json() == {"plan": None, "sentence": "the gain is smaller than the cost"}


async def test_reports_reach_the_leader_only(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    answer = await http.post(f"{G}/reports", json={"report": {"node": "n0"}})
    assert answer.json()["accepted"] == 1
    assert desk.changes == [("ingest", {"report": {"node": "n0"}})]
    desk.leads, desk.leader = False, LEADER_URL
    answer = await http.post(f"{G}/reports", json={"report": {}})
    assert (answer.status_code, answer.headers["retry-after"]) == (409, "1")
    assert answer.json()["leader"] == LEADER_URL
    desk.leader = None
    answer = await http.post(f"{G}/reports", json={"report": {}})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


async def test_a_repeated_key_has_one_effect(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    headers = {"Idempotency-Key": "k1"}
    first, second = [await http.post(f"{G}/plans", json=WHY, headers=headers) for _ in range(2)]
    assert len(desk.changes) == 1
    assert second.json() == first.json()
    assert (second.status_code, second.headers["location"]) == (201, first.headers["location"])
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    await asyncio.gather(*(http.post(f"{G}/plans", json=WHY, headers={"Idempotency-Key": "k2"}) for _ in range(3)))
    assert len(desk.changes) == 2
    await http.post(f"{G}/plans", json=WHY, headers={"Idempotency-Key": "k3"})
    assert len(desk.changes) == 3


async def test_a_failed_change_may_be_tried_again_with_its_key(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.down = True
    headers = {"Idempotency-Key": "k1"}
    assert (await http.post(f"{G}/plans", json=WHY, headers=headers)).status_code == 503
    desk.down = False
    assert (await http.post(f"{G}/plans", json=WHY, headers=headers)).status_code == 201


async def test_only_so_many_answers_are_kept(controller: SmallController) -> None:
    app = create_app(controller, Auth())
    app.state.answers._most = 2
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for key in ("a", "b", "c", "a"):
            await http.post(f"{G}/pause", json=WHY, headers={"Idempotency-Key": key})
    assert len(controller.small.changes) == 4
    assert len(app.state.answers._known) == 2


async def test_large_answers_are_not_all_kept(controller: SmallController) -> None:
    app = create_app(controller, Auth())
    app.state.answers = Answers(most_bytes=1500)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as http:
        sizes = [
            len((await http.post(f"{G}/plans", json=WHY, headers={"Idempotency-Key": k})).content) for k in "abcde"
        ]
    assert sum(sizes) > 1500
    assert 1 <= len(app.state.answers._known) < 5
    assert app.state.answers._bytes <= 1500


async def test_metrics_join_the_controllers_and_the_apis(http: httpx.AsyncClient) -> None:
    await http.get(f"{G}/plans/p1")
    await http.get("/nowhere/at/all")
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "eplane_epoch 3.0" in answer.text
    counted = 'eplane_api_requests_total{method="GET",route="/v1/groups/{group}/plans/{plan_id}",status="200"} 1.0'
    assert counted in answer.text
    assert 'route="none",status="404"' in answer.text
    assert "nowhere" not in answer.text


async def test_the_schema_is_sane(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    operations = [(p, m, o) for p, item in schema["paths"].items() for m, o in item.items()]
    names = [o["operationId"] for _, _, o in operations]
    assert len(set(names)) == len(names)
    assert {p for p, _, _ in operations} >= {
        p.partition("?")[0].replace("/g/", "/{group}/") for p in READS if "p1" not in p
    }
    for path, method, operation in operations:
        assert operation["summary"], path
        assert "default" in operation["responses"]
        if method != "get" and "reports" not in path:
            assert "requestBody" in operation
    for name, model in schema["components"]["schemas"].items():
        if name.endswith(("Change", "Request", "Patch")):
            assert model["additionalProperties"] is False
            assert "reason" in model["required"]
    json.dumps(schema, allow_nan=False)


async def test_the_page_is_served_and_its_links_resolve(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    links = [part.split('"')[0] for word in ('src="', 'href="') for part in page.text.split(word)[1:]]
    assert len(links) >= 3
    for link in links:
        assert link.startswith("/"), f"{link} is not an asset of this API"
        assert (await http.get(link)).status_code == 200
    for file in WEB.iterdir():
        assert "http://" not in file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in file.read_text()
    assert (await http.get("/favicon.ico")).headers["content-type"].startswith("image/svg")
