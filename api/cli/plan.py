"""rebalance, plan, rollback: work that is proposed dry, then executed on demand."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.migration import Timeout, await_end, migration_table
from api.cli.output import columns, facts, moment, number, size
from api.cli.session import Session, changing, connected

app = typer.Typer(help="Plans: list, show, execute, discard.", no_args_is_help=True)

Execute = Annotated[bool, typer.Option("--execute/--dry-run", help="Carry the plan out; by default it is only shown.")]
Wait = Annotated[bool, typer.Option("--wait", help="With --execute: wait for the end of the migration.")]


@changing
def rebalance(
    session: Session,
    policy: Annotated[str | None, typer.Option(help="Policy; default: the one of the group's settings.")] = None,
    execute: Execute = False,
    wait: Wait = False,
    timeout: Timeout = None,
    option: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the policy; anyway=true: also without gain.")
    ] = None,
) -> None:
    """Compute a plan that levels the load. Dry by default: --execute carries it out."""
    body = {"policy": policy, "options": settings_of(option or [], "--option")}
    _settle(session, session.change("POST", "plans", body=body), execute, wait, timeout)


@changing
def rollback(
    session: Session,
    epoch: Annotated[int, typer.Argument(min=0, help="The epoch whose placement is wanted back.")],
    execute: Execute = False,
    wait: Wait = False,
    timeout: Timeout = None,
) -> None:
    """Plan the way back to an earlier epoch. Dry by default: --execute carries it out."""
    _settle(session, session.change("POST", "rollback", body={"to_epoch": epoch}), execute, wait, timeout)


@app.command("list")
@connected
def list_plans(session: Session) -> None:
    """The plans, newest first."""
    session.emit(session.get("plans"), plans_table)


@app.command("show")
@connected
def show(session: Session, plan_id: Annotated[str, typer.Argument(metavar="PLAN")]) -> None:
    """One plan: what it moves, what it brings, and why."""
    session.emit(session.get("plans", plan_id), plan_table)


@app.command("execute")
@changing
def execute_plan(
    session: Session,
    plan_id: Annotated[str, typer.Argument(metavar="PLAN")],
    epoch: Annotated[int | None, typer.Option(min=0, help="Epoch you looked at; default: the plan's base.")] = None,
    wait: Wait = False,
    timeout: Timeout = None,
) -> None:
    """Carry a proposed plan out."""
    base = session.get("plans", plan_id)["base_epoch"] if epoch is None else epoch
    started = session.change("POST", "plans", plan_id, "execute", if_match=base)
    _follow(session, started, wait, timeout)


@app.command("discard")
@changing
def discard(session: Session, plan_id: Annotated[str, typer.Argument(metavar="PLAN")]) -> None:
    """Put a proposed plan away."""
    session.emit(session.change("POST", "plans", plan_id, "discard"), plan_table)


def settings_of(pairs: list[str], option: str) -> dict[str, Any]:
    """`NAME=VALUE` pairs; a value that reads as JSON is JSON, anything else is text."""
    import json

    from eplane.errors import BadInput

    result: dict[str, Any] = {}
    for pair in pairs:
        name, sign, text = pair.partition("=")
        if not sign or not name.strip():
            raise BadInput(f"{option} {pair!r}: expected NAME=VALUE")
        try:
            result[name.strip()] = json.loads(text)
        except ValueError:
            result[name.strip()] = text
    return result


def _settle(session: Session, proposed: dict[str, Any], execute: bool, wait: bool, timeout: float | None) -> None:
    """Show a proposal; with --execute start its migration under the epoch it was computed for."""
    plan = proposed.get("plan")
    if plan is None or not execute:
        session.emit(proposed, _proposal_table)
        return
    started = session.change("POST", "plans", plan["id"], "execute", if_match=plan["base_epoch"])
    _follow(session, started, wait, timeout)


def _follow(session: Session, started: dict[str, Any], wait: bool, timeout: float | None) -> None:
    migration = started.get("migration", started)
    if wait:
        await_end(session, migration["id"] if isinstance(migration, dict) else str(migration), timeout)
        return
    session.emit(started, lambda v: migration_table(v) if "id" in v else facts([("migration", v.get("migration"))]))


def _proposal_table(value: dict[str, Any]) -> str:
    plan = value.get("plan")
    if plan is None:
        return str(value.get("sentence"))
    hint = f"\ndry run: nothing was moved; eplane plan execute {plan['id']} carries it out"
    return plan_table(plan) + hint


def plans_table(value: list[dict[str, Any]]) -> str:
    rows = [
        (
            p.get("id"),
            p.get("state"),
            p.get("kind"),
            p.get("base_epoch"),
            len(p.get("waves") or []),
            (p.get("predicted") or {}).get("moves"),
            size((p.get("predicted") or {}).get("bytes")),
            moment(p.get("created_at")),
            p.get("actor"),
        )
        for p in value
    ]
    return (
        columns(("PLAN", "STATE", "KIND", "BASE", "WAVES", "MOVES", "BYTES", "CREATED", "ACTOR"), rows)
        if rows
        else "none"
    )


def plan_table(plan: dict[str, Any]) -> str:
    told = plan.get("predicted") or {}
    waves = plan.get("waves") or []
    text = facts(
        (
            ("plan", f"{plan.get('id')}  {plan.get('state')}  {plan.get('kind')} by {plan.get('policy')}"),
            ("base epoch", plan.get("base_epoch")),
            ("reason", f"{plan.get('reason')} ({plan.get('actor')})"),
            ("balancedness", f"{number(told.get('balancedness_before'))} -> {number(told.get('balancedness_after'))}"),
            ("gain, cost", f"{number(told.get('gain_s'))} s, {number(told.get('cost_s'))} s"),
            ("moves", f"{told.get('moves')} bundles, {size(told.get('bytes'))}"),
            ("waves", len(waves)),
        )
    )
    rulings = [(d.get("goal"), d.get("ruling"), d.get("sentence")) for d in plan.get("decisions") or []]
    return f"{text}\n\n{columns(('GOAL', 'RULING', 'BECAUSE'), rulings)}" if rulings else text
