"""Who may do what: the whole matrix of roles and routes, tokens, and where the API refuses to listen."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from api.app import create_app
from api.auth import Auth, AuthSettings, Right, Role, check_bind, is_loopback, read_own_token, read_tokens
from api.routes.simulations import Simulation
from eplane.errors import BadInput, BindRefused
from tests.api.desk import SmallController

G = "/v1/groups/g"
WHY = {"reason": "because", "actor": "somebody-else"}
TOKENS = {role: f"{role.value}-0123456789abcdef" for role in Role}

ROUTES: dict[tuple[str, str], Right] = {
    ("GET", "/v1/groups"): Right.READ,
    ("GET", f"{G}/status"): Right.READ,
    ("GET", f"{G}/load"): Right.READ,
    ("GET", f"{G}/windows"): Right.READ,
    ("GET", f"{G}/recording"): Right.READ,
    ("GET", f"{G}/placement"): Right.READ,
    ("GET", f"{G}/nodes"): Right.READ,
    ("GET", f"{G}/goals"): Right.READ,
    ("GET", f"{G}/anomalies"): Right.READ,
    ("GET", f"{G}/history"): Right.READ,
    ("GET", f"{G}/explain?layer=0&expert=0"): Right.READ,
    ("GET", f"{G}/plans"): Right.READ,
    ("GET", f"{G}/plans/p1"): Right.READ,
    ("GET", f"{G}/migrations"): Right.READ,
    ("GET", f"{G}/migrations/m1"): Right.READ,
    ("GET", f"{G}/simulations"): Right.READ,
    ("GET", f"{G}/simulations/s1"): Right.READ,
    ("GET", f"{G}/mode"): Right.READ,
    ("GET", f"{G}/config"): Right.READ,
    ("GET", "/v1/config"): Right.READ,
    ("GET", "/v1/leader"): Right.READ,
    ("GET", "/metrics"): Right.READ,
    ("POST", f"{G}/plans"): Right.OPERATE,
    ("POST", f"{G}/plans/p1/execute"): Right.OPERATE,
    ("POST", f"{G}/plans/p1/discard"): Right.OPERATE,
    ("POST", f"{G}/migrations/m1/abort"): Right.OPERATE,
    ("POST", f"{G}/rollback"): Right.OPERATE,
    ("POST", f"{G}/simulations"): Right.OPERATE,
    ("POST", f"{G}/pause"): Right.OPERATE,
    ("POST", f"{G}/resume"): Right.OPERATE,
    ("PUT", f"{G}/mode"): Right.ADMINISTER,
    ("PATCH", f"{G}/config"): Right.ADMINISTER,
    ("POST", f"{G}/reports"): Right.REPORT,
}
OPEN_ROUTES = {"/health", "/", "/web/page.js", "/web/page.css", "/web/icon.svg", "/favicon.ico"}

# Written out and not taken from the code: who is let in where.
ALLOWED: dict[Role, set[Right]] = {
    Role.VIEWER: {Right.READ},
    Role.AGENT: {Right.REPORT},
    Role.OPERATOR: {Right.READ, Right.REPORT, Right.OPERATE},
    Role.ADMIN: {Right.READ, Right.REPORT, Right.OPERATE, Right.ADMINISTER},
}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    lines = ["# who may do what"] + [f"{role.value} {role.value}-name {secret}" for role, secret in TOKENS.items()]
    path.write_text("\n".join(lines) + "\n")
    path.chmod(0o600)
    return path


@pytest.fixture
async def guarded(controller: SmallController, token_file: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(controller, Auth(AuthSettings(token_file=token_file)))
    app.state.simulations.keep(Simulation("g", {}, id="s1"))
    controller.small.recorded = 4
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://control.example") as client:
        yield client


def _body(path: str) -> dict[str, object]:
    more: dict[str, dict[str, object]] = {"mode": {"mode": "auto"}, "rollback": {"to_epoch": 1}}
    more["config"] = {"settings": {"policy": "eplb"}}
    return {**WHY, **more.get(path.rsplit("/", 1)[1], {})}


async def _send(client: httpx.AsyncClient, method: str, path: str, token: str | None) -> httpx.Response:
    headers = {"If-Match": "3"} | ({"Authorization": f"Bearer {token}"} if token else {})
    return await client.request(method, path, json=None if method == "GET" else _body(path), headers=headers)


@pytest.mark.parametrize("role", [None, *Role])
async def test_roles_and_routes(guarded: httpx.AsyncClient, controller: SmallController, role: Role | None) -> None:
    controller.small.migrations_by_id["m1"] = {"id": "m1", "state": "RUNNING", "ends": "DONE"}
    for (method, path), right in ROUTES.items():
        answer = await _send(guarded, method, path, TOKENS[role] if role else None)
        if role is None:
            assert answer.status_code == 401, path
            assert answer.json()["code"] == "unauthenticated"
            assert answer.headers["www-authenticate"].startswith("Bearer")
        elif right in ALLOWED[role]:
            assert answer.status_code in (200, 201, 202), (path, answer.text)
        else:
            assert answer.status_code == 403, path
            assert answer.json()["code"] == "forbidden"
            assert f"{role.value}-name" in answer.json()["detail"]
    if role is None or role is Role.VIEWER:
        assert controller.small.changes == []


def test_every_route_is_in_the_matrix_or_open(controller: SmallController) -> None:
    app = create_app(controller, Auth())
    known = {(m, p.partition("?")[0]) for m, p in ROUTES}
    routes = _routes(app.routes)
    assert len(routes) >= len(known)
    for route in routes:
        path = route.path.replace("{group}", "g").replace("{plan_id}", "p1").replace("{migration_id}", "m1")
        path = path.replace("{simulation_id}", "s1")
        for method in route.methods - {"HEAD"}:
            assert (method, path) in known or path in OPEN_ROUTES, f"{method} {path}: who may do this?"


def _routes(routes: object) -> list[APIRoute]:
    found: list[APIRoute] = []
    for route in routes:  # type: ignore[attr-defined]
        if isinstance(route, APIRoute):
            found.append(route)
        elif hasattr(route, "original_router"):
            found += _routes(route.original_router.routes)
    return found


async def test_health_and_page_need_no_token(guarded: httpx.AsyncClient) -> None:
    for path in OPEN_ROUTES:
        assert (await guarded.get(path)).status_code == 200


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong-0123456789abcdef", f"Basic {TOKENS[Role.ADMIN]}", TOKENS[Role.ADMIN]],
)
async def test_wrong_tokens(guarded: httpx.AsyncClient, header: str) -> None:
    answer = await guarded.get(f"{G}/status", headers={"Authorization": header})
    assert answer.status_code == 401


async def test_the_actor_is_the_tokens_name(guarded: httpx.AsyncClient, controller: SmallController) -> None:
    await _send(guarded, "POST", f"{G}/pause", TOKENS[Role.OPERATOR])
    assert controller.small.changes == [("pause", "operator-name", "because")]


async def test_one_callers_key_is_not_anothers(guarded: httpx.AsyncClient, controller: SmallController) -> None:
    for role in (Role.OPERATOR, Role.ADMIN):
        headers = {"Authorization": f"Bearer {TOKENS[role]}", "Idempotency-Key": "same"}
        assert (await guarded.post(f"{G}/pause", json=WHY, headers=headers)).status_code == 200
    assert len(controller.small.changes) == 2


async def test_a_token_can_be_taken_back(guarded: httpx.AsyncClient, token_file: Path) -> None:
    admin = TOKENS[Role.ADMIN]
    assert (await _send(guarded, "GET", f"{G}/status", admin)).status_code == 200
    token_file.write_text("viewer v other-0123456789abcdef\n")
    assert (await _send(guarded, "GET", f"{G}/status", admin)).status_code == 401
    assert (await _send(guarded, "GET", f"{G}/status", "other-0123456789abcdef")).status_code == 200
    token_file.chmod(0o644)
    answer = await _send(guarded, "GET", f"{G}/status", "other-0123456789abcdef")
    assert answer.status_code == 401
    assert "chmod 600" in answer.json()["detail"]
    token_file.unlink()
    assert (await _send(guarded, "GET", f"{G}/status", admin)).status_code == 401


async def test_every_token_is_compared_in_constant_time(
    guarded: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return real(a, b)

    monkeypatch.setattr("api.auth.hmac.compare_digest", watched)
    await _send(guarded, "GET", f"{G}/status", TOKENS[Role.VIEWER])
    assert len(compared) == len(Role)
    assert all(len(one) == 32 for one in compared)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no token"),
        ("# only a comment\n", "holds no token"),
        ("admin only-two\n", "line 1: expected 'ROLE NAME TOKEN', got 2 words"),
        ("viewer v 0123456789abcdef\nroot r 0123456789abcdef\n", "line 2: the role is 'root', known are viewer"),
        ("admin a/b 0123456789abcdef\n", "the name 'a/b'"),
        ("admin a short\n", "shorter than 16"),
        ("admin a sha256:12\n", "64 hexadecimal digits"),
    ],
)
def test_token_files_that_can_not_be_used(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(BadInput, match=says):
        read_tokens(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o601])
def test_a_token_file_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "tokens"
    path.write_text("admin a 0123456789abcdef\n")
    path.chmod(mode)
    with pytest.raises(BadInput, match="chmod 600"):
        Auth(AuthSettings(token_file=path))


def test_a_token_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_text("admin a 0123456789abcdef\n")
    path.chmod(0o600)
    os.chown(path, 4321, -1) if os.geteuid() == 0 else monkeypatch.setattr("api.auth.os.geteuid", lambda: 4321)
    with pytest.raises(BadInput, match="another user"):
        read_tokens(path)


async def test_a_digest_may_stand_for_a_token(tmp_path: Path, controller: SmallController) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"viewer v sha256:{hashlib.sha256(b'my secret').hexdigest()}\n")
    path.chmod(0o600)
    caller = Auth(AuthSettings(token_file=path)).caller("Bearer my secret")
    assert (caller.name, caller.role) == ("v", Role.VIEWER)
    with pytest.raises(BadInput, match="no token to send"):
        read_own_token(path)


def test_a_missing_token_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="can not be read"):
        Auth(AuthSettings(token_file=tmp_path / "none"))


def test_clients_send_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("# mine\nadmin me 0123456789abcdef\n")
    assert read_own_token(path) == "0123456789abcdef"
    path.write_text("0123456789abcdef")
    assert read_own_token(path) == "0123456789abcdef"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_loopback_is_open(host: str) -> None:
    assert is_loopback(host)
    check_bind(host, AuthSettings())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org", "localhost.example.org", ""])
def test_beyond_loopback_needs_tls_and_tokens(tmp_path: Path, host: str) -> None:
    cert, key, tokens = (tmp_path / name for name in ("cert", "key", "tokens"))
    for path in (cert, key, tokens):
        path.write_text("x")
        path.chmod(0o600)
    assert not is_loopback(host)
    with pytest.raises(BindRefused, match=r"TLS .* and tokens .* are missing"):
        check_bind(host, AuthSettings())
    with pytest.raises(BindRefused, match=r"and tokens \(--token-file\) is missing"):
        check_bind(host, AuthSettings(cert, key))
    with pytest.raises(BindRefused, match=r"and TLS .* is missing"):
        check_bind(host, AuthSettings(token_file=tokens))
    check_bind(host, AuthSettings(cert, key, tokens))
    with pytest.raises(BindRefused, match="belong together"):
        check_bind(host, AuthSettings(tls_cert=cert, token_file=tokens))
    key.chmod(0o644)
    with pytest.raises(BindRefused, match="chmod 600"):
        check_bind(host, AuthSettings(cert, key, tokens))
    key.unlink()
    with pytest.raises(BindRefused, match="is not there"):
        check_bind(host, AuthSettings(cert, key, tokens))


def test_the_documentation_has_every_route() -> None:
    text = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()
    for _, path in ROUTES:
        named = (
            path.partition("?")[0].replace("/groups/g", "/groups/{g}").replace("/p1", "/{id}").replace("/m1", "/{id}")
        ).replace("/s1", "/{id}")
        assert named in text or named.removeprefix("/v1/groups/{g}") in text, path
