"""solve: the solver on a file, without any service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.output import columns, facts, number, size


def solve(
    problem: Annotated[Path, typer.Argument(metavar="PROBLEM.json", help="The problem; '-' reads standard input.")],
    answer: Annotated[
        Path | None, typer.Option("--answer", "-o", metavar="ANSWER.json", help="Where to write.")
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Instead of the policy that the problem names.")] = None,
    table: Annotated[bool, typer.Option("--table", help="A summary for people instead of the answer as JSON.")] = False,
) -> None:
    """Solve a placement problem. Exit code 2: the problem can not be read; 3: no placement meets its goals.

    Needed are load (or experts), ranks and slots_per_rank. All fields, and an example: docs/cli.md, "Placement problems".
    """
    import json

    from api.port import plain
    from controller.solver import Problem
    from controller.solver import solve as solve_problem
    from eplane.errors import BadInput

    raw = read_json(problem)
    if not isinstance(raw, dict):
        raise BadInput(f"{problem}: a problem is a JSON object, this is a {type(raw).__name__}")
    result = solve_problem(Problem.from_dict({**raw, "policy": policy} if policy is not None else raw)).to_dict()
    text = json.dumps(plain(result))
    if answer is not None:
        write_text(answer, text + "\n")
    if table:
        typer.echo(_answer_table(result))
    elif answer is None:
        typer.echo(text)


def read_json(path: Path) -> Any:
    """A JSON file, or standard input for '-'. Raises BadInput in one sentence."""
    import json
    import sys
    from functools import partial

    from eplane.errors import BadInput

    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        return json.loads(text, object_pairs_hook=partial(_no_twins, path))
    except OSError as error:
        raise BadInput(f"{path} can not be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path} is not JSON: {error}") from None
    except MemoryError:
        raise BadInput(f"{path} does not fit into memory") from None


def _no_twins(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of two that are the same, one would be dropped without a word."""
    from eplane.errors import BadInput

    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise BadInput(f"{path}: {name!r:.60} stands twice in one object")
        result[name] = value
    return result


def write_text(path: Path, text: str) -> None:
    from eplane.errors import BadInput

    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{path} can not be written: {error.strerror}") from None


def _change(value: dict[str, float | None] | None) -> str | None:
    """`before -> after`; only what is known of it."""
    known = [number(x) for x in (value or {}).values() if x is not None]
    return " -> ".join(known) or None


def _answer_table(value: dict[str, Any]) -> str:
    balance, bound = value.get("balancedness") or [], value.get("bound") or []
    head = facts(
        (
            ("policy", f"{value.get('policy')} ({value.get('strategy')})"),
            ("balancedness", f"{number(min(balance, default=None))} at the worst layer"),
            ("moves", value.get("moves")),
            ("bytes", size(value.get("bytes_moved"))),
            ("nodes per token", _change(value.get("nodes_per_token"))),
            ("step time, us", _change(value.get("predicted_step_us"))),
            ("solved in", f"{number(value.get('seconds'))} s"),
        )
    )
    rows = [(i, b, bound[i] if i < len(bound) else None) for i, b in enumerate(balance)]
    return f"{head}\n\n{columns(('LAYER', 'BALANCEDNESS', 'BOUND'), rows)}"
