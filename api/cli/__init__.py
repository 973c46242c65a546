"""The command line `eplane`, and `rebalance`, short for `eplane rebalance`.

Only typer is imported here; what a command needs it imports when it runs. Exit codes: 0 ok, 2 usage or bad input,
3 refused by a goal, 4 conflict, 5 unavailable; 130 after Ctrl-C. A refusal is one sentence on standard error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from api.cli import demo, doctor, migration, mode, plan, process, simulate, solving, state, up, version

EPILOG = "Exit codes: 0 ok, 2 usage or bad input, 3 refused by a goal, 4 conflict, 5 unavailable."
UNKNOWN_FAILURE = 1
INTERRUPTED = 130

app = typer.Typer(
    name="eplane",
    help="Keeps Mixture-of-Experts services balanced while they serve.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """`eplane ...`"""
    raise SystemExit(run(sys.argv[1:] if arguments is None else arguments))


def main_rebalance() -> None:
    """`rebalance ...`, short for `eplane rebalance ...`"""
    raise SystemExit(run(["rebalance", *sys.argv[1:]], name="rebalance"))


def run(arguments: Sequence[str], name: str = "eplane") -> int:
    """Run one command and return its exit code; whatever goes wrong is one sentence on standard error."""
    from eplane.errors import EPlaneError

    try:
        result = app(list(arguments), prog_name="eplane", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except typer.Exit as ended:
        return int(ended.exit_code)
    except EPlaneError as error:
        return _refuse(name, str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; nothing more can be said on this pipe, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        shown = getattr(error, "format_message", None)
        if shown is not None:
            return _refuse(name, _usage(error, str(shown())), int(getattr(error, "exit_code", 2)))
        if os.environ.get("EPLANE_TRACE"):
            raise
        sentence = f"internal error, {type(error).__name__}: {error} (EPLANE_TRACE=1 shows where)"
        return _refuse(name, sentence, UNKNOWN_FAILURE)


def _refuse(name: str, sentence: str, code: int) -> int:
    typer.echo(f"{name}: {sentence}", err=True)
    return code


def _usage(error: Exception, sentence: str) -> str:
    """The sentence of a usage error, with the command whose --help says more."""
    context = getattr(error, "ctx", None)
    return f"{sentence.rstrip('.')}. See {context.command_path} --help" if context is not None else sentence


for _command in (state.status, state.load, state.placement, state.nodes, state.goals, state.anomalies):
    app.command()(_command)
for _command in (state.history, state.explain, state.leader, plan.rebalance, plan.rollback):
    app.command()(_command)
for _command in (mode.mode, mode.pause, mode.resume, solving.solve, simulate.simulate):
    app.command()(_command)
for _command in (up.up, demo.demo, process.controller, doctor.doctor, version.version):
    app.command()(_command)
app.command(context_settings=process.PASS_ON)(process.agent)
app.command(context_settings=process.PASS_ON)(process.serve)
app.add_typer(plan.app, name="plan")
app.add_typer(migration.app, name="migration")
app.add_typer(mode.config_app, name="config")
