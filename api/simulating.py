"""Policies side by side on a recorded load: reads traces, checks what is asked, runs it, draws it.

`python -m api.simulating PARENT` is a simulation as a process of its own: one JSON request on standard input, lines of
JSON on standard output (`{"done", "total"}` while it runs, at last `{"results"}` or `{"problem"}`). A policy's compiled
kernels hold the interpreter while they run, so inside a controller a thread could cost it its lease; a process can not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from api.port import plain
from api.problems import problem_of
from controller.costs import hardware_named
from controller.simulate import SimulationResult, SimulationSettings, simulate
from controller.solver import Problem
from controller.solver.policy import policy_named
from controller.solver.problem import Floats
from eplane.errors import BadInput, EPlaneError, ProblemError

Progress = Callable[[str, int, int], None]
"""Called with the policy, the decisions made so far, and all of them."""

TRACE_ARRAY = "load"
LEAST_WINDOWS = 3
PICTURES = (".png", ".svg", ".pdf")
# Fields of a problem that the simulation itself fills in, window after window.
_OWN = frozenset(
    ("load", "loads", "experts", "layers", "window", "ranks", "slots_per_rank", "prior", "in_flight", "policy")
) | {"hardware", "step_tokens", "horizon_steps"}
_BACKGROUND = 10


def read_trace(path: Path, array: str = TRACE_ARRAY) -> Floats:
    """`[W, L, E]` from the array of that name in an .npz file, or a whole .npy file. Raises BadInput."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return checked_trace(found, str(path))
            if array not in found.files:
                held = ", ".join(found.files[:20]) or "nothing"
                raise BadInput(f"{path} has no array {array!r}; it holds {held}")
            return checked_trace(found[array], f"{path}: {array}")
    except OSError as error:
        raise BadInput(f"{path} can not be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError) as error:
        raise BadInput(
            f"{path} is not a .npz with numbers: {str(error).splitlines()[0] if str(error) else ''}"
        ) from None
    except MemoryError:
        raise BadInput(f"{path} does not fit into memory") from None


def windows_trace(raw: object, source: str) -> Floats:
    """`[W, L, E]` from load windows as `GET /v1/groups/{g}/windows` answers them, oldest first. Raises BadInput.

    Only the last world's windows count: another world may place another model.
    """
    listed = raw.get("windows") if isinstance(raw, Mapping) else raw
    if not isinstance(listed, list) or not listed or not all(isinstance(w, Mapping) and "load" in w for w in listed):
        raise BadInput(f"{source}: windows: must be a list of objects with `load` [layers][experts]")
    world = listed[-1].get("world")
    try:
        loads = np.asarray([w["load"] for w in listed if w.get("world") == world])
    except ValueError:
        raise BadInput(f"{source}: windows: their loads do not have one shape") from None
    return checked_trace(loads, f"{source}: windows")


def checked_trace(load: np.ndarray[Any, Any], source: str) -> Floats:
    """The load as float64, once it is known to be one. Raises BadInput that begins with `source`."""
    if load.dtype.kind not in "iuf":
        raise BadInput(f"{source} holds {load.dtype}, not numbers")
    if load.ndim != 3 or min(load.shape) < 1:
        raise BadInput(f"{source} has shape {list(load.shape)}; [windows, layers, experts] is needed")
    low, high = float(load.min()), float(load.max())
    if not np.isfinite([low, high]).all():
        raise BadInput(f"{source} holds NaN or infinity")
    if low < 0:
        raise BadInput(f"{source} holds negative loads")
    return load.astype(np.float64)


def check(load: Floats, policies: Sequence[str], settings: SimulationSettings) -> None:
    """Refuse before anything runs what could not run. Raises ProblemError that names the field, or Infeasible."""
    if not policies:
        raise ProblemError("policies", "must name at least one")
    for name in policies:
        policy_named(name)
    if len(set(policies)) != len(policies):
        raise ProblemError("policies", "names one policy twice")
    if settings.hardware is not None:
        hardware_named(settings.hardware)
    if settings.window < 1 or len(load) < LEAST_WINDOWS * settings.window:
        # The first decision fills an empty world; there must be one more, and a window to judge it by.
        few = f"the trace has {len(load)} entries, three windows at least are needed"
        raise ProblemError("window", f"is {settings.window}; {few}")
    own = sorted(_OWN & settings.fields.keys())
    if own:
        raise ProblemError(own[0], "is set by the simulation itself")
    shape = {"ranks": settings.ranks, "slots_per_rank": settings.slots_per_rank, "window": settings.window}
    scale = {"step_tokens": settings.step_tokens, "horizon_steps": settings.horizon_steps}
    Problem.from_dict({"loads": load[: settings.window], **shape, **scale, **settings.fields})


def least_slots(experts: int, ranks: int) -> int:
    """The fewest slots a rank in which every expert fits, and one for copies."""
    return min(experts, -(-experts // ranks) + 1)


def compare(
    load: Floats, policies: Sequence[str], settings: SimulationSettings, progress: Progress | None = None
) -> list[SimulationResult]:
    """One result for each policy, all on the same windows of `load [W, L, E]`. Raises as `check` does."""
    check(load, policies, settings)
    results = []
    for policy in policies:
        on = None if progress is None else _named(progress, policy)
        results.append(simulate(load, replace(settings, policy=policy), on))
    return results


def _named(progress: Progress, policy: str) -> Callable[[int, int], None]:
    return lambda done, total: progress(policy, done, total)


# ---------------------------------------------------------------- the picture


def check_picture(path: Path) -> None:
    """Raises BadInput where `draw` could not work, before the long part begins."""
    from importlib.util import find_spec

    if path.suffix.lower() not in PICTURES:
        raise BadInput(f"--picture {path}: the name must end with {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise BadInput(f"--picture {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise BadInput("--picture needs matplotlib, which is not installed: pip install 'eplane[demo]'")


def draw(path: Path, results: Sequence[SimulationResult], title: str) -> None:
    """Next-window balancedness over the windows, and all moves up to there: one line a policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(11, 7), sharex=True, layout="constrained")
    for result in results:
        at = [w.window for w in result.windows]
        summary = result.summary()
        line = above.plot(
            at, [w.next_mean for w in result.windows], linewidth=1.3, label=f"{result.policy} {summary['next']:.3f}"
        )
        moves = np.cumsum([0 if w.window == 0 else w.moves for w in result.windows])
        below.plot(at, moves, color=line[0].get_color(), linewidth=1.3, label=f"{result.policy} {summary['moves']:,}")
    above.set_title(title, fontsize=10)
    above.set_ylabel("balancedness on the next window")
    above.legend(loc="lower right", fontsize=9)
    below.set_ylabel("moves so far, without the first fill")
    below.set_xlabel("window")
    below.legend(loc="upper left", fontsize=9)
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise BadInput(f"{path} can not be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


# ---------------------------------------------------------------- as a process of its own


def request_of(load: Floats, policies: Sequence[str], settings: SimulationSettings) -> bytes:
    """What the process reads."""
    fields = {name: getattr(settings, name) for name in SimulationSettings.__dataclass_fields__}
    return json.dumps({"load": load.tolist(), "policies": list(policies), "settings": fields}).encode()


def answer(request: Mapping[str, Any], sink: TextIO) -> None:
    """Run one request; lines of JSON tell how far it is and how it ended."""

    def say(line: Mapping[str, Any]) -> None:
        sink.write(json.dumps(line) + "\n")
        sink.flush()

    policies = request["policies"]

    def on(policy: str, done: int, total: int) -> None:
        say({"done": policies.index(policy) * total + done, "total": len(policies) * total})

    try:
        load = np.asarray(request["load"], dtype=np.float64)
        results = compare(load, policies, SimulationSettings(**request["settings"]), on)
    except EPlaneError as error:
        problem = problem_of(error)
        say({"problem": {"code": problem.code.value, "detail": problem.detail}})
    else:
        say({"results": [plain(result.to_dict()) for result in results]})


def main() -> None:
    from controller.solving import die_with_parent

    die_with_parent(int(sys.argv[1]))
    # Ctrl-C in a terminal goes to the whole group; the parent ends this process in its own order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        os.nice(_BACKGROUND)
    # Nothing but lines of the protocol may reach standard output.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8") as lines:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        answer(json.load(sys.stdin), lines)


if __name__ == "__main__":
    main()
