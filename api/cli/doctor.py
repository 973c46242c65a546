"""doctor: what is installed, which devices there are, what is missing and how to get it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from api.cli.output import Output, columns, emit


def doctor(
    output: Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")] = Output.TABLE,
    etcd: Annotated[str | None, typer.Option(envvar="EPLANE_ETCD", help="etcd to ask, URL[,URL].")] = None,
) -> None:
    """Check this machine: packages, devices, etcd. Exit code 5 when something needed to run a controller is missing."""
    from api.diagnosis import diagnose

    findings = diagnose(etcd)
    emit({"findings": [f.to_json() for f in findings]}, output, _table)
    if any(f.state == "missing" and f.needed for f in findings):
        raise typer.Exit(5)


def _table(value: dict[str, Any]) -> str:
    rows = [(f["name"], f["state"], f["detail"], f["remedy"] or "") for f in value["findings"]]
    return columns(("PART", "STATE", "DETAIL", "REMEDY"), rows)
