"""Is a change worth it? Predicted gain against cost, with hysteresis, and confirmed on traffic that came after it was found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from controller.costs import Hardware, crossing_part, hardware_named, layer_s, mean_load_s
from controller.observe import balancedness, mean_balancedness
from controller.planner import transfer_seconds
from controller.settings import GroupSettings
from controller.solver import Problem
from controller.solver.problem import Floats
from controller.solver.touched import LEAST_TUPLES, counts_nodes, nodes_of_layers
from eplane.load import FloatLoad
from eplane.placement import FloatTable, Placement
from eplane.plan import Prediction, WavePlan
from eplane.topology import World

# A confirmed gain may be smaller than the promised one, but not by more than this part.
CONFIRM_PART = 0.6


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a change is worth on one load. `part`: of the predicted step time that is saved; seconds over the horizon."""

    act: bool
    part: float
    balancedness_before: float
    balancedness_after: float
    gain_s: float
    cost_s: float
    sentence: str

    def prediction(self, waves: Sequence[WavePlan]) -> Prediction:
        return Prediction(
            self.balancedness_before,
            self.balancedness_after,
            self.gain_s,
            self.cost_s,
            sum(wave.bytes for wave in waves),
            sum(len(wave.loads) for wave in waves),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Split:
    """A placement and how its tokens are split."""

    placement: Placement
    shares: FloatTable


def estimate(
    world: World,
    load: FloatLoad,
    before: Split,
    after: Split,
    waves: Sequence[WavePlan],
    settings: GroupSettings,
    step_tokens: float | None = None,
    routings: Any = None,
    speeds: Floats | None = None,
) -> Estimate:
    """Judge the change on `load [L, E]`; `step_tokens`: routed tokens of a step and layer, None: the preset's; `routings
    [L, n, K]` sampled from it: what nodes touched cost, on hardware that sends a token once to each, or as the setting
    `cross_node_weight` has it; `speeds [R]`: relative ones of the ranks, None: all alike.

    The gain is the saved part of the predicted step time over the horizon: with the preset `demo` each rank counts as a
    device of its own, so the part is that of the tokens of the fullest ranks. The cost is the time that bundles travel,
    times the part of serving that travelling disturbs.
    """
    hardware = hardware_named(settings.hardware)
    weight = settings.cross_node_weight
    routings = routings if hardware.once_a_node or weight is not None else None
    problem = _problem(world, load, step_tokens, routings, speeds)
    nodes = _nodes(problem, load, before, after)
    slow, fast, saved = _seconds(problem, load, before, after, hardware, weight, nodes)
    part = (slow - fast + saved) / slow if slow > 0 else 0.0
    gain_s = part * settings.horizon_s
    cost_s = travel_s(world, waves, hardware, settings.bytes_per_s) * settings.interference
    was, becomes = (level(load, split, speeds) for split in (before, after))
    act, why = weigh(part, gain_s, cost_s, settings)
    note = " (preset demo: each rank taken as a device of its own)" if settings.hardware == "demo" else ""
    sentence = f"{why}: predicted balancedness {was:.3f} to {becomes:.3f}, {part:.1%} of the step time{note}"
    if nodes is not None and weight != 0:
        sentence += f", nodes touched a token {np.nanmean(nodes[0]):.2f} to {np.nanmean(nodes[1]):.2f} in it"
        if weight is not None and slow > 0:
            sentence += f", weighed as {saved / slow:.1%} by cross_node_weight {weight:g}"
    return Estimate(act, part, was, becomes, gain_s, cost_s, sentence)


def _nodes(problem: Problem, load: FloatLoad, before: Split, after: Split) -> tuple[Floats, Floats] | None:
    """[L] nodes that a token touches before and after, NaN for a layer whose sample says too little; None where all do."""
    if not counts_nodes(problem):
        return None
    tuples = np.array([len(ids) for ids in problem.routing_sample or ()])
    told = (tuples >= LEAST_TUPLES) & (load.sum(axis=1) > 0)
    if not told.any():
        return None
    was, becomes = (
        np.where(told, nodes_of_layers(problem, s.placement.p2l, s.shares), np.nan) for s in (before, after)
    )
    return was, becomes


def _seconds(
    problem: Problem,
    load: FloatLoad,
    before: Split,
    after: Split,
    hardware: Hardware,
    weight: float | None,
    nodes: tuple[Floats, Floats] | None,
) -> tuple[float, float, float]:
    """Predicted seconds of the MoE layers of a step, before and after, and what fewer nodes are worth beside them.

    A weight takes the place of what nodes cost on the hardware, as it does in the solver: their links then look the same
    before and after. Its unit is a layer's max / mean, and one more of that is worth what the mean load of a rank takes.
    """
    crossing = None if weight is None else crossing_part(problem, before.placement.p2l, before.shares, hardware)
    slow, fast = (
        float(layer_s(problem, load, s.placement.p2l, s.shares, hardware, crossing).sum()) for s in (before, after)
    )
    if weight is None or crossing is None or nodes is None:
        return slow, fast, 0.0
    unit = mean_load_s(problem, hardware, crossing)
    return slow, fast, weight * float(np.nansum(unit * (nodes[0] - nodes[1])))


def nodes_worth(
    world: World, load: FloatLoad, before: Split, after: Split, weight: float | None, routings: Any
) -> float:
    """Tokens of the fullest ranks, summed over layers, that fewer nodes touched are worth at `weight`; below 0 for more.

    0 where the weight is left to the hardware, or where too few routings tell.
    """
    nodes = None if weight is None else _nodes(_problem(world, load, None, routings), load, before, after)
    if weight is None or nodes is None:
        return 0.0
    return weight * float(np.nansum(load.sum(axis=1) / world.ranks * (nodes[0] - nodes[1])))


def weigh(part: float, gain_s: float, cost_s: float, settings: GroupSettings) -> tuple[bool, str]:
    """Whether a change pays that saves `part` of the step time, so `gain_s` over the horizon, and costs `cost_s`; and why."""
    if not np.isfinite([part, gain_s, cost_s]).all():
        return False, "the predicted times are not finite"
    if part < settings.min_gain or part <= 0:
        return False, f"not worth it, less than {settings.min_gain:.1%} would be saved"
    if gain_s <= cost_s:
        return (
            False,
            f"not worth it, {gain_s:.2g} s saved in {settings.horizon_s:g} s for {cost_s:.2g} s of disturbance",
        )
    return True, f"worth it, {gain_s:.2g} s saved in {settings.horizon_s:g} s for {cost_s:.2g} s of disturbance"


def confirmed(promised: Estimate, later: Estimate, settings: GroupSettings) -> bool:
    """Whether a change found on older traffic also pays on traffic that came after: the guard against fitting noise."""
    return later.part >= max(settings.min_gain, 0.0) * CONFIRM_PART and later.part >= promised.part * (1 - CONFIRM_PART)


def level(load: FloatLoad, split: Split, speeds: Floats | None = None) -> float:
    """Balancedness of `load` under a placement, averaged over the layers with tokens; 1 without any."""
    found = mean_balancedness(balancedness(split.placement.rank_load(load, split.shares), speeds))
    return 1.0 if found is None else found


def predicted_s(
    world: World,
    load: FloatLoad,
    split: Split,
    hardware: Hardware,
    step_tokens: float | None = None,
    speeds: Floats | None = None,
) -> float:
    """Predicted seconds of all MoE layers of one step. `speeds [R]`: relative ones of the ranks, None: all alike."""
    problem = _problem(world, load, step_tokens, None, speeds)
    return float(layer_s(problem, load, split.placement.p2l, split.shares, hardware).sum())


def _problem(
    world: World, load: FloatLoad, step_tokens: float | None, routings: Any, speeds: Floats | None = None
) -> Problem:
    number = {node: i for i, node in enumerate(world.nodes)}
    return Problem.of(
        load,
        world.ranks,
        world.slots,
        node_of_rank=[number[node] for node in world.node_of_rank],
        bundle_bytes=world.shape.bundle_bytes,
        step_tokens=step_tokens,
        routing_sample=routings,
        capacity=speeds,
    )


def link_rate(world: World, hardware: Hardware, bytes_per_s: float | None) -> float:
    """Bytes a second that a rank receives or serves: the slower links where there are several nodes, or the rate limit."""
    link = hardware.far_s if len(world.nodes) > 1 else hardware.near_s
    return link if bytes_per_s is None else min(link, bytes_per_s)


def travel_s(world: World, waves: Sequence[WavePlan], hardware: Hardware, bytes_per_s: float | None) -> float:
    """Seconds in which bundles travel."""
    rate = link_rate(world, hardware, bytes_per_s)
    return sum(transfer_seconds(wave, world.slots, world.shape.bundle_bytes, rate) for wave in waves)
