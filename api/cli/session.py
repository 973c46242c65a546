"""Session: what every command that speaks to a controller shares, its options and one client.

`@connected` gives a command the options --url, --group, --token-file, --ca and -o; `@changing` adds --reason and
--actor. The command itself takes a Session first and only its own options after it.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.output import Output, emit

if TYPE_CHECKING:
    from api.client import Client

_SHARED: dict[str, tuple[Any, Any]] = {
    "group": (
        Annotated[str, typer.Option("--group", "-g", envvar="EPLANE_GROUP", help="Expert-parallel group.")],
        "default",
    ),
    "output": (Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")], Output.TABLE),
    "url": (
        Annotated[str, typer.Option(envvar="EPLANE_URL", help="Controllers, URL[,URL].", show_default=True)],
        "http://127.0.0.1:7070",
    ),
    "token_file": (
        Annotated[Path | None, typer.Option(envvar="EPLANE_TOKEN_FILE", help="File with the token to send.")],
        None,
    ),
    "ca": (Annotated[Path | None, typer.Option(envvar="EPLANE_CA", help="CA of the controllers' certificates.")], None),
    "patience": (Annotated[float, typer.Option(help="Seconds to try before giving up.")], 10.0),
}
_CHANGE: dict[str, tuple[Any, Any]] = {
    "reason": (Annotated[str, typer.Option(help="Why; it stands in the history.")], "asked for on the command line"),
    "actor": (Annotated[str | None, typer.Option(envvar="EPLANE_ACTOR", help="Who; default: USER@HOST.")], None),
}


@dataclass
class Session:
    """One command's line to the controllers. The client is made at the first question."""

    group: str
    output: Output
    url: str
    token_file: Path | None
    ca: Path | None
    patience: float
    reason: str = ""
    actor: str | None = None
    _client: Client | None = None

    def get(self, *parts: object, from_leader: bool = False, **query: Any) -> Any:
        """GET /v1/groups/GROUP/parts..."""
        return self._connect().get(self._path(*parts), from_leader=from_leader, **query)

    def fetch(self, *parts: object, **query: Any) -> bytes:
        """Bytes from the leader; empty where it has none."""
        return self._connect().fetch(self._path(*parts), **query)

    def read(self, path: str) -> Any:
        return self._connect().get(path)

    def change(
        self, method: str, *parts: object, body: Mapping[str, Any] | None = None, if_match: int | None = None
    ) -> Any:
        whole = {"reason": self.reason, "actor": self.actor or _who(), **(body or {})}
        return self._connect().change(method, self._path(*parts), whole, if_match=if_match)

    def emit(self, value: Any, table: Callable[[Any], str]) -> None:
        emit(value, self.output, table)

    def close(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)

    def _connect(self) -> Client:
        if self._client is None:
            from api.client import Client, ClientSettings, urls_of

            self._client = Client(ClientSettings(urls_of(self.url), self.token_file, self.ca, max(0.0, self.patience)))
        return self._client

    def _path(self, *parts: object) -> str:
        from api.client import path_of

        return path_of("v1", "groups", self.group, *parts)


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the shared options and a Session as its first argument."""
    return _with_options(command, _SHARED)


def changing(command: Callable[..., None]) -> Callable[..., None]:
    """As `connected`, for a command that changes something."""
    return _with_options(command, {**_SHARED, **_CHANGE})


def _with_options(command: Callable[..., None], shared: Mapping[str, tuple[Any, Any]]) -> Callable[..., None]:
    hints = typing.get_type_hints(command, include_extras=True)
    own = list(inspect.signature(command).parameters.values())[1:]
    kept = [p.replace(annotation=hints[p.name]) for p in own]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in shared.items()
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        session = Session(**{name: values.pop(name) for name in shared})
        try:
            command(session, **values)
        finally:
            session.close()

    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in kept]
    run.__signature__ = inspect.Signature([*keyword, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (*keyword, *added)}
    return run


def _who() -> str:
    """USER@HOST, made of the letters that an actor's name may have."""
    import getpass
    import re
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    name = re.sub(r"[^A-Za-z0-9._@-]", "-", f"{user}@{socket.gethostname()}")[:64]
    return name if name[:1].isalnum() else f"x{name}"[:64]
