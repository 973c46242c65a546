"""simulate: a load trace replayed through policies side by side, without any service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from api.cli.output import columns, size
from api.cli.session import Session, connected

if TYPE_CHECKING:
    from api.traces import Recorded
    from controller.simulate import SimulationResult, SimulationSettings

_SHIPPED = "shift"
_GROUP = "group"

Policies = Annotated[str, typer.Option(help="Policies to compare, a,b,c.")]


@connected
def simulate(
    session: Session,
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            help="A .npz with `load` [windows, layers, experts], as `eplane load --record` writes it, or a .npy; a .json "
            f"(or '-') with load windows as the REST API gives them; `{_SHIPPED}`, the trace of the tiny model.",
        ),
    ],
    policy: Policies = "static,eplb,eplane",
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share the experts. Default: the group's, else 8.")
    ] = None,
    slots: Annotated[
        str | None,
        typer.Option(help="Slots of a rank in a layer, or one number a rank, a,b,c. Default: as few as fit, and one."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes, with as many ranks each. Default: 1.")] = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Entries of the trace in a load window. Default: the settings', else 1.")
    ] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Entries between two decisions. Default: a window, or the interval.")
    ] = None,
    delay: Annotated[
        int | None, typer.Option(min=0, help="Entries until what was decided is live. Default: as predicted, or 0.")
    ] = None,
    prior: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|linear|none|group",
            help="What serves first. Default: none, a policy fills an empty world; with --gate linear, or the group's.",
        ),
    ] = None,
    hardware: Annotated[
        str | None, typer.Option(help="Cost model of the predicted times; 'none' predicts none. Default: h800.")
    ] = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="Decide as a controller does: goals, gain against cost, waves, limits.")
    ] = False,
    settings: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|group",
            help="With the settings of a group: JSON as `eplane config show -o json` gives it, or those of --group now.",
        ),
    ] = None,
    spare_cells: Annotated[
        int | None, typer.Option(min=0, help="With --gate: cells of a rank beyond its slots. Default: 2 a layer.")
    ] = None,
    entry_s: Annotated[
        float | None,
        typer.Option(
            min=0.001, help="With --gate: seconds of an entry. Default: as recorded, or the interval / every."
        ),
    ] = None,
    step_tokens: Annotated[
        float | None, typer.Option(min=0, help="Routed tokens of a step in a layer. Default: what the hardware serves.")
    ] = None,
    horizon: Annotated[
        int, typer.Option(min=1, help="Steps over which a move must pay, where the trace tells none.")
    ] = 3000,
    limit: Annotated[int | None, typer.Option(min=2, help="Only the first entries of the trace.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A field of the problem, or, with --gate, of the settings."),
    ] = None,
    array: Annotated[str, typer.Option(help="Name of the array in the .npz.")] = "load",
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Draw balance, moves and times too (needs matplotlib).")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Replay a load trace: what each policy's placement is worth on the load after it, and what it moves for that.

    Nothing of a group is touched. A first placement that fills an empty world is not counted as moves.
    docs/cli.md says more under "Simulations", and under "Placement problems" all fields that --set may name.
    """
    from api.cli.plan import settings_of
    from api.picture import check_picture, draw
    from api.port import plain
    from api.simulating import compare, least_slots
    from controller.simulate import SimulationSettings

    if picture is not None:
        check_picture(picture)
    recorded = _load(trace, array).first(limit)
    experts = int(recorded.load.shape[2])
    controlled = gate or settings is not None
    known = _group(session) if _GROUP in (settings, prior) else {}
    if ranks not in (None, known.get("ranks")):
        known.get("fields", {}).pop("node_of_rank", None)
        known.pop("node_names", None)
    group = _settings(settings, known) if controlled else None
    count = ranks or known.get("ranks", 8)
    own_slots = known.get("slots_per_rank") or least_slots(experts, count)
    layers = int(recorded.load.shape[1])
    per_rank = own_slots if slots is None else _slots(slots)
    asked = SimulationSettings(
        ranks=count,
        slots_per_rank=per_rank,
        window=window or _window(group),
        hardware=_hardware(hardware, group),
        gate=controlled,
        group=group,
        step_tokens=step_tokens,
        horizon_steps=horizon,
        fields={
            **known.get("fields", {}),
            **({"nodes": nodes} if nodes is not None else {}),
            **settings_of(setting or [], "--set"),
        },
        prior=_prior(prior or (_GROUP if settings == _GROUP else "linear" if controlled else "none"), known),
        every=every,
        delay=delay,
        node_names=known.get("node_names") if nodes is None else None,
        cells=_cells(known, layers, per_rank, spare_cells),
        entry_s=entry_s or (recorded.entry_s if controlled else None),
        entry_steps=recorded.entry_steps if controlled and step_tokens is None else None,
    )
    names = [name.strip() for name in policy.split(",") if name.strip()]
    with _progress(names, quiet) as progress, _within_memory(trace):
        results = compare(recorded.load, names, asked, progress)
    answer = _answer(trace, recorded, asked, results)
    if picture is not None:
        draw(picture, results, _title(answer))
    session.emit(plain(answer), _table)


def _answer(
    trace: Path, recorded: Recorded, asked: SimulationSettings, results: list[SimulationResult]
) -> dict[str, Any]:
    entries, layers, experts = recorded.load.shape
    prior = asked.prior if isinstance(asked.prior, str) else "none" if asked.prior is None else "given"
    return {
        "trace": str(trace),
        "entries": int(entries),
        "layers": int(layers),
        "experts": int(experts),
        "ranks": asked.ranks,
        "slots_per_rank": asked.slots_per_rank,
        "nodes": _nodes_of(asked),
        "window": asked.window,
        "every": asked.every or _every(asked),
        "delay": asked.delay,
        "prior": prior,
        "hardware": asked.hardware or (asked.group or {}).get("hardware"),
        "gate": asked.controlled,
        "entry_s": asked.entry_s,
        "results": [result.to_dict() for result in results],
    }


def _load(trace: Path, array: str) -> Recorded:
    """`[W, L, E]` from whatever `trace` names."""
    from api.cli.solving import read_json
    from api.traces import read_trace, windows_trace

    if str(trace) == "-" or trace.suffix == ".json":
        return windows_trace(read_json(trace), str(trace))
    if str(trace) == _SHIPPED and not trace.exists():
        return read_trace(_shipped(), array)
    return read_trace(trace, array)


@contextmanager
def _within_memory(trace: Path) -> Iterator[None]:
    from eplane.errors import BadInput

    try:
        yield
    except MemoryError:
        raise BadInput(
            f"{trace}: there is not enough memory for a replay: name fewer ranks, or a shorter --window"
        ) from None


def _group(session: Session) -> dict[str, Any]:
    """The group's world, settings and live placement, as its controller tells them."""
    from api.simulating import of_group

    status = session.get("status")
    return of_group(session.get("placement"), session.get("config"), session.get("nodes"), status.get("world") or {})


def _settings(asked: str | None, known: dict[str, Any]) -> dict[str, Any]:
    """The settings of a group by name; none stands for the defaults."""
    from api.cli.solving import read_json
    from controller.settings import GroupSettings
    from eplane.errors import BadInput

    if asked is None:
        return {}
    raw = known["group"] if asked == _GROUP else read_json(Path(asked))
    if not isinstance(raw, dict):
        raise BadInput(f"--settings {asked}: must be a JSON object of settings")
    return GroupSettings.from_mapping(raw, asked).shown()


def _window(group: dict[str, Any] | None) -> int:
    """Of settings that name one or were given; an entry of the trace else."""
    from controller.settings import GroupSettings

    return int(GroupSettings().patched(group).window) if group else 1


def _hardware(asked: str | None, group: dict[str, Any] | None) -> str | None:
    """What was asked for; else the settings' own where they were given."""
    if asked is None and group:
        from controller.settings import GroupSettings

        return GroupSettings().patched(group).hardware
    return None if asked == "none" else asked or "h800"


def _prior(asked: str, known: dict[str, Any]) -> Any:
    """The first placement: `linear`, nothing, or a table `[L][P]`."""
    from api.cli.solving import read_json
    from eplane.errors import BadInput

    if asked in ("linear", "none"):
        return None if asked == "none" else asked
    if asked == _GROUP:
        return known["prior"]
    raw = read_json(Path(asked))
    table = (raw.get("p2l") or raw.get("placement") or raw.get("prior")) if isinstance(raw, dict) else raw
    if not isinstance(table, list) or not table:
        raise BadInput(f"--prior {asked}: must hold a table, as `eplane placement -o json` or `eplane solve` writes it")
    return table


def _cells(known: dict[str, Any], layers: int, slots: int | list[int], spare: int | None) -> int | None:
    if spare is None or not isinstance(slots, int):
        return known.get("cells") if slots == known.get("slots_per_rank") else None
    return layers * slots + spare


def _every(asked: SimulationSettings) -> int:
    from controller.scene import Scene

    return Scene.interval(asked) if asked.controlled else asked.window


def _nodes_of(asked: SimulationSettings) -> int:
    placed = asked.fields.get("node_of_rank")
    return len(set(placed)) if placed is not None else int(asked.fields.get("nodes", 1))


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
    from eplane.wording import counted

    slots = value["slots_per_rank"]
    each = counted(slots, "slot") if isinstance(slots, int) else "own numbers of slots"
    return (
        f"{value['trace']}: {value['entries']} entries, {value['layers']} x {counted(value['experts'], 'expert')} on "
        f"{counted(value['ranks'], 'rank')} with {each}"
    )


def _table(value: dict[str, Any]) -> str:
    from eplane.wording import counted

    results, gate = value["results"], value["gate"]
    heads = ["POLICY", "NEXT", "P5", "FITTED", "REBALANCES", "MOVES", "A_LAYER", "BYTES"]
    heads += ["WAVES", "MIGRATING_S"] if gate else []
    heads += ["STEP_US", "STEPS/S", "SOLVE_MS"]
    rows = [
        [
            r["policy"],
            f"{r['next']:.4f}",
            f"{r['next_p5']:.4f}",
            f"{r['fitted']:.4f}",
            r["rebalances"],
            r["moves"],
            f"{r['moves_a_layer']:.2f}",
            size(r["bytes"]).replace(" ", ""),
            *((r["waves"], f"{r['migration_s']:.2f}") if gate else ()),
            None if r["step_us"] is None else f"{r['step_us']:.1f}",
            None if r["steps_a_second"] is None else f"{r['steps_a_second']:.1f}",
            f"{r['solve_ms']:.1f}",
        ]
        for r in results
    ]
    hardware = value["hardware"] or "no hardware"
    first = "" if value["prior"] != "none" else " after the first"
    foot = (
        f"{counted(results[0]['windows'], 'decision')}{first}, one every {value['every']} "
        f"entr{'y' if value['every'] == 1 else 'ies'}; times predicted for {hardware}"
        f"{', decided as by a controller' if gate else ''}. NEXT: mean / max load of a rank until the next decision."
    )
    said = [line for r in results if gate for line in _verdicts(r)]
    return "\n\n".join([_title(value), columns(heads, rows), *(["\n".join(said)] if said else []), foot])


def _verdicts(result: dict[str, Any]) -> list[str]:
    """How often each verdict came, and the last sentence of each goal that refused."""
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(result["verdicts"].items()))
    lines = [f"{result['policy']}: {counts}"]
    for goal, count in sorted(result["refused"].items()):
        said = [row["sentence"] for row in result["windows_detail"] if row["goal"] == goal]
        lines.append(f"  {goal} refused {count}, last: {said[-1] if said else ''}")
    return lines
