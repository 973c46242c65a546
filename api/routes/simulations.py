"""Simulations: the load windows a group has just seen, replayed through policies. Nothing of the group is touched.

One runs at a time in a controller, in a process of its own that gives way to others and ends with its controller.
Results live in the memory of the controller that made them.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request
from fastapi.responses import JSONResponse, Response
from pydantic import Field

from api.access import Group, Operator, Reader, controller_of, desk_of, reading_desk, reply
from api.port import DeskPort, Json, plain
from api.problems import Code, Problem
from api.schemas import ID_PATTERN, Change
from controller.desk import OPTIONS
from controller.simulate import SimulationSettings
from eplane.errors import Conflict, Invalid, NotFound, NotLeader

router = APIRouter(prefix="/v1/groups/{group}/simulations", tags=["simulations"])

KEPT = 16
LIMIT_S = 300.0
_FURTHER = (OPTIONS - {"window"}) | {"shares"}
# The group's settings hold in a group's own world only: another one has no node of theirs.
_OWN_WORLD = ("prior", "node_names", "cells")
SimulationId = Annotated[str, Path(pattern=ID_PATTERN)]


class SimulationRequest(Change):
    policies: list[str] = Field(default=["static", "eplane"], min_length=1, max_length=8)
    window: int | None = Field(
        default=None, ge=1, description="recorded windows in a load window; null: 1, with gate that of the settings"
    )
    ranks: int | None = Field(default=None, ge=1, description="null: as many as the group has")
    slots: int | None = Field(default=None, ge=1, description="of a rank in a layer; null: as the group has")
    hardware: str | None = Field(default=None, description="cost model; null: that of the settings")
    gate: bool = Field(default=False, description="decide as the group's controller: its goals, gate, waves and limits")
    settings: dict[str, Any] = Field(default_factory=dict, description="with gate: instead of the group's own")
    prior: Literal["none", "linear", "live"] | None = Field(
        default=None, description="what serves first; null: the live placement with gate, else none"
    )
    every: int | None = Field(default=None, ge=1, description="windows between two decisions; null: `window`")
    delay: int | None = Field(default=None, ge=0, description="windows until a placement is live; null: as predicted")
    entry_s: float | None = Field(
        default=None, gt=0, description="seconds of a recorded window, for cooldown and limits"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="for the policies, as in a plan")


@dataclass(slots=True)
class Simulation:
    """One run and how far it is. state: RUNNING, DONE, FAILED."""

    group: str
    about: Mapping[str, Json]
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    created_at: float = field(default_factory=time.time)
    state: str = "RUNNING"
    done: int = 0
    total: int | None = None
    sentence: str | None = None
    results: list[Json] | None = None

    def line(self) -> dict[str, Json]:
        names = ("id", "group", "state", "created_at", "done", "total", "sentence")
        return {**{name: getattr(self, name) for name in names}, **self.about}

    def to_json(self) -> dict[str, Json]:
        return {**self.line(), "results": self.results}


class Simulations:
    """The newest simulations of one controller, and the one that runs. For one event loop."""

    def __init__(self, kept: int = KEPT, limit_s: float = LIMIT_S) -> None:
        self._kept = kept
        self._limit_s = limit_s
        self._known: dict[str, Simulation] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, simulation: Simulation, request: bytes) -> None:
        """Begin. Raises Problem while another one runs."""
        if self._task is not None and not self._task.done():
            raise Problem(Code.BUSY, "a simulation runs already in this controller; ask again when it has ended")
        self.keep(simulation)
        self._task = asyncio.create_task(self._run(simulation, request), name=f"simulation {simulation.id}")

    def keep(self, simulation: Simulation) -> None:
        self._known[simulation.id] = simulation
        for name in list(self._known)[: -self._kept]:
            del self._known[name]

    def of(self, group: str) -> list[Simulation]:
        """Newest first."""
        return [s for s in reversed(self._known.values()) if s.group == group]

    async def _run(self, simulation: Simulation, request: bytes) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                said = await _follow(simulation, request)
        except TimeoutError:
            too_long = f"not done after {self._limit_s:g} s: name fewer policies, or set options.budget_ms"
            said = {"problem": {"detail": too_long}}
        except (OSError, ValueError) as error:
            said = {"problem": {"detail": f"the simulation's process failed: {error}"}}
        if "results" in said:
            simulation.state, simulation.results = "DONE", said["results"]
        else:
            simulation.state, simulation.sentence = "FAILED", said["problem"]["detail"]


async def _follow(simulation: Simulation, request: bytes) -> dict[str, Json]:
    """What the process says at last. However this is left, the process has ended then.

    The pipes are read in a thread: asyncio's own subprocesses hang when they are cancelled while they start.
    """
    command = (sys.executable, "-m", "api.simulating", str(os.getpid()))
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        return await asyncio.to_thread(_speak, child, request, simulation)
    finally:
        child.kill()
        child.wait()
        # Its ends of the pipes are closed, so a thread that still reads or writes is let go at once.
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def _speak(child: subprocess.Popen[bytes], request: bytes, simulation: Simulation) -> dict[str, Json]:
    """Send the request, keep count, and return the last line. Raises OSError when none comes."""
    if child.stdin is None or child.stdout is None:
        raise OSError("it has no pipes")
    # A child that ends early closes its end; that it says nothing tells more than the broken pipe.
    with suppress(BrokenPipeError):
        child.stdin.write(request)
        child.stdin.close()
    for line in child.stdout:
        said: dict[str, Json] = json.loads(line)
        if "done" not in said:
            return said
        simulation.done, simulation.total = said["done"], said["total"]
    raise OSError(f"it ended with exit code {child.wait()} and no result")


@router.post("", status_code=202, summary="Replay the recorded windows through policies: 202, then poll Location")
async def simulate(request: Request, group: Group, change: SimulationRequest, changer: Operator) -> Response:
    desk = reading_desk(request, group, "leader")
    if not controller_of(request).is_leader(group):
        raise NotLeader(None)

    async def work() -> Response:
        from api.simulating import check, request_of

        load, steps = await _recorded(desk)
        settings = await _settings(desk, change, (steps[1] - steps[0]) // len(load))
        check(load, change.policies, settings)
        about = {
            "policies": change.policies,
            "window": settings.window,
            "every": settings.every,
            "prior": _prior_of(change),
            "ranks": settings.ranks,
            "slots_per_rank": settings.slots_per_rank,
            "hardware": settings.hardware,
            "gate": change.gate,
            "windows": len(load),
            "first_step": steps[0],
            "last_step": steps[1],
            "actor": changer.actor(change),
            "reason": change.reason,
        }
        simulation = Simulation(group, about)
        simulations_of(request).start(simulation, request_of(load, change.policies, settings))
        return reply(simulation, 202, location=f"/v1/groups/{group}/simulations/{simulation.id}")

    return await changer.answer(work)


@router.get("", summary="The newest simulations of this controller, without their results")
async def list_simulations(request: Request, group: Group, caller: Reader) -> JSONResponse:
    desk_of(request, group)
    return reply([s.line() for s in simulations_of(request).of(group)])


@router.get("/{simulation_id}", summary="One simulation: RUNNING, DONE with results, or FAILED with a sentence")
async def read_simulation(request: Request, group: Group, simulation_id: SimulationId, caller: Reader) -> JSONResponse:
    desk_of(request, group)
    for simulation in simulations_of(request).of(group):
        if simulation.id == simulation_id:
            return reply(simulation)
    # Another controller may have made it: the one that leads.
    reading_desk(request, group, "leader")
    raise NotFound(f"there is no simulation {simulation_id} here; a controller keeps its last {KEPT} only")


def simulations_of(request: Request) -> Simulations:
    simulations: Simulations = request.app.state.simulations
    return simulations


async def _recorded(desk: DeskPort) -> tuple[Any, tuple[int, int]]:
    """`[W, L, E]` of all windows that are kept of the world that serves now, and their first and last step."""
    import numpy as np

    parts: list[Mapping[str, Any]] = []
    world, since = None, -1
    while (found := await desk.recording(since, world)) is not None:
        if str(found["world"][-1]) != world:
            parts = []
        parts.append(found)
        world, since = str(found["world"][-1]), int(found["last_step"][-1])
    if not parts:
        raise Conflict("no load window is recorded yet: there is nothing to simulate on")
    return np.concatenate([part["load"] for part in parts]), (int(parts[0]["first_step"][0]), since)


def _prior_of(asked: SimulationRequest) -> str:
    return asked.prior or ("live" if asked.gate and _at_home(asked) else "linear" if asked.gate else "none")


def _at_home(asked: SimulationRequest) -> bool:
    """Whether the world asked for is the group's own."""
    return asked.ranks is None and asked.slots is None


async def _settings(desk: DeskPort, asked: SimulationRequest, entry_steps: int) -> SimulationSettings:
    """The group's world as it is, with what is asked for otherwise."""
    from api.simulating import of_group

    for name in asked.options:
        if name not in _FURTHER:
            raise Invalid(f"options.{name}"[:80], f"is not known; known are {', '.join(sorted(_FURTHER))}")
    if asked.settings and not asked.gate:
        raise Invalid("settings", "are looked at with gate only")
    placement, config = plain(await desk.placement()), plain(await desk.config())
    world = plain(await desk.status()).get("world") or {}
    own = of_group(placement, config, plain(await desk.nodes()), world)
    if asked.ranks not in (None, own["ranks"]):
        own["fields"].pop("node_of_rank", None)
        own["group"]["drained"] = []
    if not _at_home(asked):
        own |= dict.fromkeys(_OWN_WORLD)
    prior = _prior_of(asked)
    if prior == "live" and own["prior"] is None:
        raise Invalid("prior", "live is a placement of other ranks or slots than are asked for")
    hardware = asked.hardware or config.get("hardware")
    return SimulationSettings(
        **{
            **own,
            "ranks": asked.ranks or own["ranks"],
            "slots_per_rank": asked.slots or own["slots_per_rank"],
            "window": asked.window or (int(config.get("window", 1)) if asked.gate else 1),
            "hardware": hardware or ("demo" if asked.gate else None),
            "gate": asked.gate,
            "fields": {**own["fields"], **asked.options},
            "group": {**own["group"], **asked.settings} if asked.gate else None,
            "prior": own["prior"] if prior == "live" else None if prior == "none" else prior,
            "every": asked.every,
            "delay": asked.delay,
            "entry_s": asked.entry_s,
            "entry_steps": max(1, entry_steps) if asked.gate else None,
        }
    )
