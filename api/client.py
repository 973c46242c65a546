"""Client of the REST API: finds the leader, retries what may be retried, turns problems into errors with exit codes.

A GET may be answered by any controller, so the next address is tried at once. A change carries an idempotency key, so
it is safe to send it again after a lost reply; it follows 307 to the leader, and waits through an election.
"""

from __future__ import annotations

import secrets
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit

import httpx

from api.auth import is_loopback, read_own_token
from api.problems import EXIT_UNAVAILABLE, EXIT_USAGE, KINDS, Code
from eplane.errors import ApiProblem, BadInput

DEFAULT_URL = "http://127.0.0.1:7070"
PAUSE_S = 0.25
CONNECT_S = 3.0
# The least time that an answer is given, however little patience there is.
LEAST_CALL_S = 2.0
_EXIT_CODES = {code.value: kind.exit_code for code, kind in KINDS.items()}
_COME_AGAIN = {Code.NOT_LEADER.value, Code.UNAVAILABLE.value}


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Where the controllers are and how to speak to them. `patience_s`: how long to try before giving up.

    call_s: most seconds that a change may take to be answered (a plan is computed meanwhile). What only reads is given up
    at an address after its part of the patience, so that a controller that stands still costs no more than that.
    """

    urls: tuple[str, ...] = (DEFAULT_URL,)
    token_file: Path | None = None
    ca_file: Path | None = None
    patience_s: float = 10.0
    call_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.urls:
            raise BadInput("no controller address: give --url or set EPLANE_URL")
        for url in self.urls:
            parts = _parts(url)
            if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
                raise BadInput(f"{url!r} is no controller address; give one like {DEFAULT_URL}")
            if self.token_file and parts.scheme == "http" and not is_loopback(parts.hostname):
                raise BadInput(f"a token is not sent to {url}: the line is not private, use https")


class Client:
    """One session with the controllers. Not thread-safe. Raises ApiProblem; nothing of httpx leaves it."""

    def __init__(self, settings: ClientSettings, transport: httpx.BaseTransport | None = None) -> None:
        self._settings = settings
        self._token = read_own_token(settings.token_file) if settings.token_file else None
        self._at = 0
        self._http = httpx.Client(
            timeout=httpx.Timeout(settings.call_s, connect=CONNECT_S),
            verify=_trust(settings),
            transport=transport,
            trust_env=False,
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def get(self, path: str, *, from_leader: bool = False, **query: Any) -> Any:
        """`from_leader`: what only the leader knows; while nobody leads, any controller's answer will do."""
        params = {key: value for key, value in query.items() if value is not None}
        if from_leader:
            try:
                return _read(self._once("GET", path, params={**params, "prefer": "leader"}))
            except ApiProblem as problem:
                if problem.code not in _COME_AGAIN:
                    raise
        return _read(self._send("GET", path, params=params))

    def fetch(self, path: str, **query: Any) -> bytes:
        """What only the leader knows, as bytes; empty where it has nothing (204)."""
        params = {key: value for key, value in query.items() if value is not None}
        return self._send("GET", path, params={**params, "prefer": "leader"}).content

    def change(
        self, method: str, path: str, body: Mapping[str, Any], *, if_match: int | None = None, key: str | None = None
    ) -> Any:
        """Send a change to the leader. `body` holds at least the reason."""
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}
        if if_match is not None:
            headers["If-Match"] = f'"{if_match}"'
        return _read(self._send(method, path, json=dict(body), headers=headers))

    # ---------------------------------------------------------------- one call, until it is answered

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        limit = time.monotonic() + self._settings.patience_s
        while True:
            try:
                return self._once(method, path, **options)
            except ApiProblem as problem:
                if problem.code not in _COME_AGAIN or time.monotonic() >= limit:
                    raise
                self._at += 1
                if self._at % len(self._settings.urls) == 0:
                    time.sleep(PAUSE_S)

    def _once(self, method: str, path: str, **options: Any) -> httpx.Response:
        """One try at one address, following at most three redirects to the leader."""
        url = self._settings.urls[self._at % len(self._settings.urls)].rstrip("/") + path
        for _ in range(4):
            response = self._call(method, url, **options)
            if response.status_code != 307:
                break
            url = self._checked(response.headers.get("location", ""), url)
            options.pop("params", None)
        if response.is_success:
            return response
        raise _problem(response)

    def _call(self, method: str, url: str, **options: Any) -> httpx.Response:
        headers = dict(options.pop("headers", {}))
        if method == "GET":
            options["timeout"] = httpx.Timeout(self._read_s, connect=CONNECT_S)
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            return self._http.request(method, url, headers=headers, **options)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            address = "{0.scheme}://{0.netloc}".format(urlsplit(url))
            what = str(error) or type(error).__name__
            sentence = f"no controller answers at {address}: {what}"
            raise ApiProblem(Code.UNAVAILABLE.value, sentence, 0, EXIT_UNAVAILABLE) from None

    @property
    def _read_s(self) -> float:
        """Seconds that one address may take to answer what only reads."""
        part = self._settings.patience_s / len(self._settings.urls)
        return min(self._settings.call_s, max(LEAST_CALL_S, part))

    def _checked(self, location: str, came_from: str) -> str:
        """A token goes to the leader only over a line as private as the one that named the leader."""
        parts, before = urlsplit(location), urlsplit(came_from)
        private = parts.scheme == "https" or is_loopback(parts.hostname or "")
        if parts.scheme not in ("http", "https") or (self._token and not private) or parts.scheme < before.scheme:
            sentence = f"a controller sent us on to {location!r}, which is not followed: the line is not private"
            raise ApiProblem(Code.BAD_REQUEST.value, sentence, 307, EXIT_UNAVAILABLE)
        return location


def _parts(url: str) -> SplitResult | None:
    """None for what no URL can be: a bracket left open, a port beyond 65535."""
    try:
        parts = urlsplit(url)
        return parts if parts.port is None or parts.port else None
    except ValueError:
        return None


def _trust(settings: ClientSettings) -> ssl.SSLContext:
    """Whom to believe. Plain addresses need nobody, and reading the system's authorities costs time."""
    if settings.ca_file is None and not any(url.startswith("https:") for url in settings.urls):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:
        raise BadInput(f"the CA file {settings.ca_file} can not be used: {error}") from None


def _read(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise _stranger(response) from None


def _stranger(response: httpx.Response) -> ApiProblem:
    sentence = f"{response.url.host}:{response.url.port} answered {response.status_code} and is no EPlane controller"
    return ApiProblem(Code.BAD_REQUEST.value, sentence, response.status_code, EXIT_UNAVAILABLE)


def _problem(response: httpx.Response) -> ApiProblem:
    try:
        body = response.json()
        code, detail = str(body["code"]), str(body["detail"])
    except (ValueError, KeyError, TypeError):
        return _stranger(response)
    return ApiProblem(code, detail, response.status_code, _EXIT_CODES.get(code, EXIT_USAGE))


def urls_of(text: str) -> tuple[str, ...]:
    """`URL[,URL]` as addresses."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def path_of(*parts: object) -> str:
    """A path of these segments, each made safe: what a user typed never becomes another path."""
    return "/" + "/".join(quote(str(part), safe="") for part in parts)
