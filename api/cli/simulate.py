"""simulate: a load trace replayed through policies side by side, without any service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from api.cli.output import Output, columns, emit, size

_SHIPPED = "shift"


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A .npz with `load` [windows, layers, experts]; a .json (or '-') with load windows as the REST API "
            f"gives them; `{_SHIPPED}`, the trace that comes with the tiny model.",
        ),
    ],
    policy: Annotated[str, typer.Option(help="Policies to compare, a,b,c.")] = "static,eplb,eplane",
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that share the experts.")] = 8,
    slots: Annotated[
        str | None,
        typer.Option(help="Slots of a rank in a layer, or one number a rank, a,b,c. Default: as few as fit, and one."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes, with as many ranks each.")] = 1,
    window: Annotated[int, typer.Option(min=1, help="Entries of the trace between two decisions.")] = 1,
    hardware: Annotated[str, typer.Option(help="Cost model of the predicted times; 'none' predicts none.")] = "h800",
    gate: Annotated[bool, typer.Option("--gate", help="Move only when the cost model says that it pays.")] = False,
    step_tokens: Annotated[
        float | None, typer.Option(min=0, help="Routed tokens of a step in a layer. Default: what the hardware serves.")
    ] = None,
    horizon: Annotated[int, typer.Option(min=1, help="Steps between two decisions.")] = 3000,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first entries of the trace.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A further field of the problem, as in `eplane solve`."),
    ] = None,
    array: Annotated[str, typer.Option(help="Name of the array in the .npz.")] = "load",
    output: Annotated[Output, typer.Option("--output", "-o", help="Format of the answer.")] = Output.TABLE,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw balancedness and moves too (needs matplotlib).")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Replay a load trace: what each policy's placement is worth on the window after it, and what it moves for that.

    Every policy starts from nothing; its first placement is not counted as moves.
    """
    from api.cli.plan import settings_of
    from api.port import plain
    from api.simulating import check_picture, compare, draw, least_slots
    from controller.simulate import SimulationSettings

    if picture is not None:
        check_picture(picture)
    load = _load(trace, array)[:limit]
    experts = int(load.shape[2])
    settings = SimulationSettings(
        ranks=ranks,
        slots_per_rank=least_slots(experts, ranks) if slots is None else _slots(slots),
        window=window,
        hardware=None if hardware == "none" else hardware,
        gate=gate,
        step_tokens=step_tokens,
        horizon_steps=horizon,
        fields={"nodes": nodes, **settings_of(setting or [], "--set")},
    )
    names = [name.strip() for name in policy.split(",") if name.strip()]
    with _progress(names, quiet) as progress:
        results = compare(load, names, settings, progress)
    answer = {
        "trace": str(trace),
        "entries": int(load.shape[0]),
        "layers": int(load.shape[1]),
        "experts": experts,
        "ranks": ranks,
        "slots_per_rank": settings.slots_per_rank,
        "nodes": nodes,
        "window": window,
        "hardware": settings.hardware,
        "gate": gate,
        "results": [result.to_dict() for result in results],
    }
    if picture is not None:
        draw(picture, results, _title(answer))
    emit(plain(answer), output, _table)


def _load(trace: Path, array: str) -> Any:
    """`[W, L, E]` from whatever `trace` names."""
    from api.cli.solving import read_json
    from api.simulating import read_trace, windows_trace

    if str(trace) == "-" or trace.suffix == ".json":
        return windows_trace(read_json(trace), str(trace))
    if str(trace) == _SHIPPED and not trace.exists():
        return read_trace(_shipped(), array)
    return read_trace(trace, array)


def _shipped() -> Path:
    """The file that lies beside the tiny model. It is data: the runtime is found, not imported."""
    from importlib.util import find_spec

    from eplane.errors import BadInput

    found = find_spec("runtime")
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        path = Path(folder) / "tiny" / "traces" / "shift.npz"
        if path.is_file():
            return path
    raise BadInput(f"{_SHIPPED} can not be read: the trace of the tiny model is not installed; name a .npz file")


def _slots(text: str) -> int | list[int]:
    from eplane.errors import BadInput

    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        raise BadInput(f"--slots {text!r:.60}: must be a whole number, or one for every rank: 9,9,8,8") from None
    return numbers[0] if len(numbers) == 1 else numbers


@contextmanager
def _progress(names: list[str], quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar for each policy on standard error, where a person is looking."""
    import sys

    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    show = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*show, console=Console(stderr=True), transient=True) as bars:
        tasks = {name: bars.add_task(name, total=None) for name in names}
        yield lambda name, done, total: bars.update(tasks[name], completed=done, total=total)


def _title(value: dict[str, Any]) -> str:
    slots = value["slots_per_rank"]
    return (
        f"{value['trace']}: {value['entries']} entries, {value['layers']} x {value['experts']} experts on "
        f"{value['ranks']} ranks with {slots if isinstance(slots, int) else 'own numbers of'} slots"
    )


def _table(value: dict[str, Any]) -> str:
    results = value["results"]
    heads = (
        "POLICY",
        "NEXT",
        "P5",
        "FITTED",
        "REBALANCES",
        "MOVES",
        "A_LAYER",
        "BYTES",
        "STEP_US",
        "STEPS/S",
        "SOLVE_MS",
    )
    rows = [
        (
            r["policy"],
            f"{r['next']:.4f}",
            f"{r['next_p5']:.4f}",
            f"{r['fitted']:.4f}",
            r["rebalances"],
            r["moves"],
            f"{r['moves_a_layer']:.2f}",
            size(r["bytes"]).replace(" ", ""),
            None if r["step_us"] is None else f"{r['step_us']:.1f}",
            None if r["steps_a_second"] is None else f"{r['steps_a_second']:.1f}",
            f"{r['solve_ms']:.1f}",
        )
        for r in results
    ]
    hardware = value["hardware"] or "no hardware"
    foot = (
        f"{results[0]['windows']} decisions after the first, one every {value['window']} "
        f"entr{'y' if value['window'] == 1 else 'ies'}; times predicted for {hardware}"
        f"{', moves only where they pay' if value['gate'] else ''}. NEXT: mean / max load of a rank on the window after."
    )
    return f"{_title(value)}\n\n{columns(heads, rows)}\n\n{foot}"
