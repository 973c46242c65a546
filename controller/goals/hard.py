"""Goals that no one may overrule: a change that breaks one is refused whoever asks for it."""

from __future__ import annotations

import numpy as np

from controller.goals.case import Case
from controller.planner import held_cells, incoming
from eplane.errors import PlacementError, PlanError
from eplane.placement import Placement
from eplane.plan import Decision, Ruling


def _rule(goal: str, broken: str | None, kept: str) -> Decision:
    return Decision(goal, Ruling.YES if broken is None else Ruling.NO, kept if broken is None else broken)


class Coverage:
    """Every wave leads to a valid placement: no expert without a replica, none twice on a rank."""

    name = "coverage"
    hard = True

    def judge(self, case: Case) -> Decision:
        at, broken = case.base, None
        try:
            for wave in case.waves:
                at = wave.applied_to(at)
            if at.digest != case.target.digest:
                broken = f"the waves lead to {at.digest}, not to the target {case.target.digest}"
        except (PlanError, PlacementError) as error:
            broken = str(error)
        return _rule(self.name, broken, f"each of the {len(case.waves)} waves leads to a valid placement")


class Capacity:
    """What a wave brings fits the free cells of every rank, and the reserve stays free."""

    name = "capacity"
    hard = True

    def judge(self, case: Case) -> Decision:
        at, broken = case.base, None
        for wave in case.waves:
            try:
                following = wave.applied_to(at)
            except (PlanError, PlacementError) as error:
                broken = str(error)
                break
            left = case.world.cells - held_cells(at) - incoming(at, following)
            short = np.flatnonzero(left < case.settings.spare_min)
            if short.size:
                rank = int(short[0])
                broken = f"wave {wave.number} leaves rank {rank} {int(left[rank])} free cells, {case.settings.spare_min} must stay"
                break
            at = following
        return _rule(self.name, broken, "every wave fits the free cells of every rank")


class Drained:
    """Nothing lives on a rank of a drained node in the target."""

    name = "drained"
    hard = True

    def judge(self, case: Case) -> Decision:
        broken = drained_rank(case, case.target)
        return _rule(self.name, broken, "no drained node holds an expert")


class Pinned:
    """Pinned experts stay where they are pinned."""

    name = "pinned"
    hard = True

    def judge(self, case: Case) -> Decision:
        broken = unpinned(case, case.target)
        return _rule(self.name, broken, f"{len(case.settings.pinned)} pinned experts are in place")


class Replicas:
    """Every expert has the least number of replicas, on enough different nodes."""

    name = "replicas"
    hard = True

    def judge(self, case: Case) -> Decision:
        broken = too_few_replicas(case, case.target)
        return _rule(self.name, broken, f"every expert has at least {case.settings.min_replicas} replicas")


HARD = (Coverage(), Capacity(), Drained(), Pinned(), Replicas())


def drained_rank(case: Case, placement: Placement) -> str | None:
    """The sentence of the first drained rank that holds something."""
    held = np.flatnonzero((placement.by_rank() >= 0).any(axis=(0, 2))).tolist()
    for rank, node in enumerate(case.world.node_of_rank):
        if node in case.settings.drained and rank in held:
            return f"rank {rank} of the drained node {node} still holds experts"
    return None


def unpinned(case: Case, placement: Placement) -> str | None:
    for layer, expert, rank in case.settings.pinned:
        if layer >= placement.layers or expert >= placement.experts or rank >= placement.ranks:
            return f"the pin [{layer}, {expert}, {rank}] names what this world does not have"
        if expert not in placement.by_rank()[layer, rank]:
            return f"layer {layer}: expert {expert} is not on rank {rank}, where it is pinned"
    return None


def too_few_replicas(case: Case, placement: Placement) -> str | None:
    least = case.settings.min_replicas
    if least > 1:
        short = np.argwhere(placement.replica_count < least)
        if short.size:
            layer, expert = short[0].tolist()
            have = int(placement.replica_count[layer, expert])
            return f"layer {layer}: expert {expert} has {have} replicas, {least} are wanted"
    if case.settings.spread > 1:
        return _too_close(case, placement)
    return None


def _too_close(case: Case, placement: Placement) -> str | None:
    number = {node: i for i, node in enumerate(case.world.nodes)}
    node_of_slot = np.repeat([number[n] for n in case.world.node_of_rank], placement.slots)
    on = np.zeros((placement.layers, placement.experts, len(number)), dtype=bool)
    layer, slot = np.nonzero(placement.p2l >= 0)
    on[layer, placement.p2l[layer, slot], node_of_slot[slot]] = True
    wanted = np.minimum(case.settings.spread, placement.replica_count)
    close = np.argwhere(on.sum(axis=2) < wanted)
    if not close.size:
        return None
    layer_, expert = close[0].tolist()
    return f"layer {layer_}: the replicas of expert {expert} lie on {int(on[layer_, expert].sum())} nodes only"
