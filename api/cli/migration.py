"""migration: plans under way, wave by wave, and how to stop one."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from api.cli.output import columns, facts, size
from api.cli.session import Session, changing, connected
from api.cli.state import flat, listed

app = typer.Typer(help="Migrations: list, show, abort.", no_args_is_help=True)

ENDED_WELL = {"DONE"}
ENDED = ENDED_WELL | {"STOPPED", "ABORTED", "DEAD"}
LOOK_S = 0.25

Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end of the migration.")]


@app.command("list")
@connected
def list_migrations(session: Session) -> None:
    """The migrations, newest first."""
    session.emit(session.get("migrations"), migrations_table)


@app.command("show")
@connected
def show(session: Session, migration_id: Annotated[str, typer.Argument(metavar="MIGRATION")]) -> None:
    """One migration and its waves."""
    session.emit(session.get("migrations", migration_id), migration_table)


@app.command("abort")
@changing
def abort(
    session: Session, migration_id: Annotated[str, typer.Argument(metavar="MIGRATION")], wait: Wait = False
) -> None:
    """Stop a migration: waves that are past their cutover stay live."""
    result = session.change("POST", "migrations", migration_id, "abort")
    if wait:
        _until_ended(session, migration_id)
        result = session.get("migrations", migration_id)
    session.emit(result, migration_table)


def await_end(session: Session, migration_id: str) -> None:
    """Wait for the end of a migration and show it. Exit code 4 when it did not get all its waves live."""
    from eplane.errors import Conflict

    _until_ended(session, migration_id)
    value = session.get("migrations", migration_id)
    session.emit(value, migration_table)
    if value.get("state") not in ENDED_WELL:
        raise Conflict(f"migration {migration_id} ended {value.get('state')}{_why(value)}")


def _until_ended(session: Session, migration_id: str) -> None:
    while session.get("migrations", migration_id).get("state") not in ENDED:
        time.sleep(LOOK_S)


def _why(value: dict[str, Any]) -> str:
    why = value.get("sentence") or value.get("outcome") or value.get("reason")
    return f": {why}" if why else ""


def migrations_table(value: Any) -> str:
    rows = [
        (m.get("id"), m.get("state"), m.get("plan", m.get("plan_id")), _waves(m), m.get("actor"))
        for m in listed(value, "migrations")
    ]
    return columns(("MIGRATION", "STATE", "PLAN", "WAVES", "ACTOR"), rows) if rows else "none"


def migration_table(value: dict[str, Any]) -> str:
    waves = value.get("waves")
    text = facts([(k, v) for k, v in flat(value) if not (k == "waves" and isinstance(waves, list))])
    if not isinstance(waves, list) or not waves:
        return text
    rows = [(w.get("number", w.get("wave")), w.get("state"), w.get("epoch"), size(w.get("bytes"))) for w in waves]
    return f"{text}\n\n{columns(('WAVE', 'STATE', 'EPOCH', 'BYTES'), rows)}"


def _waves(migration: dict[str, Any]) -> object:
    waves = migration.get("waves")
    return len(waves) if isinstance(waves, list) else waves
