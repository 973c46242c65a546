"""The guard in front of every route: host names, size of bodies, headers that protect the page, failures as problems."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException

from api.auth import Auth, is_loopback
from api.problems import MEDIA_TYPE, Code, Problem

log = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BODY_BYTES = 16 << 20
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"),
)


class Guard:
    """ASGI middleware. Without tokens only loopback host names are answered: a page of another site that points its
    own name at 127.0.0.1 (DNS rebinding) must not reach the API through a browser on this machine."""

    def __init__(
        self, app: App, auth: Auth, registry: CollectorRegistry, most_body_bytes: int = MOST_BODY_BYTES
    ) -> None:
        self._app = app
        self._auth = auth
        self._most = most_body_bytes
        self._requests = Counter(
            "eplane_api_requests", "Requests answered", ["method", "route", "status"], registry=registry
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def send_on(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *_extra_headers(scope)]
                self._count(scope, int(message["status"]))
            await send(message)

        try:
            self._check(scope)
            await self._app(scope, self._limited(receive), send_on)
        except Problem as problem:
            if started:
                raise
            await _answer(problem, scope, send_on)
        except Exception:
            incident = secrets.token_hex(4)
            log.exception("incident %s: %s %s failed", incident, scope["method"], scope["path"])
            if started:
                raise
            detail = f"the controller failed on this request; its log names the incident {incident}"
            await _answer(Problem(Code.INTERNAL, detail), scope, send_on)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise Problem(Code.BAD_REQUEST, "Content-Length is not a number")
        if int(length) > self._most:
            raise self._too_large()
        host = headers.get(b"host", b"").decode("latin-1")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self._auth.is_open and not is_loopback(name):
            raise Problem(Code.MISDIRECTED, f"this API answers on loopback names only, not as {host!r}")

    def _limited(self, receive: Receive) -> Receive:
        taken = 0

        async def receive_on() -> MutableMapping[str, Any]:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most:
                # The one kind of error that the framework lets through from the reading of a body.
                raise HTTPException(413, str(self._too_large()))
            return message

        return receive_on

    def _too_large(self) -> Problem:
        return Problem(Code.TOO_LARGE, f"the body is larger than {self._most >> 20} MiB")

    def _count(self, scope: Scope, status: int) -> None:
        """Bounded labels: the route's template, never the path that was asked for."""
        route = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"} else "other"
        self._requests.labels(method, route, str(status)).inc()


def _extra_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    fresh = [(b"cache-control", b"no-store")] if scope["path"].startswith(("/v1", "/health", "/metrics")) else []
    return [*_HEADERS, *fresh]


async def _answer(problem: Problem, scope: Scope, send: Send) -> None:
    body = json.dumps(problem.body(scope["path"])).encode()
    headers = [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", str(len(body)).encode())]
    headers += [(k.lower().encode(), v.encode()) for k, v in problem.headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
