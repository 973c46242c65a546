"""up: everything on one machine, supervised, until Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from api.stack import Stack


def up(
    model: Annotated[str, typer.Option(help="A Hugging Face MoE checkpoint folder, or 'tiny'.")] = "tiny",
    ranks: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks are spread over (one agent each).")] = 2,
    controllers: Annotated[int, typer.Option(min=1, help="Controllers; one of them leads.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Slots of a rank in a layer.")] = 10,
    spare_cells: Annotated[int | None, typer.Option(min=0, help="Cells of a rank beyond layers x slots.")] = None,
    group: Annotated[str, typer.Option("--group", "-g", envvar="EPLANE_GROUP", help="Name of the group.")] = "default",
    mode: Annotated[str, typer.Option(help="off, observe, propose or auto.")] = "auto",
    port: Annotated[int, typer.Option(min=0, max=65000, help="First port of the controllers; 0: any free.")] = 7070,
    http_port: Annotated[
        int, typer.Option(min=0, max=65000, help="First port of the model's HTTP; 0: any free.")
    ] = 8000,
    run_dir: Annotated[Path | None, typer.Option(help="Logs, sockets and etcd's data.")] = None,
    etcd: Annotated[
        str | None, typer.Option(envvar="EPLANE_ETCD", help="Use this etcd instead of starting one.")
    ] = None,
    setting: Annotated[list[str] | None, typer.Option(help="NAME=VALUE for the group's settings; repeatable.")] = None,
    deterministic: Annotated[bool, typer.Option(help="Bit-equal answers whatever the batch and the placement.")] = True,
    ready: Annotated[float, typer.Option(min=1.0, help="Seconds to wait until everything answers.")] = 180.0,
) -> None:
    """Run everything on this machine, supervised: etcd, controllers, ranks, agents. Ctrl-C stops all of it."""
    import threading

    from api.cli.plan import settings_of
    from api.stack import Stack, StackSettings
    from api.supervise import EventKind, ProcessEvent

    wanted = StackSettings(
        run_dir=run_dir or _default_run_dir(group),
        group=group,
        model=model,
        ranks=ranks,
        nodes=nodes,
        controllers=controllers,
        slots=slots,
        spare_cells=spare_cells,
        mode=mode,
        etcd=etcd,
        controller_port=port,
        http_port=http_port,
        deterministic=deterministic,
        group_settings=settings_of(setting or [], "--setting"),
    )

    def tell(event: ProcessEvent) -> None:
        if event.kind is EventKind.ENDED:
            typer.echo(f"{event.name} ended with code {event.code}; it is started again", err=True)

    stack = Stack(wanted, tell)
    _stop_on_signals()
    try:
        stack.start(ready)
        typer.echo(_greeting(stack))
        threading.Event().wait()
    except KeyboardInterrupt:
        typer.echo("stopping", err=True)
    finally:
        stack.stop()
    typer.echo("stopped")


def _stop_on_signals() -> None:
    """SIGINT and SIGTERM end the wait; what comes after the first is ignored, so that stopping is not cut short."""
    import signal

    def on_signal(signum: int, frame: object) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, on_signal)


def _default_run_dir(group: str) -> Path:
    import os

    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "eplane" / group


def _greeting(stack: Stack) -> str:
    from api.cli.output import facts

    return facts(
        (
            ("page and API", " ".join(stack.controller_urls)),
            ("model", " ".join(f"{url}/v1/completions" for url in stack.runtime_urls)),
            ("etcd", " ".join(stack.etcd_urls)),
            ("logs", stack.supervisor.log_path("NAME").parent),
            ("try", f"eplane status --watch --url {stack.controller_urls[0]} -g {stack.settings.group}"),
        )
    )
