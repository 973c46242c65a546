"""mode, pause, resume, config: how far the controller may go, and with which settings."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.output import facts
from api.cli.plan import settings_of
from api.cli.session import Session, changing, connected
from api.cli.state import flat

config_app = typer.Typer(help="Settings of a group: show, set.", no_args_is_help=True)


@changing
def mode(
    session: Session,
    wanted: Annotated[str | None, typer.Argument(metavar="[off|observe|propose|auto]", help="The mode to set.")] = None,
) -> None:
    """Show the mode, or set it."""
    if wanted is None:
        session.emit(session.get("mode"), _table)
        return
    session.emit(session.change("PUT", "mode", body={"mode": wanted}), _table)


@changing
def pause(session: Session) -> None:
    """Let no wave cut over until `eplane resume`."""
    session.emit(session.change("POST", "pause"), _table)


@changing
def resume(session: Session) -> None:
    """End the pause."""
    session.emit(session.change("POST", "resume"), _table)


@config_app.command("show")
@connected
def show(session: Session) -> None:
    """The settings and their values."""
    session.emit(session.get("config"), _settings_table)


@config_app.command("set")
@changing
def set_settings(session: Session, pairs: Annotated[list[str], typer.Argument(metavar="NAME=VALUE...")]) -> None:
    """Change settings while the group runs."""
    body = {"settings": settings_of(pairs, "setting")}
    session.emit(session.change("PATCH", "config", body=body), _settings_table)


def _table(value: dict[str, Any]) -> str:
    return facts(flat(value))


def _settings_table(value: dict[str, Any]) -> str:
    """Names and values as `config set` takes them."""
    import json

    return facts((name, json.dumps(item)) for name, item in value.items())
