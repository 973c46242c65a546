"""Who may do what: loopback without questions, or TLS and tokens with roles; nothing in between.

The token file holds one token a line, `ROLE NAME TOKEN` or `ROLE NAME sha256:HEX` (the digest of the token), `#` starts
a comment. It must belong to the user that runs the controller (or root) and be closed to everyone else (chmod 600).
It is read again when it changes, so a token can be taken back without a restart.

    role       may
    viewer     read
    agent      send load reports (what `python -m agent --token-file` needs), nothing else
    operator   read; propose, execute, discard, abort, roll back, pause, resume; send reports
    admin      all that, and change the mode and the settings
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import os
import re
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from api.problems import Code, Problem
from eplane.errors import BadInput, BindRefused

SHORTEST_TOKEN = 16


class Role(enum.Enum):
    VIEWER = "viewer"
    AGENT = "agent"
    OPERATOR = "operator"
    ADMIN = "admin"


class Right(enum.Enum):
    """What a route needs. Health alone needs nothing."""

    READ = "read"
    REPORT = "report"
    OPERATE = "operate"
    ADMINISTER = "administer"


RIGHTS: dict[Role, frozenset[Right]] = {
    Role.VIEWER: frozenset({Right.READ}),
    Role.AGENT: frozenset({Right.REPORT}),
    Role.OPERATOR: frozenset({Right.READ, Right.REPORT, Right.OPERATE}),
    Role.ADMIN: frozenset(Right),
}


@dataclass(frozen=True, slots=True)
class Caller:
    """Who a request comes from. `name` is None on an open loopback: the request may then name its actor itself."""

    name: str | None
    role: Role

    def check(self, right: Right) -> None:
        if right not in RIGHTS[self.role]:
            raise Problem(
                Code.FORBIDDEN,
                f"the token of {self.name} has the role {self.role.value}, which may not {right.value}",
            )


OPEN = Caller(None, Role.ADMIN)


@dataclass(frozen=True, slots=True)
class Token:
    """One line of the token file; only the digest of the secret is kept."""

    role: Role
    name: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class AuthSettings:
    """How the API is reached. All three files or none of the TLS pair; see `check_bind`."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    token_file: Path | None = None

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None and self.tls_key is not None


def is_loopback(host: str) -> bool:
    """Is `host` (a name or an address) this machine and nobody else? Names other than localhost are not trusted."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind(host: str, auth: AuthSettings) -> None:
    """Refuse to serve beyond this machine unless callers are known and the line is private."""
    if (auth.tls_cert is None) != (auth.tls_key is None):
        raise BindRefused("--tls-cert and --tls-key belong together: give both, or neither")
    for path in (auth.tls_cert, auth.tls_key):
        if path is not None and not path.is_file():
            raise BindRefused(f"the TLS file {path} is not there")
    if auth.tls_key is not None and stat.S_IMODE(auth.tls_key.stat().st_mode) & 0o077:
        raise BindRefused(f"the TLS key {auth.tls_key} can be read by others: chmod 600 {auth.tls_key}")
    if is_loopback(host):
        return
    missing = [] if auth.has_tls else ["TLS (--tls-cert and --tls-key)"]
    missing += [] if auth.token_file else ["tokens (--token-file)"]
    if missing:
        raise BindRefused(
            f"{host} can be reached from other machines, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing: give both, or listen on 127.0.0.1"
        )


class Auth:
    """Names the caller of a request. Without a token file every caller may do everything (loopback only)."""

    def __init__(self, settings: AuthSettings | None = None) -> None:
        self.settings = settings or AuthSettings()
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._tokens: tuple[Token, ...] = ()
        if self.settings.token_file is not None:
            self._refresh(self.settings.token_file)

    @property
    def is_open(self) -> bool:
        return self.settings.token_file is None

    def caller(self, authorization: str | None) -> Caller:
        """The caller behind an Authorization header. Raises a 401 problem when there is none that we know."""
        if self.settings.token_file is None:
            return OPEN
        try:
            self._refresh(self.settings.token_file)
        except BadInput as error:
            raise Problem(Code.UNAUTHENTICATED, f"no token is accepted now: {error}") from None
        scheme, _, secret = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise Problem(Code.UNAUTHENTICATED, "send a token: 'Authorization: Bearer TOKEN' (CLI: --token-file)")
        digest = hashlib.sha256(secret.strip().encode()).digest()
        found: Token | None = None
        # Every token is compared, in constant time each, so the time tells nothing of which one was near.
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        if found is None:
            raise Problem(Code.UNAUTHENTICATED, "the token is not known to this controller")
        return Caller(found.name, found.role)

    def _refresh(self, path: Path) -> None:
        """Read the file if it changed. A file that became bad keeps nobody in: deny by default."""
        with self._lock:
            try:
                info = path.stat()
            except OSError as error:
                self._tokens, self._stamp = (), None
                raise BadInput(f"the token file {path} can not be read: {error.strerror}") from None
            stamp = (info.st_mtime_ns, info.st_ctime_ns, info.st_ino)
            if stamp == self._stamp:
                return
            self._tokens, self._stamp = (), None
            self._tokens, self._stamp = read_tokens(path), stamp


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Parse a token file. Raises BadInput with the line when it can not be used, or when others could read it."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            text = file.read(1 << 20).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the token file {path} can not be read: {error}") from None
    if stat.S_IMODE(info.st_mode) & 0o077:
        raise BadInput(f"the token file {path} can be read or written by others: chmod 600 {path}")
    if info.st_uid not in (os.geteuid(), 0):
        raise BadInput(f"the token file {path} belongs to another user (uid {info.st_uid})")
    tokens: list[Token] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if words:
            tokens.append(_token(words, f"{path}, line {number}"))
    if not tokens:
        raise BadInput(f"the token file {path} holds no token: one a line, 'ROLE NAME TOKEN'")
    return tuple(tokens)


def read_own_token(path: Path) -> str:
    """The token a client sends: the last word of the first line that is no comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"the token file {path} can not be read: {error}") from None
    words = [line.split("#", 1)[0].split() for line in lines]
    first = next((w for w in words if w), None)
    if first is None or first[-1].startswith("sha256:"):
        raise BadInput(f"the token file {path} holds no token to send")
    return first[-1]


def _token(words: list[str], where: str) -> Token:
    if len(words) != 3:
        raise BadInput(f"{where}: expected 'ROLE NAME TOKEN', got {len(words)} words")
    role, name, secret = words
    if role not in {r.value for r in Role}:
        raise BadInput(f"{where}: the role is {role!r}, known are {', '.join(r.value for r in Role)}")
    if not re.fullmatch(r"[A-Za-z0-9._@-]{1,64}", name):
        raise BadInput(f"{where}: the name {name!r} may have letters, digits and . _ @ - only, 64 at most")
    if secret.startswith("sha256:"):
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", secret):
            raise BadInput(f"{where}: sha256: must be followed by 64 hexadecimal digits")
        return Token(Role(role), name, bytes.fromhex(secret.removeprefix("sha256:")))
    if len(secret) < SHORTEST_TOKEN:
        raise BadInput(f"{where}: the token of {name} is shorter than {SHORTEST_TOKEN} characters")
    return Token(Role(role), name, hashlib.sha256(secret.encode()).digest())
