"""The client: finds the leader, sends a change once, waits through an election, keeps its token to itself."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.client import Client, ClientSettings, path_of, urls_of
from eplane.errors import ApiProblem, BadInput
from tests.api.desk import SmallController
from tests.api.serving import served

WHY = {"reason": "because"}
PAUSE = "/v1/groups/g/pause"


@pytest.fixture
def leader() -> Iterator[tuple[SmallController, str]]:
    controller = SmallController()
    with served(controller) as url:
        yield controller, url


def _client(*urls: str, patience_s: float = 0.0) -> Client:
    return Client(ClientSettings(urls, patience_s=patience_s))


def test_a_change_follows_to_the_leader(leader: tuple[SmallController, str]) -> None:
    controller, url = leader
    follower = SmallController()
    follower.small.leads, follower.small.leader = False, url
    with served(follower) as other, _client(other) as client:
        assert client.change("POST", PAUSE, {**WHY, "actor": "me"}) == {"paused": True}
        assert client.get("/v1/groups/g/history", limit=1)[0]["epoch"] == 3
    assert controller.small.changes == [("pause", "me", "because")]
    assert follower.small.changes == []


def test_another_address_is_tried_when_one_is_dead(leader: tuple[SmallController, str]) -> None:
    with _client(_dead(), leader[1], patience_s=10.0) as client:
        assert client.get("/health") == {"ok": True}
        assert client.change("POST", PAUSE, WHY) == {"paused": True}


def test_the_leader_is_asked_for_what_it_alone_knows(leader: tuple[SmallController, str]) -> None:
    follower = SmallController()
    follower.small.leads, follower.small.leader, follower.small.epoch = False, leader[1], 9
    with served(follower) as other, _client(other, patience_s=0.0) as client:
        status = "/v1/groups/g/status"
        assert client.get(status, from_leader=True)["epoch"] == 3
        assert client.get(status)["epoch"] == 9
        follower.small.leader = _dead()
        assert client.get(status, from_leader=True)["epoch"] == 9
        follower.small.leader = None
        assert client.get(status, from_leader=True)["epoch"] == 9
        with pytest.raises(ApiProblem, match="there is no layer"):
            client.get("/v1/groups/g/explain", from_leader=True, layer=5, expert=0)


def _dead() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    url = _dead()
    with _client(url) as client, pytest.raises(ApiProblem, match=f"no controller answers at {url}") as caught:
        client.get("/health")
    assert (caught.value.code, caught.value.exit_code) == ("unavailable", 5)


def test_an_election_is_waited_for() -> None:
    """503 not_leader, then a lost reply, then success: one change, one key."""
    keys: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        keys.append(request.headers["idempotency-key"])
        assert json.loads(request.content) == WHY
        if len(keys) == 1:
            return httpx.Response(503, json={"code": "not_leader", "detail": "nobody leads"})
        if len(keys) == 2:
            raise httpx.ReadError("connection lost")
        return httpx.Response(200, json={"paused": True})

    settings = ClientSettings(("http://127.0.0.1:1",), patience_s=30.0)
    with Client(settings, httpx.MockTransport(answer)) as client:
        assert client.change("POST", PAUSE, WHY) == {"paused": True}
    assert len(keys) == 3
    assert len(set(keys)) == 1


def test_a_controller_that_stands_still_costs_a_reader_its_part_of_the_patience_and_no_more() -> None:
    """A change may take longer: a plan is computed before it is answered."""
    allowed: dict[str, float] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        allowed[request.method] = request.extensions["timeout"]["read"]
        return httpx.Response(200, json={"paused": True})

    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    for given, patience_s, reads in ((urls[:1], 10.0, 10.0), (urls, 10.0, 5.0), (urls, 0.0, 2.0), (urls, 900.0, 60.0)):
        with Client(ClientSettings(given, patience_s=patience_s), httpx.MockTransport(answer)) as client:
            client.get("/health")
            client.change("POST", PAUSE, WHY)
        assert allowed == {"GET": reads, "POST": 60.0}


def test_a_refusal_is_not_tried_again() -> None:
    tries: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        tries.append(request.url.path)
        return httpx.Response(409, json={"code": "conflict", "detail": "plan p1 is stale"})

    with (
        Client(ClientSettings(("http://127.0.0.1:1",), patience_s=30.0), httpx.MockTransport(answer)) as client,
        pytest.raises(ApiProblem, match="plan p1 is stale") as caught,
    ):
        client.change("POST", PAUSE, WHY, if_match=3)
    assert caught.value.exit_code == 4
    assert len(tries) == 1


def test_something_else_answers() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/" else 404, text="<html>hello</html>")

    transport = httpx.MockTransport(answer)
    with Client(ClientSettings(("http://127.0.0.1:1",)), transport) as client:
        with pytest.raises(ApiProblem, match="is no EPlane controller") as caught:
            client.get("/v1/groups")
        assert caught.value.exit_code == 5
        with pytest.raises(ApiProblem, match="is no EPlane controller"):
            client.get("/")


@pytest.mark.parametrize(
    ("came_from", "location", "followed"),
    [
        ("https://a.example", "https://b.example/v1/x", True),
        ("https://a.example", "http://127.0.0.1:1/v1/x", False),
        ("https://a.example", "http://b.example/v1/x", False),
        ("http://127.0.0.1:1", "http://127.0.0.1:2/v1/x", True),
        ("http://127.0.0.1:1", "http://b.example/v1/x", False),
        ("http://127.0.0.1:1", "file:///etc/passwd", False),
        ("http://127.0.0.1:1", "", False),
    ],
)
def test_a_token_goes_only_where_the_line_is_private(
    tmp_path: Path, came_from: str, location: str, followed: bool
) -> None:
    token = tmp_path / "token"
    token.write_text("0123456789abcdef")
    seen: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.host, request.headers["authorization"]))
        if len(seen) == 1:
            return httpx.Response(307, headers={"Location": location})
        return httpx.Response(200, json={})

    settings = ClientSettings((came_from,), token_file=token, patience_s=0.0)
    with Client(settings, httpx.MockTransport(answer)) as client:
        if followed:
            client.change("POST", PAUSE, WHY)
        else:
            with pytest.raises(ApiProblem, match="not followed"):
                client.change("POST", PAUSE, WHY)
    assert len(seen) == (2 if followed else 1)
    assert {header for _, header in seen} == {"Bearer 0123456789abcdef"}


def test_settings_are_checked(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no controller address"):
        ClientSettings(())
    for wrong in ("localhost:7070", "ftp://h", "http://", "http://[::1", "http://h:99999", "http://h:0", "http://h:x"):
        with pytest.raises(BadInput, match="no controller address"):
            ClientSettings((wrong,))
    with pytest.raises(BadInput, match="use https"):
        ClientSettings(("http://example.org",), token_file=tmp_path / "t")
    with pytest.raises(BadInput, match="CA file"):
        Client(ClientSettings(ca_file=tmp_path / "none.pem"))


def test_what_a_user_typed_is_one_path_segment() -> None:
    assert path_of("v1", "plans", "../x?y#z") == "/v1/plans/..%2Fx%3Fy%23z"
    assert urls_of("http://a, http://b,") == ("http://a", "http://b")
