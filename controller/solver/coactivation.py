"""Co-activation: experts that fire together on few nodes, within a slack of balance, from sampled routings.

Where balance is free to choose, it scatters experts that the same tokens go to, and each token is sent to more nodes than
it need be. For each layer this looks, beside the placement that balance found, from that one and from the present one,
for exchanges between nodes that lower

    F + weight * nodes touched a token + price * moves

with F, the price and all hard goals of the balance search, and takes the best of the four (present, balanced, and both
after exchanges). The expected slowest rank (over the scenarios of the forecast, with the risk term: the same model of
the next window that balance is found with, and the one that knows that experts of a topic swell together) stays within
`node_slack` of what balance alone has. A small sample must not decide: the search sees one half of it and counts a gain
only as far as it exceeds its standard error; the other half judges the whole change, again at its lower confidence bound.

Taking the answer as the next present placement the same comparison is made again until it changes nothing, so a second
solve moves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from controller.costs import hardware_named, node_price
from controller.solver.answer import Answer
from controller.solver.compiled import nodes as kernel
from controller.solver.measure import count_moves, even_shares
from controller.solver.methods.eplane import PART_SEEN, prepare, weighted
from controller.solver.problem import EMPTY, Floats, Ints, Problem, ShareMode, Strategy
from controller.solver.repair import keep_places, repair
from controller.solver.search import FREE, over
from controller.solver.touched import LEAST_TUPLES, fitted, judged, touched

NODE_WEIGHT = 0.3
"""Default price of a node more a token, in max / mean of one layer: what an H800 node's links ask at 1,024 routed tokens a
rank of an engine that sends a token once to each node."""
SURE, JUDGED_SURE = 1.0, 3.0
"""Standard errors taken off a gain: of one exchange in the half that is searched, of all together in the other."""
HOLD = 1.5
"""The present placement may stay until it exceeds the slack by half: a limit that it was placed against must not, when it
shifts a little, ask for moves."""
BALANCE_PART = 0.6
"""Part of a time budget that balance may use."""
ROUNDS = 4
NODES, LATE = "nodes touched a token", "time ran out"
EAGER = 10.0
"""From nothing moves are free: exchanges first with this many times the weight, which leads to better optima."""
STEPS_A_CALL = 32


def solve_near(problem: Problem, balanced: Callable[[Problem], Answer]) -> Answer:
    """Solve with balance first, then nodes touched; `balanced` solves without looking at the sample."""
    started = time.perf_counter()
    deadline = None if problem.budget_ms is None else started + problem.budget_ms / 1e3
    why = refusal(problem)
    if why is not None:
        alone = balanced(replace(problem, routing_sample=None))
        return _answer(problem, alone, alone.placement, [*alone.decisions, why])
    bare = replace(problem, routing_sample=None, budget_ms=_part(deadline))
    alone = balanced(bare)
    first = _Round(problem, bare, alone.placement, deadline)
    placement = first.run(range(problem.layers))
    changed = first.changed()
    # Each next round asks what a solve from this answer would do, and does it. Under a cap on moves there is but one: the
    # next solve has moves of its own. From nothing, moves are free.
    bare = replace(bare, max_moves=None)
    for _ in range(ROUNDS - 1 if problem.max_moves is None or problem.prior is None else 0):
        if not changed or over(deadline):
            break
        near = replace(bare, budget_ms=_part(deadline)).with_prior(placement)
        again = _Round(replace(problem, prior=near.prior, max_moves=None), near, balanced(near).placement, deadline)
        placement = again.run(changed)
        changed = again.changed()
        for layer in changed:
            first.choices[layer].becomes(again.choices[layer])
    if problem.fixed_slots:
        placement = keep_places(problem, placement)
    decisions = first.explain(placement, [x for x in alone.decisions if not x.startswith(LATE)])
    if over(deadline) or len(decisions) < len(alone.decisions):
        decisions.append(f"{LATE} after {problem.budget_ms:g} ms: the best placement so far")
    return _answer(problem, alone, placement, decisions)


def refusal(problem: Problem) -> str | None:
    """Why no layer of this problem looks at nodes touched, or None."""
    if weight_of_node(problem) == 0:
        why = "cross_node_weight is 0" if problem.cross_node_weight == 0 else f"to {problem.hardware} they cost nothing"
        return f"{NODES} do not count: {why}"
    if problem.strategy is Strategy.HIERARCHICAL:
        return f"{NODES} stay as they are: expert groups are bound to their nodes"
    if max(map(len, problem.routing_sample or ()), default=0) < LEAST_TUPLES:
        return f"{NODES} do not count: no layer has {LEAST_TUPLES} sampled tuples"
    return None


def weight_of_node(problem: Problem) -> float:
    """Price of a node more a token in units of F, which sees a part of what the slowest rank gains, as for moves: given, or
    from the hardware, or the default."""
    weight = NODE_WEIGHT if problem.cross_node_weight is None else problem.cross_node_weight
    if problem.cross_node_weight is None and problem.hardware is not None:
        weight = node_price(problem, hardware_named(problem.hardware))
    return PART_SEEN * weight


def _part(deadline: float | None) -> float | None:
    """Milliseconds that balance may use of what is left."""
    return None if deadline is None else max(deadline - time.perf_counter(), 0.0) * 1e3 * BALANCE_PART


def _alike(one: Ints, other: Ints) -> bool:
    """Do two tables [R, K] have the same experts on the same ranks?"""
    return bool((np.sort(one, axis=1) == np.sort(other, axis=1)).all())


def _answer(problem: Problem, alone: Answer, placement: Ints, decisions: list[str]) -> Answer:
    shares = None
    if problem.shares is ShareMode.WEIGHTED:
        shares = alone.shares if placement is alone.placement else weighted(problem, placement, prepare(problem)[1])
    return Answer.of(
        problem, placement, policy=alone.policy, strategy=alone.strategy, decisions=decisions, shares=shares
    )


@dataclass(slots=True)
class _Choice:
    """What was weighed for one layer. nodes: touched a token before (present; balanced at a cold start) and after, on the
    judged half; slowest: expected slowest rank of balance alone and of what was taken; told: why nothing was weighed."""

    nodes: tuple[float, float] = (0.0, 0.0)
    slowest: tuple[float, float] = (0.0, 0.0)
    told: str = ""

    def becomes(self, later: _Choice) -> None:
        """A later round took something else."""
        if not later.told:
            self.nodes, self.slowest = (self.nodes[0], later.nodes[1]), (self.slowest[0], later.slowest[1])


@dataclass(slots=True)
class _Candidate:
    """table [R, K]; cost: F + price of moves; slowest: expected slowest rank; nodes [n] touched by each judged tuple."""

    name: str
    table: Ints
    f: float
    cost: float
    slowest: float
    nodes: Floats


class _Round:
    """One comparison of all layers from one present placement."""

    def __init__(self, problem: Problem, bare: Problem, balance: Ints, deadline: float | None) -> None:
        self.problem, self.deadline = problem, deadline
        self.search, seen, _ = prepare(bare)
        shape = self.search.tables.shape
        self.balance = balance.reshape(shape)
        self.start: Ints | None = None
        if problem.prior is not None:
            self.start = repair(bare, problem.prior, seen.mean.astype(np.float64)).reshape(shape)
        self.tables = self.balance.copy()
        self.samples = problem.routing_sample or ()
        self.weight = weight_of_node(problem)
        self.held = problem.observed().sum(axis=1) < problem.min_tokens
        self.choices = [_Choice() for _ in range(problem.layers)]
        self.pick = np.zeros((3, 4), dtype=np.int64)

    def run(self, layers: range | list[int]) -> Ints:
        """[L, P] the best of all candidates in `layers`, the present placement (or, without one, balance) elsewhere."""
        for layer in range(self.problem.layers):
            if layer in layers and not over(self.deadline):
                self._choose(layer)
            elif layer in layers:
                self.choices[layer].told = "time ran out before nodes were looked at"
            elif self.start is not None:
                self.tables[layer] = self.start[layer]
        return self.tables.reshape(self.problem.layers, self.problem.slots).copy()

    def changed(self) -> list[int]:
        """Layers that did not simply keep the present placement."""
        if self.start is None:
            return list(range(self.problem.layers))
        pairs = zip(self.tables, self.start, strict=True)
        return [layer for layer, (new, old) in enumerate(pairs) if not _alike(new, old)]

    def _choose(self, layer: int) -> None:
        p, choice, sample = self.problem, self.choices[layer], self.samples[layer]
        if len(sample) < LEAST_TUPLES:
            choice.told = f"{len(sample)} sampled tuples say too little of nodes touched, {LEAST_TUPLES} are needed"
            return
        if self.start is not None and self.held[layer]:
            return
        tokens = kernel.tokens_of(fitted(sample), p.experts, p.nodes, p.slots)
        balance = self._measure("balanced", layer, self.balance[layer], tokens)
        cap = balance.slowest * (1 + p.node_slack)
        candidates = [balance, self._exchanged(layer, balance, tokens, cap)]
        present = None
        if self.start is not None:
            present = self._measure("present", layer, self.start[layer], tokens)
            if self._may_stay(present, balance):
                offset = float((balance.nodes - present.nodes).mean())
                for candidate in candidates:
                    candidate.cost += self.weight * offset
                candidates.append(present)
                if not _alike(present.table, balance.table):
                    candidates.append(self._exchanged(layer, present, tokens, cap))
            if p.min_improvement > 0:
                least = present.f * (1 - p.min_improvement)
                candidates = [c for c in candidates if c in (balance, present) or c.f <= least]
        best = min(candidates, key=lambda c: c.cost)
        stays = present if present in candidates else None
        if stays is not None and best.cost > stays.cost - kernel.LEAST_GAIN * stays.f:
            best = stays
        self.tables[layer] = best.table
        before = balance if present is None else present
        choice.nodes = float(before.nodes.mean()), float(best.nodes.mean())
        choice.slowest = balance.slowest, best.slowest

    def _may_stay(self, present: _Candidate, balance: _Candidate) -> bool:
        """Not slower than the slack allows, and no more slots used than balance uses where they are short."""
        if self.problem.slot_budget is not None and (present.table != EMPTY).sum() > (balance.table != EMPTY).sum():
            return False
        return present.slowest <= balance.slowest * (1 + HOLD * self.problem.node_slack)

    def _measure(self, name: str, layer: int, table: Ints, tokens: kernel.Tokens) -> _Candidate:
        p, search = self.problem, self.search
        rules = search.begin(layer, table)
        flat = table.reshape(-1)
        shares = even_shares(flat[None], p.experts)[0]
        return _Candidate(
            name=name,
            table=table.copy(),
            f=float(search.objective[layer]),
            cost=search.price_of(layer) if p.prior is not None else float(search.objective[layer]),
            slowest=float(kernel.slowest(search.state, rules, tokens)),
            nodes=touched(p, judged(self.samples[layer]), flat, shares),
        )

    def _exchanged(self, layer: int, base: _Candidate, tokens: kernel.Tokens, cap: float) -> _Candidate:
        """The base after exchanges. Its cost counts the nodes it saves over the base as far as they are sure."""
        p, search = self.problem, self.search
        rules = search.begin(layer, base.table)
        kernel.setup_tokens(search.state, tokens)
        left = search.room(layer) - int(search.moved[layer])
        steps = FREE if self.deadline is None else STEPS_A_CALL
        for eager in (EAGER, 1.0) if p.prior is None else (1.0,):
            goal = kernel.Goal(self.weight * eager, cap, SURE)
            settled = 0
            while not settled and not over(self.deadline):
                _, moves, settled = kernel.lower(search.state, rules, tokens, goal, left, steps, self.pick)
                left -= moves
        found = self._measure(f"{base.name}, exchanged", layer, search.state.table, tokens)
        change = found.nodes - base.nodes
        sure = JUDGED_SURE * float(change.std()) / len(change) ** 0.5
        found.cost += self.weight * (float(change.mean()) + sure)
        return found

    def explain(self, placement: Ints, sentences: Sequence[str]) -> list[str]:
        """The sentences of balance, with what was done for nodes touched, and why nothing was."""
        p, out = self.problem, list(sentences)
        moves = count_moves(p.prior, placement, p.ranks, p.experts)
        tables = placement.reshape(self.tables.shape)
        for layer, choice in enumerate(self.choices):
            if choice.told:
                out[layer] += f"; {choice.told}"
            if choice.told or (self.start is not None and self.held[layer]):
                continue
            as_balanced = _alike(tables[layer], self.balance[layer])
            stays = self.start is not None and _alike(tables[layer], self.start[layer])
            nodes = f"{NODES} {choice.nodes[0]:.2f} -> {choice.nodes[1]:.2f}"
            slow = f"predicted slowest rank {choice.slowest[1]:.3f} where balance alone has {choice.slowest[0]:.3f}"
            if as_balanced:
                nodes = f"{NODES} {choice.nodes[1]:.2f}" if stays or self.start is None else nodes
                out[layer] += f"; {nodes}, no exchange surely lowers that by what it costs"
            elif stays:
                out[layer] = (
                    f"layer {layer}: stays, what balance gains would cost more in {NODES} ({choice.nodes[1]:.2f})"
                )
            elif self.start is None:
                out[layer] = f"layer {layer}: placed from scratch, experts that fire together near each other: "
                out[layer] += f"{nodes} against balance alone, {slow}"
            else:
                out[layer] = f"layer {layer}: experts that fire together near each other: {nodes}, {slow}, "
                out[layer] += f"{moves[layer]} moves"
        return out
