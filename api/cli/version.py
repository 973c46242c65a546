"""version: what is installed."""

from __future__ import annotations

from typing import Annotated

import typer

from api.cli.output import Output, emit, facts


def version(
    output: Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")] = Output.TABLE,
) -> None:
    """The version of EPlane and of Python."""
    import platform

    import eplane

    value = {"eplane": eplane.__version__, "python": platform.python_version()}
    emit(value, output, lambda v: facts(v.items()))
