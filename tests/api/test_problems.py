"""Every code of the closed set: when it comes, its status, its shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from api.app import create_app
from api.auth import Auth
from api.guard import MOST_BODY_BYTES, Guard
from api.problems import KINDS, MEDIA_TYPE, Code, problem_of
from eplane.errors import (
    BadInput,
    Conflict,
    EPlaneError,
    IllegalTransition,
    Infeasible,
    Invalid,
    NameRefused,
    NotFound,
    NotLeader,
    PlanImpossible,
    ProblemError,
    RefusedByGoal,
    SettingsError,
    StoreUnavailable,
    TopologyError,
)
from tests.api.desk import SmallController, SmallDesk

G = "/v1/groups/g"
WHY = {"reason": "because"}


def check(answer: httpx.Response, code: Code, status: int | None = None) -> dict[str, Any]:
    body: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == MEDIA_TYPE
    assert body["code"] == code.value, body
    assert answer.status_code == body["status"] == (status or KINDS[code].status)
    assert body["type"] == f"urn:eplane:problem:{code.value}"
    assert body["title"] == KINDS[code].title
    assert body["detail"]
    assert body["instance"].startswith("/")
    return body


async def test_bad_request(http: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    check(await http.post(f"{G}/plans", content=b"{no", headers=headers), Code.BAD_REQUEST)


async def test_busy(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.recorded = 4
    await http.post(f"{G}/simulations", json=WHY)
    body = check(await http.post(f"{G}/simulations", json=WHY), Code.BUSY)
    assert body["retry_after_s"] == 1


async def test_not_found(http: httpx.AsyncClient) -> None:
    check(await http.get("/v1/nothing"), Code.NOT_FOUND)
    assert "known are: g" in check(await http.get("/v1/groups/other/status"), Code.NOT_FOUND)["detail"]
    check(await http.get(f"{G}/plans/p9"), Code.NOT_FOUND)
    check(await http.get(f"{G}/placement?epoch=99"), Code.NOT_FOUND)
    check(await http.get(f"{G}/explain?layer=7&expert=0"), Code.NOT_FOUND)


async def test_method_not_allowed(http: httpx.AsyncClient) -> None:
    answer = await http.delete(f"{G}/plans/p1")
    check(answer, Code.METHOD_NOT_ALLOWED)
    assert answer.headers["allow"] == "GET"


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("POST", f"{G}/plans", {}, "reason"),
        ("POST", f"{G}/plans", {"reason": "   "}, "reason"),
        ("POST", f"{G}/plans", {"reason": "x" * 501}, "reason"),
        ("POST", f"{G}/plans", {**WHY, "actor": "a\nb"}, "actor"),
        ("POST", f"{G}/plans", {**WHY, "polcy": "eplb"}, "polcy"),
        ("POST", f"{G}/plans", {**WHY, "policy": "best"}, "policy"),
        ("POST", f"{G}/rollback", {**WHY, "to_epoch": -1}, "to_epoch"),
        ("POST", f"{G}/rollback", {**WHY, "to_epoch": "one"}, "to_epoch"),
        ("PUT", f"{G}/mode", {**WHY, "mode": "full"}, "mode"),
        ("PATCH", f"{G}/config", {**WHY, "settings": {}}, "settings"),
        ("PATCH", f"{G}/config", {**WHY, "settings": {"speed": 1}}, "speed"),
        ("GET", f"{G}/history?limit=0", None, "limit"),
        ("GET", f"{G}/explain?layer=0", None, "expert"),
        ("GET", f"{G}/placement?epoch=x", None, "epoch"),
        ("GET", f"{G}/plans/..%00", None, "plan_id"),
        ("GET", "/v1/groups/-g/status", None, "group"),
    ],
)
async def test_invalid_names_the_field(
    http: httpx.AsyncClient, desk: SmallDesk, method: str, path: str, body: Any, field: str
) -> None:
    problem = check(await http.request(method, path, json=body), Code.INVALID)
    assert problem["field"] == field
    assert problem["detail"].startswith(f"{field}: ")
    assert desk.changes in ([], [("set_settings", {"speed": 1}, "local", "because")])


async def test_conflict(http: httpx.AsyncClient) -> None:
    check(await http.post(f"{G}/rollback", json={**WHY, "to_epoch": 3}), Code.CONFLICT)


async def test_the_epoch_must_be_named_and_current(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    path = f"{G}/plans/p1/execute"
    check(await http.post(path, json=WHY), Code.PRECONDITION_REQUIRED)
    for wrong in ("*", "x", '"1.5"', "9" * 30):
        assert check(await http.post(path, json=WHY, headers={"If-Match": wrong}), Code.INVALID)["field"] == "If-Match"
    stale = check(await http.post(path, json=WHY, headers={"If-Match": '"2"'}), Code.STALE_EPOCH)
    assert stale["epoch"] == 3
    assert desk.changes == []
    desk.epoch = 4
    check(await http.post(path, json=WHY, headers={"If-Match": '"3"'}), Code.STALE_EPOCH)
    check(await http.post(path, json=WHY, headers={"If-Match": '"4"'}), Code.CONFLICT)


async def test_refused_by_goal(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.refuses = "goal capacity says NO: rank 1 has no free cell"
    assert check(await http.post(f"{G}/plans", json=WHY), Code.REFUSED_BY_GOAL)["detail"] == desk.refuses


async def test_unavailable(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.down = True
    answer = await http.post(f"{G}/pause", json=WHY)
    assert check(answer, Code.UNAVAILABLE)["retry_after_s"] == 1
    assert answer.headers["retry-after"] == "1"


async def test_not_leader(http: httpx.AsyncClient, desk: SmallDesk) -> None:
    desk.leads, desk.leader = False, "http://127.0.0.1:7071"
    check(await http.post(f"{G}/pause", json=WHY), Code.NOT_LEADER, 307)
    desk.leader = None
    check(await http.post(f"{G}/pause", json=WHY), Code.NOT_LEADER)


async def test_a_defect_is_a_problem_without_its_inside(
    http: httpx.AsyncClient, desk: SmallDesk, caplog: pytest.LogCaptureFixture
) -> None:
    desk.breaks = True
    problem = check(await http.post(f"{G}/pause", json=WHY), Code.INTERNAL)
    assert "defect" not in problem["detail"]
    incident = problem["detail"].rsplit(" ", 1)[1]
    assert any(incident in record.getMessage() for record in caplog.records)


async def test_key_reused(http: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    await http.post(f"{G}/pause", json=WHY, headers=headers)
    check(await http.post(f"{G}/resume", json=WHY, headers=headers), Code.KEY_REUSED)
    check(await http.post(f"{G}/pause", json={"reason": "other"}, headers=headers), Code.KEY_REUSED)


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_unsupported_media(http: httpx.AsyncClient, desk: SmallDesk, media: str | None) -> None:
    """What a foreign page can send without the browser asking first is never a change."""
    headers = {} if media is None else {"Content-Type": media}
    answer = await http.post(f"{G}/pause", content=b'{"reason": "x"}', headers=headers)
    check(answer, Code.UNSUPPORTED_MEDIA)
    assert desk.changes == []


async def test_too_large(controller: SmallController) -> None:
    async with _client(controller, 1000) as http:
        check(await http.post(f"{G}/pause", json={"reason": "x" * 2000}), Code.TOO_LARGE)

        async def pieces() -> Any:
            for _ in range(4):
                yield b" " * 400

        headers = {"Content-Type": "application/json"}
        check(await http.post(f"{G}/pause", content=pieces(), headers=headers), Code.TOO_LARGE)
        check(await http.post(f"{G}/pause", content=b"", headers={"Content-Length": "x"}), Code.BAD_REQUEST)
    assert MOST_BODY_BYTES == 16 << 20
    assert controller.small.changes == []


def _client(controller: SmallController, most: int) -> httpx.AsyncClient:
    app = create_app(controller, Auth())
    guarded = Guard(app, Auth(), CollectorRegistry(), most)
    return httpx.AsyncClient(transport=httpx.ASGITransport(guarded), base_url="http://localhost")


@pytest.mark.parametrize("host", ["evil.example", "evil.example:7070", "10.0.0.1", "", "localhost.evil.example"])
async def test_misdirected(http: httpx.AsyncClient, host: str) -> None:
    check(await http.get(f"{G}/status", headers={"Host": host}), Code.MISDIRECTED)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:7070", "[::1]:7070", "[::1]", "127.9.9.9:1"])
async def test_loopback_names_are_answered(http: httpx.AsyncClient, host: str) -> None:
    assert (await http.get(f"{G}/status", headers={"Host": host})).status_code == 200


ERRORS: list[tuple[EPlaneError, Code]] = [
    (NotFound("x"), Code.NOT_FOUND),
    (Conflict("x"), Code.CONFLICT),
    (RefusedByGoal("x"), Code.REFUSED_BY_GOAL),
    (Infeasible("capacity", "x"), Code.REFUSED_BY_GOAL),
    (Invalid("f", "x"), Code.INVALID),
    (BadInput("x"), Code.INVALID),
    (NotLeader(None), Code.NOT_LEADER),
    (SettingsError("f", "x"), Code.INVALID),
    (NameRefused("f", "x"), Code.INVALID),
    (ProblemError("f", "x"), Code.INVALID),
    (TopologyError("x"), Code.INVALID),
    (IllegalTransition("x"), Code.CONFLICT),
    (PlanImpossible("x"), Code.REFUSED_BY_GOAL),
    (StoreUnavailable("x"), Code.UNAVAILABLE),
    (EPlaneError("x"), Code.INTERNAL),
]


@pytest.mark.parametrize(("error", "code"), ERRORS, ids=lambda v: getattr(v, "value", type(v).__name__))
def test_errors_and_problems_agree_on_exit_codes(error: EPlaneError, code: Code) -> None:
    assert problem_of(error).code is code
    if type(error) not in (EPlaneError, StoreUnavailable):
        assert KINDS[code].exit_code == error.exit_code


def test_the_set_is_closed_and_each_code_is_tested() -> None:
    assert set(KINDS) == set(Code)
    assert {k.exit_code for k in KINDS.values()} == {2, 3, 4, 5}
    source = Path(__file__).read_text()
    elsewhere = {Code.UNAUTHENTICATED, Code.FORBIDDEN}
    assert all(f"Code.{code.name}" in source for code in Code if code not in elsewhere)


def test_the_way_to_the_leader_keeps_path_and_query() -> None:
    assert problem_of(NotLeader("http://h:1/"), "/v1/x?y=1").headers["Location"] == "http://h:1/v1/x?y=1"


def test_the_documentation_has_every_code() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()
    for code, kind in KINDS.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{code.value}` |")]
        assert str(kind.status) in row
        assert row.rstrip().endswith(f"| {kind.exit_code} |")
