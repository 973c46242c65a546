"""migration: plans under way, wave by wave, and how to stop one."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from api.cli.output import columns, facts, moment, number, size
from api.cli.session import Session, changing, connected

app = typer.Typer(help="Migrations: list, show, abort.", no_args_is_help=True)

ENDED_WELL = {"DONE"}
ENDED = ENDED_WELL | {"STOPPED", "ABORTED", "DEAD"}
LOOK_S = 0.25

Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end of the migration.")]
Timeout = Annotated[
    float | None, typer.Option("--timeout", min=0, help="With --wait: seconds to wait; default: as long as it takes.")
]


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
    session: Session,
    migration_id: Annotated[str, typer.Argument(metavar="MIGRATION")],
    wait: Wait = False,
    timeout: Timeout = None,
) -> None:
    """Stop a migration: waves that are past their cutover stay live."""
    result = session.change("POST", "migrations", migration_id, "abort")
    if wait:
        _until_ended(session, migration_id, timeout)
        result = session.get("migrations", migration_id)
    session.emit(result, migration_table)


def await_end(session: Session, migration_id: str, timeout_s: float | None = None) -> None:
    """Wait for the end of a migration and show it. Exit code 4 when it did not get all its waves live, 5 when it did not
    end within `timeout_s` seconds."""
    from eplane.errors import Conflict

    _until_ended(session, migration_id, timeout_s)
    value = session.get("migrations", migration_id)
    session.emit(value, migration_table)
    if value.get("state") not in ENDED_WELL:
        raise Conflict(f"migration {migration_id} ended {value.get('state')}{_why(value)}")


def _until_ended(session: Session, migration_id: str, timeout_s: float | None) -> None:
    """Says on standard error, once, when a pause holds the waves up: nobody but a person ends it."""
    from eplane.errors import WaitEnded

    limit = None if timeout_s is None else time.monotonic() + timeout_s
    paused = False
    while (state := session.get("migrations", migration_id).get("state")) not in ENDED:
        before, paused = paused, bool(session.get("mode").get("paused"))
        if paused and not before:
            typer.echo(f"waiting: group {session.group} is paused, no wave cuts over until `eplane resume`", err=True)
        if limit is not None and time.monotonic() >= limit:
            why = ", the group is paused" if paused else ""
            raise WaitEnded(f"migration {migration_id} has not ended after {timeout_s:g} s, it is {state}{why}")
        time.sleep(LOOK_S)


def _why(value: dict[str, Any]) -> str:
    why = value.get("sentence") or value.get("outcome") or value.get("reason")
    return f": {why}" if why else ""


def migrations_table(value: list[dict[str, Any]]) -> str:
    rows = [
        (
            m.get("id"),
            m.get("state"),
            m.get("plan"),
            m.get("waves"),
            moment(m.get("created_at")),
            moment(m.get("ended_at")),
            m.get("actor"),
        )
        for m in value
    ]
    return columns(("MIGRATION", "STATE", "PLAN", "WAVES", "BEGAN", "ENDED", "ACTOR"), rows) if rows else "none"


def migration_table(value: dict[str, Any]) -> str:
    waves = value.get("waves") or []
    told = value.get("predicted") or {}
    text = facts(
        (
            ("migration", f"{value.get('id')}  {value.get('state')}"),
            ("plan", f"{value.get('plan')} from epoch {value.get('base_epoch')}"),
            ("waves live", f"{value.get('live')} of {len(waves)}"),
            ("moved", f"{value.get('moves')} of {value.get('planned_moves')} bundles, {size(value.get('bytes'))}"),
            ("gain", f"predicted {number(told.get('gain_s'))} s, measured {number(value.get('measured_gain_s'))} s"),
            ("because", f"{value.get('sentence')} ({value.get('actor')})"),
        )
    )
    rows = [
        (
            w.get("number"),
            w.get("epoch"),
            w.get("state"),
            w.get("moves"),
            size(w.get("bytes")),
            _nodes(w),
            w.get("reason"),
        )
        for w in waves
    ]
    head = ("WAVE", "EPOCH", "STATE", "MOVES", "BYTES", "VERIFIED/SWITCHED/CLEAN", "NOTE")
    return f"{text}\n\n{columns(head, rows)}" if rows else text


def _nodes(wave: dict[str, Any]) -> str:
    """How many nodes have said so, by kind of acknowledgement."""
    counts = (str(len(wave.get(kind) or ())) for kind in ("verified", "switched", "clean"))
    return "/".join(counts) + (" STALLED" if wave.get("stalled") else "")
