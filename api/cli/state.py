"""status, load, placement, nodes, goals, anomalies, history, explain, leader: everything that only looks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.output import bar, columns, facts, moment, number, size
from api.cli.session import Session, connected


@connected
def status(
    session: Session,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again and again until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 1.0,
) -> None:
    """Mode, leader, epoch, balancedness, verdict, migration, nodes."""
    if not watch:
        session.emit(session.get("status", from_leader=True), status_table)
        return
    import sys

    while True:
        value = session.get("status", from_leader=True)
        if sys.stdout.isatty():
            typer.echo("\x1b[H\x1b[2J", nl=False)
        session.emit(value, status_table)
        time.sleep(every)


@connected
def load(
    session: Session,
    layer: Annotated[int | None, typer.Option(min=0, help="Only this layer, rank by rank.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE.npz", help="Record the windows that come into a trace for `eplane simulate`."),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--for", min=0, help="With --record: seconds; default: until Ctrl-C.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.1, help="With --record: seconds between two looks.")] = 2.0,
) -> None:
    """Tokens per layer, expert and rank in the newest load window; or a long record of them."""
    if record is not None:
        session.emit(_record(session, record, seconds, every), _record_table)
        return
    value = session.get("load", from_leader=True)
    if layer is not None:
        value = one_layer(value, layer, "load", "rank_load")
        if value.get("balancedness"):
            value["balancedness"] = one_layer(value["balancedness"], layer, "per_layer")
    session.emit(value, load_table if layer is None else layer_table)


@connected
def placement(
    session: Session,
    epoch: Annotated[int | None, typer.Option(min=0, help="An earlier epoch; default: the live one.")] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Only this layer.")] = None,
) -> None:
    """Which experts every rank holds, layer by layer."""
    value = session.get("placement", epoch=epoch)
    session.emit(value if layer is None else one_layer(value, layer, "p2l", "replicas", "shares"), placement_table)


def one_layer(value: dict[str, Any], layer: int, *by_layer: str) -> dict[str, Any]:
    """The answer for one layer: what has a row for each keeps that row. `layer` says which."""
    kept = {name: value[name] for name in by_layer if value.get(name)}
    for rows in kept.values():
        _must_exist(layer, len(rows))
    return {**value, **{name: [rows[layer]] for name, rows in kept.items()}, "layer": layer}


def _record(session: Session, path: Path, seconds: float | None, every: float) -> dict[str, Any]:
    """Fetch again and again. A controller that is away for a while is waited for; its windows may be lost."""
    import sys

    from api.recording import Recording
    from eplane.errors import ApiProblem

    began, ended_by = time.monotonic(), "the time given"
    with Recording(path) as recording:
        try:
            while True:
                try:
                    world, last = recording.last
                    raw = session.fetch("recording", since_step=last, world=world)
                    if raw and recording.add(raw, time.time()):
                        if sys.stderr.isatty():
                            typer.echo(f"{recording.windows} windows, {recording.tokens} tokens", err=True)
                        # One answer has not room for all: ask on until there is none.
                        continue
                except ApiProblem as problem:
                    if problem.code not in ("not_leader", "unavailable") or not recording.windows:
                        raise
                left = None if seconds is None else began + seconds - time.monotonic()
                if recording.ended is not None or (left is not None and left <= 0):
                    break
                time.sleep(every if left is None else min(every, left))
        except KeyboardInterrupt:
            ended_by = "Ctrl-C"
        recording.finish()
    return {
        "file": str(path) if recording.windows else None,
        "windows": recording.windows,
        "gaps": recording.lost,
        "tokens": recording.tokens,
        "seconds": round(time.monotonic() - began, 1),
        "ended_by": recording.ended or ended_by,
    }


def _record_table(value: dict[str, Any]) -> str:
    if not value["windows"]:
        return f"no load window came in {value['seconds']} s: nothing is recorded"
    return facts(flat(value))


@connected
def nodes(session: Session) -> None:
    """The nodes, their ranks and their agents."""
    session.emit(session.get("nodes"), nodes_table)


@connected
def goals(session: Session) -> None:
    """The goals and what each says now."""
    session.emit(session.get("goals"), rows_table)


@connected
def anomalies(session: Session) -> None:
    """What is not as it should be."""
    session.emit(session.get("anomalies", from_leader=True), lambda v: rows_table(v, "nothing"))


@connected
def history(
    session: Session, limit: Annotated[int, typer.Option(min=1, max=1000, help="How many epochs.")] = 20
) -> None:
    """The epochs, newest first: who made each, and why."""
    session.emit(session.get("history", limit=limit), history_table)


@connected
def explain(
    session: Session,
    layer: Annotated[int, typer.Argument(min=0, help="MoE layer.")],
    expert: Annotated[int, typer.Argument(min=0, help="Logical expert.")],
) -> None:
    """Why an expert lives where it does."""
    session.emit(
        session.get("explain", from_leader=True, layer=layer, expert=expert),
        lambda v: v.get("sentence") or facts(flat(v)),
    )


@connected
def leader(session: Session) -> None:
    """Which controller leads each group."""
    session.emit(
        session.read("/v1/leader"),
        lambda v: columns(("GROUP", "LEADER"), [(g, one.get("url")) for g, one in v["groups"].items()]),
    )


# ---------------------------------------------------------------- the human forms


def status_table(value: dict[str, Any]) -> str:
    balance = value.get("balancedness") or {}
    verdict = value.get("verdict") or {}
    who = value.get("leader") or {}
    world = value.get("world") or {}
    text = facts(
        (
            ("group", value.get("group")),
            ("mode", f"{value.get('mode')}{', PAUSED' if value.get('paused') else ''}"),
            ("leader", f"{who.get('id')} at {who.get('url')}" if who else "none"),
            ("world", world.get("world", world.get("id")) if world else "none"),
            ("epoch", f"{value.get('epoch')} (placement {value.get('digest')})"),
            ("balancedness", f"now {number(balance.get('now'))}, mean {number(balance.get('mean'))}"),
            ("verdict", verdict.get("sentence")),
            ("migration", _migration_line(value.get("migration"))),
            ("agents", value.get("agents")),
            ("trouble", value.get("trouble")),
        )
    )
    rows = value.get("nodes") or []
    return f"{text}\n\n{nodes_table(rows)}" if rows else text


def _migration_line(migration: dict[str, Any] | None) -> str:
    if not migration:
        return "none"
    waves = migration.get("waves")
    done = f", wave {migration.get('wave', '?')} of {len(waves) if isinstance(waves, list) else waves}" if waves else ""
    return f"{migration.get('id')} {migration.get('state')}{done}"


def load_table(value: dict[str, Any]) -> str:
    by_rank: list[list[float]] = value.get("rank_load") or []
    if not by_rank:
        return "no load window yet"
    rows = []
    for index, ranks in enumerate(by_rank):
        top, total = max(ranks), sum(ranks)
        even = total / len(ranks) / top if top else None
        rows.append((index, int(total), int(top), ranks.index(top), even, bar(even or 0.0)))
    table = columns(("LAYER", "TOKENS", "MOST ON A RANK", "RANK", "BALANCEDNESS", ""), rows)
    sampled = value.get("sampled")
    return f"{table}\n\nrouting sampled: {sampled} tokens" if sampled else table


def layer_table(value: dict[str, Any]) -> str:
    by_rank: list[list[float]] = value.get("rank_load") or []
    if not by_rank:
        return "no load window yet"
    top = max(by_rank[0]) or 1.0
    return columns(("RANK", "TOKENS", ""), [(r, int(t), bar(t / top)) for r, t in enumerate(by_rank[0])])


def placement_table(value: dict[str, Any]) -> str:
    table: list[list[int]] = value["p2l"]
    ranks = int(value["ranks"])
    rows = []
    for index, row in enumerate(table, start=int(value.get("layer", 0))):
        slots = len(row) // ranks
        for rank in range(ranks):
            held = row[rank * slots : (rank + 1) * slots]
            rows.append((index, rank, " ".join("." if e < 0 else str(e) for e in held)))
    return f"epoch {value.get('epoch')}, digest {value.get('digest')}\n" + columns(("LAYER", "RANK", "EXPERTS"), rows)


def _must_exist(layer: int, layers: int) -> None:
    from eplane.errors import BadInput

    if layer >= layers:
        raise BadInput(f"--layer {layer}: there are {layers} layers, counted from 0")


def nodes_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (r.get("node"), _cell("ranks", r.get("ranks")), r.get("agent"), r.get("epoch"), r.get("drained")) for r in rows
    ]
    return columns(("NODE", "RANKS", "AGENT", "EPOCH", "DRAINED"), cells) if cells else "none"


def history_table(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            r.get("epoch"),
            moment(r.get("at")),
            r.get("kind"),
            r.get("moves"),
            size(r.get("bytes")),
            r.get("predicted_gain_s"),
            r.get("measured_gain_s"),
            r.get("actor"),
            r.get("reason"),
        )
        for r in rows
    ]
    head = ("EPOCH", "AT", "KIND", "MOVES", "BYTES", "PREDICTED S", "MEASURED S", "ACTOR", "REASON")
    return columns(head, cells) if cells else "none"


def rows_table(rows: list[dict[str, Any]], nothing: str = "none") -> str:
    """Columns from rows of one shape; what is nested is counted or left to -o json."""
    if not rows:
        return nothing
    heads = [key for key in rows[0] if not isinstance(rows[0][key], dict)]
    return columns(
        [h.upper().replace("_", " ") for h in heads], [[_cell(h, row.get(h)) for h in heads] for row in rows]
    )


def flat(value: dict[str, Any]) -> list[tuple[str, object]]:
    return [(key.replace("_", " "), _cell(key, item)) for key, item in value.items()]


def _cell(name: str, item: Any) -> object:
    if name in ("at", "since") or name.endswith("_at"):
        return moment(item)
    if isinstance(item, list):
        simple = all(not isinstance(one, (list, dict)) for one in item)
        return ",".join(str(one) for one in item) if simple and len(item) <= 16 else f"{len(item)} items"
    if isinstance(item, dict):
        return f"{len(item)} fields"
    return item
