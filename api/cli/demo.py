"""demo: the whole story on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    ranks: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes that the ranks are spread over.")] = 2,
    controllers: Annotated[int, typer.Option(min=1, help="Controllers; one of them leads.")] = 2,
    seconds: Annotated[float, typer.Option(help="Seconds of traffic; the last 60 are without a shift.")] = 200.0,
    json: Annotated[Path, typer.Option(help="Where the result is written.")] = Path("out.json"),
    png: Annotated[Path, typer.Option(help="Where the picture is written.")] = Path("out.png"),
    policy: Annotated[str, typer.Option(help="Placement policy; 'static' moves nothing.")] = "eplane",
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill the leader and agents in the middle of waves.")] = False,
    fault: Annotated[
        str | None, typer.Option(help="Plant a fault that must be caught: wrong-bundle, mixed-epoch or skip-digest.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Requests under way at a time.")] = 20,
    seed: Annotated[int, typer.Option(help="Seed of the traffic.")] = 1,
    run_dir: Annotated[
        Path | None, typer.Option(help="Keep logs and state here instead of a temporary folder.")
    ] = None,
) -> None:
    """Serve a real MoE model over expert-parallel ranks, shift its traffic, and watch EPlane level the load live.

    Ends with 0 when no request failed and no token was wrong, with 1 otherwise.
    """
    from importlib.util import find_spec

    from api.demo.script import DemoSettings
    from eplane.errors import BadInput

    settings = DemoSettings(
        ranks=ranks,
        nodes=nodes,
        controllers=controllers,
        seconds=seconds,
        json_path=json,
        png_path=png,
        policy=policy,
        chaos=chaos,
        fault=fault,
        clients=clients,
        seed=seed,
        run_dir=run_dir,
    )
    missing = [part for part in ("torch", "transformers", "matplotlib") if find_spec(part) is None]
    if missing:
        raise BadInput(f"the demo needs {', '.join(missing)}: pip install 'eplane[demo]'")
    from api.demo.run import run

    result = run(settings)
    typer.echo(result.summary())
    typer.echo(f"written: {json}, {png}")
    raise typer.Exit(0 if result.flawless else 1)
