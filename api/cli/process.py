"""controller, agent, serve: the processes of a deployment, one command each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Etcd = Annotated[str, typer.Option("--etcd", envvar="EPLANE_ETCD", help="etcd, URL[,URL].")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def controller(
    etcd: Etcd = "http://127.0.0.1:2379",
    group: Annotated[list[str] | None, typer.Option("--group", "-g", help="A group to lead; repeatable.")] = None,
    listen: Annotated[str, typer.Option(help="HOST:PORT of the API.")] = "127.0.0.1:7070",
    url: Annotated[str | None, typer.Option(help="How others reach this controller; default: from --listen.")] = None,
    controller_id: Annotated[str | None, typer.Option("--id", help="Name of this controller; default: random.")] = None,
    mode: Annotated[str | None, typer.Option(help="Mode of groups that have none yet.")] = None,
    ttl: Annotated[float, typer.Option(min=1.0, help="Seconds after which a silent leader loses its seat.")] = 3.0,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate of the API.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Key of the certificate.")] = None,
    token_file: Annotated[Path | None, typer.Option(help="Tokens and their roles, one a line.")] = None,
    etcd_ca: Annotated[Path | None, typer.Option(help="CA of etcd's certificate.")] = None,
    etcd_cert: Annotated[Path | None, typer.Option(help="Certificate to show etcd.")] = None,
    etcd_key: Annotated[Path | None, typer.Option(help="Key of that certificate.")] = None,
) -> None:
    """Run a controller with its REST API and web page."""
    from api.auth import AuthSettings
    from api.controlling import ControllerOptions, run_controller

    run_controller(
        ControllerOptions(
            etcd=etcd,
            groups=tuple(group or ["default"]),
            listen=listen,
            url=url,
            controller_id=controller_id,
            mode=mode,
            ttl_s=ttl,
            auth=AuthSettings(tls_cert, tls_key, token_file),
            etcd_ca=etcd_ca,
            etcd_cert=etcd_cert,
            etcd_key=etcd_key,
        )
    )


def agent(context: typer.Context) -> None:
    """Run an agent on a node; all options go to `python -m agent`."""
    _become("agent", context.args)


def serve(context: typer.Context) -> None:
    """Serve a model over expert-parallel ranks; all options go to `python -m runtime serve`."""
    _become("runtime", ["serve", *context.args])


def _become(module: str, arguments: list[str]) -> None:
    """Replace this process: signals and the exit status are the program's own."""
    import importlib.util
    import os
    import sys

    from eplane.errors import BadInput

    if importlib.util.find_spec(module) is None:
        raise BadInput(f"the part {module!r} is not installed")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments])
