"""What a simulated controller stands before: a world, a group's settings and a clock, made from what a simulation asks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from controller.costs import Hardware, hardware_named
from controller.decide import problem_of
from controller.replay import InlineSolver, Replay
from controller.settings import GroupSettings
from controller.solver import Problem, ShareMode, solve
from controller.solver.problem import Bools, Floats
from eplane.errors import PlacementError, ProblemError, TopologyError
from eplane.load import FloatLoad
from eplane.placement import Placement, linear
from eplane.topology import Capabilities, ModelShape, World

if TYPE_CHECKING:
    from controller.simulate import SimulationSettings

SPARE_CELLS_A_LAYER = 2
"""Cells of a rank beyond its slots where nothing else is said, as an engine has them."""
_WORLD_ID = "0" * 16
# Fields of a problem that a world has, and those that the group's settings say in words of their own.
_OF_WORLD = frozenset(("nodes", "node_of_rank", "bundle_bytes", "shares", "fixed_slots"))
_SAID_OTHERWISE = {"max_moves": "max_moves_per_layer", "budget_ms": "solver_budget_ms"}
_SETTINGS = frozenset(item.name for item in fields(GroupSettings))


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """window: entries of the load window; every: between two cycles; split: between two splits of the shares; routings:
    tuples [L][n][K] that stand for the whole trace; speeds: [R] relative ones of the ranks, where they differ."""

    world: World
    group: GroupSettings
    start: Placement
    solver: InlineSolver
    routings: Any
    speeds: Floats | None
    hardware: Hardware
    window: int
    every: int
    split: int
    entry_s: float
    entry_steps: int | None
    step_tokens: float

    @classmethod
    def of(cls, asked: SimulationSettings, layers: int, experts: int) -> Scene:
        """Raises ProblemError or SettingsError that name what does not fit, Infeasible the goal that can not be met."""
        if asked.hardware is None and "hardware" not in (asked.group or {}):
            raise ProblemError("hardware", "is needed to decide as a controller: its gate weighs seconds")
        if not isinstance(asked.slots_per_rank, int):
            raise ProblemError(
                "slots_per_rank", "must be one number to decide as a controller: its worlds have no other"
            )
        group = _group(asked)
        world = _world(asked, layers, experts)
        _known("drained", group.drained, world.nodes)
        hardware = hardware_named(group.hardware)
        every = cls.interval(asked)
        entry_s = asked.entry_s or group.interval_s / every
        others = {n: v for n, v in asked.fields.items() if n not in _OF_WORLD | _SETTINGS | _SAID_OTHERWISE.keys()}
        if asked.entry_steps is None:
            # A trace that does not tell its steps can not tell how many of them the settings' horizon has.
            others.setdefault("horizon_steps", asked.horizon_steps)
        # Facts of the trace, not only of the solver: the gate weighs them too.
        routings = others.pop("routing_sample", None)
        speeds = _speeds(asked, world)
        return cls(
            world=world,
            group=group,
            start=_start(asked, world),
            solver=InlineSolver(others, speeds),
            routings=routings,
            speeds=speeds,
            hardware=hardware,
            window=group.window,
            every=every,
            split=min(every, _interval(group.interval_s, asked.entry_s, every)),
            entry_s=entry_s,
            entry_steps=asked.entry_steps,
            step_tokens=asked.step_tokens or hardware.tokens_a_rank * world.ranks,
        )

    @staticmethod
    def interval(asked: SimulationSettings) -> int:
        """Entries between two cycles."""
        return asked.every or _interval(_group(asked).interval_s, asked.entry_s, asked.window)

    def check(self) -> None:
        """Raises Infeasible where no placement meets the settings' goals in this world, ProblemError for what is not in it."""
        replay = Replay(self.world, self.group, self.start, self.entry_s, routings=self.routings, speeds=self.speeds)
        replay.observe(np.zeros((self.world.shape.layers, self.world.shape.experts)), 1)
        self.solver.problem(problem_of(replay.facts(), self.group.policy))

    @property
    def drained(self) -> Bools:
        """[R] True: the rank is to hold nothing."""
        return np.asarray([node in self.group.drained for node in self.world.node_of_rank])

    def steps_of(self, load: FloatLoad) -> int:
        """Steps in which one entry `load [L, E]` fell."""
        if self.entry_steps is not None:
            return max(1, self.entry_steps)
        return max(1, round(float(load.sum()) / len(load) / self.step_tokens))


def _interval(interval_s: float, entry_s: float | None, otherwise: int) -> int:
    return otherwise if entry_s is None else max(1, round(interval_s / entry_s))


def _group(asked: SimulationSettings) -> GroupSettings:
    """The group's settings, with what is asked for by name instead."""
    values: dict[str, Any] = dict(asked.group or {})
    values["policy"] = asked.policy
    values["window"] = asked.window
    if asked.hardware is not None:
        values["hardware"] = asked.hardware
    for name, value in asked.fields.items():
        name = _SAID_OTHERWISE.get(name, name)
        if name in _SETTINGS and not (name == "shares" and isinstance(value, str)):
            values[name] = value
    history = values.get("history", GroupSettings().history)
    if isinstance(history, int):
        values["history"] = max(history, asked.window)
    return GroupSettings().patched(values)


def _world(asked: SimulationSettings, layers: int, experts: int) -> World:
    shape = {name: asked.fields[name] for name in _OF_WORLD - {"shares"} if name in asked.fields}
    shares = asked.fields.get("shares", ShareMode.WEIGHTED.value)
    shares = ShareMode.WEIGHTED.value if isinstance(shares, bool) else shares
    # Read once as a problem, which refuses what a world could not be and says which goal it breaks.
    problem = Problem.from_dict(
        {
            "experts": experts,
            "layers": layers,
            "ranks": asked.ranks,
            "slots_per_rank": asked.slots_per_rank,
            "shares": shares,
            **shape,
        }
    )
    names = list(asked.node_names or [f"n{node}" for node in problem.node_of_rank.tolist()])
    if len(names) != asked.ranks:
        raise ProblemError("node_names", f"names {len(names)} ranks, there are {asked.ranks}")
    slots = problem.per_rank
    cells = layers * (slots + SPARE_CELLS_A_LAYER) if asked.cells is None else asked.cells
    can = Capabilities(weighted_shares=problem.shares is ShareMode.WEIGHTED, free_slot_order=not problem.fixed_slots)
    try:
        model = ModelShape("trace", layers, experts, 1, problem.bundle_bytes)
        return World("simulation", _WORLD_ID, tuple(names), model, slots, cells, can)
    except TopologyError as error:
        raise ProblemError("cells", str(error)) from None


def _speeds(asked: SimulationSettings, world: World) -> Floats | None:
    """[R] of the field `capacity`, None without it."""
    if asked.fields.get("capacity") is None:
        return None
    raw = {"experts": 1, "ranks": world.ranks, "slots_per_rank": 1, "capacity": asked.fields["capacity"]}
    problem = Problem.from_dict(raw)
    if problem.drained.any():
        rank = int(np.flatnonzero(problem.drained)[0])
        raise ProblemError(
            "capacity", f"is 0 for rank {rank}: what a controller is to leave is a node, named by the setting `drained`"
        )
    return problem.capacity


def _start(asked: SimulationSettings, world: World) -> Placement:
    """The placement that serves first. Where the policy is to fill an empty world, its first load falls on a linear one."""
    shape = world.shape
    if asked.prior is None or isinstance(asked.prior, str):
        if asked.prior not in (None, "linear"):
            raise ProblemError("prior", f"is {asked.prior!r:.40}, must be linear, a table or nothing")
        return linear(shape.layers, shape.experts, world.ranks, world.slots)
    raw = {"experts": shape.experts, "layers": shape.layers, "ranks": world.ranks, "slots_per_rank": world.slots}
    kept = Problem.from_dict({**raw, "prior": asked.prior, "policy": "static"})
    try:
        return Placement(kept.prior if kept.prior is not None else solve(kept).placement, world.ranks, shape.experts)
    except PlacementError as error:
        raise ProblemError("prior", f"is no placement: {error}") from None


def _known(name: str, nodes: Iterable[str], known: Iterable[str]) -> None:
    for node in nodes:
        if node not in known:
            raise ProblemError(name, f"names node {node}; the nodes here are {', '.join(known)}")
