"""`omni`: OmniPlacement (omni-infer), written anew from its published behaviour.

A layer of max / mean under 1.1 stays, and so does one whose max / min exceeds 300. For any other the greedy places
from scratch with no redundant slot a rank, with one, and so on to all there are: the next copy to the expert with
most tokens a copy, at most `LIMIT` copies; longest first onto the least loaded rank that has room and lacks the
expert; ranks dealt out over the nodes in turn. The best of these is taken if max / mean falls by more than 0.05.
Slots beyond its redundancy stay empty. A cold start has nothing to keep: these thresholds do not hold for it.

Under a slot budget the redundancy goes to the heaviest layers only, one slot a rank while it lasts (the layer-wise
static form). The original refuses experts or redundant slots that ranks do not divide evenly; here the last round of
each is uneven instead. It is not idempotent, as published. `omni-swap` is the instruction greedy of the same project.
"""

from __future__ import annotations

import numpy as np

from controller.solver.answer import Answer
from controller.solver.methods.eplb import pack_apart
from controller.solver.methods.heat import slot_heat, start_table
from controller.solver.problem import EMPTY, Floats, Ints, Problem, Strategy
from controller.solver.repair import keep_places, repair

RATIO, GAIN, OUTLIER, LIMIT = 1.1, 0.05, 300.0, 10


class OmniPolicy:
    """From scratch, layer by layer, where a layer is out of balance and it helps."""

    name = "omni"

    def solve(self, problem: Problem) -> Answer:
        load = problem.observed()
        table = start_table(problem, load)
        extra = layer_budget(problem, load)
        changed = sum(
            _place(problem, layer, table[layer], load[layer], int(extra[layer])) for layer in range(problem.layers)
        )
        placement = keep_places(problem, table.reshape(problem.layers, problem.slots))
        decisions = [f"{changed} of {problem.layers} layers placed anew"]
        uneven = (problem.experts % problem.ranks, (problem.slots - problem.experts) % problem.ranks)
        if any(uneven):
            decisions.append(
                "experts and slots do not divide evenly over the ranks, which the published program refuses"
            )
        return Answer.of(
            problem, repair(problem, placement, load), policy=self.name, strategy="greedy", decisions=decisions
        )


def _place(problem: Problem, layer: int, table: Ints, load: Floats, extra: int) -> bool:
    """Place one layer's table [R, K] anew, if that is called for; says whether."""
    usable = problem.usable[layer]
    use = usable > 0
    heat = slot_heat(load, table, problem.experts).sum(axis=1)[use]
    mean = float(heat.mean())
    warm = problem.prior is not None
    if mean <= 0 or (warm and (heat.max() / mean < RATIO or heat.max() / max(float(heat.min()), 1.0) > OUTLIER)):
        return False
    found: list[tuple[float, Ints]] = []
    hosts = int(use.sum())
    most = min(problem.experts + extra, int(usable.sum()))
    for total in [*range(problem.experts, most, hosts), most]:
        plan = np.full_like(table, EMPTY)
        expert_of = _replicate(load, total - problem.experts, hosts)
        pack_apart(load, expert_of, _evenly(usable, total), plan)
        if (plan != EMPTY).sum() == len(expert_of):
            found.append((float(slot_heat(load, plan, problem.experts).sum(axis=1)[use].max()) / mean, plan))
    if not found:
        return False
    best, plan = min(found, key=lambda f: f[0])
    if warm and best >= heat.max() / mean - GAIN:
        return False
    table[:] = _over_nodes(problem, plan, usable)
    return True


def _evenly(usable: Ints, total: int) -> Ints:
    """[R] places in use of each rank, `total` in all: as even as the ranks allow, the last ones short."""
    level = next(k for k in range(1, int(usable.max()) + 1) if int(np.minimum(usable, k).sum()) >= total)
    rooms = np.asarray(np.minimum(usable, level))
    over = int(rooms.sum()) - total
    if over:
        rooms[np.flatnonzero(rooms == level)[-over:]] -= 1
    return rooms


def _over_nodes(problem: Problem, plan: Ints, usable: Ints) -> Ints:
    """[R, K] the ranks of `plan` dealt out over the nodes in turn, where ranks are alike."""
    bound = problem.spread > 1 or problem.strategy is Strategy.HIERARCHICAL or problem.pinned.size > 0
    sizes = np.bincount(problem.node_of_rank, minlength=problem.nodes)
    if bound or np.unique(usable).size > 1 or np.unique(sizes).size > 1:
        return plan
    seats = np.argsort(problem.node_of_rank, kind="stable").reshape(problem.nodes, -1)
    out = np.empty_like(plan)
    out[seats.T.ravel()] = plan
    return out


def static_form(problem: Problem, load: Floats) -> Ints:
    """[L, R, K] from scratch with all the redundancy that each layer's budget allows."""
    table = np.full((problem.layers, problem.ranks, problem.per_rank), EMPTY, dtype=np.int32)
    extra = layer_budget(problem, load)
    for layer in range(problem.layers):
        expert_of = _replicate(load[layer], int(extra[layer]), int((problem.usable[layer] > 0).sum()))
        pack_apart(load[layer], expert_of, problem.usable[layer], table[layer])
    return table


def layer_budget(problem: Problem, load: Floats) -> Ints:
    """[L] redundant slots: all there are, or one a rank for the heaviest layers while the budget lasts."""
    spare = problem.usable.sum(axis=1) - problem.experts
    if problem.slot_budget is None:
        return np.asarray(np.minimum(spare, problem.experts * (LIMIT - 1)))
    out = np.zeros(problem.layers, dtype=np.int64)
    left = problem.slot_budget
    for layer in np.argsort(-load.max(axis=1), kind="stable").tolist():
        out[layer] = min(left, int(spare[layer]), problem.ranks)
        left -= int(out[layer])
    return out


def _replicate(load: Floats, extra: int, ranks: int) -> list[int]:
    """Expert of each item: one of each, and `extra` more, always to the expert with most tokens a copy."""
    counts = np.ones(len(load), dtype=np.int64)
    for _ in range(extra):
        each = np.where(counts < min(LIMIT, ranks), load / counts, -1.0)
        best = int(each.argmax())
        if each[best] < 0:
            break
        counts[best] += 1
    return np.repeat(np.arange(len(load)), counts).tolist()
