"""Policies side by side on a recorded load: checks what is asked, and runs it.

`python -m api.simulating PARENT` is a simulation as a process of its own: one request on standard input, lines of JSON
on standard output (`{"done", "total"}` while it runs, at last `{"results"}` or `{"problem"}`). A policy's compiled
kernels hold the interpreter while they run, so inside a controller a thread could cost it its lease; a process can not.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, BinaryIO, TextIO

import numpy as np

from api.port import plain
from api.problems import problem_of
from controller.costs import hardware_named
from controller.scene import Scene
from controller.simulate import SimulationResult, SimulationSettings, first_table, least_to_count, simulate
from controller.solver import Problem
from controller.solver.policy import policy_named
from controller.tape import Trace
from eplane.errors import EPlaneError, ProblemError
from eplane.wording import counted

Progress = Callable[[str, int, int], None]
"""Called with the policy, the decisions made so far, and all of them."""

# Fields of a problem that the simulation itself fills in, window after window.
_OWN = frozenset(
    ("load", "loads", "experts", "layers", "window", "ranks", "slots_per_rank", "prior", "in_flight", "policy")
) | {"hardware", "step_tokens", "horizon_steps"}
_BACKGROUND = 10


def check(load: Trace, policies: Sequence[str], settings: SimulationSettings) -> None:
    """Refuse before anything runs what could not run. Raises ProblemError that names the field, or Infeasible."""
    if not policies:
        raise ProblemError("policies", "must name at least one")
    for name in policies:
        policy_named(name)
    if len(set(policies)) != len(policies):
        raise ProblemError("policies", "names one policy twice")
    if settings.hardware is not None:
        hardware_named(settings.hardware)
    own = sorted(_OWN & settings.fields.keys())
    if own:
        raise ProblemError(own[0], "is set by the simulation itself")
    entries, layers, experts = load.shape
    needed = least_to_count(settings) if settings.window > 0 else 1
    if settings.window < 1 or entries < needed:
        few = f"the trace has {counted(entries, 'entry', 'entries')}, {needed} at least are needed"
        raise ProblemError("window", f"is {settings.window}; {few}")
    if settings.controlled:
        for policy in policies:
            Scene.of(replace(settings, policy=policy), layers, experts).check()
        return
    shape = {"ranks": settings.ranks, "slots_per_rank": settings.slots_per_rank, "window": settings.window}
    scale = {"step_tokens": settings.step_tokens, "horizon_steps": settings.horizon_steps}
    prior = first_table(settings, layers, experts)
    Problem.from_dict({"loads": load[: settings.window], "prior": prior, **shape, **scale, **settings.fields})


def least_slots(experts: int, ranks: int) -> int:
    """The fewest slots a rank in which every expert fits, and one for copies."""
    return min(experts, -(-experts // ranks) + 1)


def compare(
    load: Trace, policies: Sequence[str], settings: SimulationSettings, progress: Progress | None = None
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


def of_group(
    placement: Mapping[str, Any],
    config: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    world: Mapping[str, Any],
) -> dict[str, Any]:
    """A group as the REST API shows it, as fields of SimulationSettings: its world, its settings, what serves now."""
    ranks, table = int(placement["ranks"]), placement["p2l"]
    names = {rank: str(node["node"]) for node in nodes for rank in node.get("ranks") or ()}
    known = set(range(ranks)) <= names.keys()
    numbers = (
        {name: number for number, name in enumerate(dict.fromkeys(names[r] for r in range(ranks)))} if known else {}
    )
    fields: dict[str, Any] = {"node_of_rank": [numbers[names[rank]] for rank in range(ranks)]} if known else {}
    if "bundle_bytes" in world:
        fields["bundle_bytes"] = world["bundle_bytes"]
    return {
        "ranks": ranks,
        "slots_per_rank": len(table[0]) // ranks,
        "fields": fields,
        "prior": table,
        "group": dict(config),
        "node_names": [names[rank] for rank in range(ranks)] if known else None,
        "cells": world.get("cells"),
    }


# ---------------------------------------------------------------- as a process of its own


def request_of(load: Trace, policies: Sequence[str], settings: SimulationSettings) -> bytes:
    """What the process reads: a line of JSON, then the load as an array."""
    fields = {name: getattr(settings, name) for name in SimulationSettings.__dataclass_fields__}
    head = io.BytesIO()
    head.write(json.dumps({"policies": list(policies), "settings": fields}).encode() + b"\n")
    np.lib.format.write_array(head, np.asarray(load[: load.shape[0]]), allow_pickle=False)
    return head.getvalue()


def answer(source: BinaryIO, sink: TextIO) -> None:
    """Run one request; lines of JSON tell how far it is and how it ended."""

    def say(line: Mapping[str, Any]) -> None:
        sink.write(json.dumps(line) + "\n")
        sink.flush()

    request: dict[str, Any] = json.loads(source.readline())
    # Not from the pipe itself: a reader of arrays wants to know where it is in a file.
    load = np.lib.format.read_array(io.BytesIO(source.read()), allow_pickle=False)
    policies = request["policies"]

    def on(policy: str, done: int, total: int) -> None:
        say({"done": policies.index(policy) * total + done, "total": len(policies) * total})

    try:
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
        answer(sys.stdin.buffer, lines)


if __name__ == "__main__":
    main()
