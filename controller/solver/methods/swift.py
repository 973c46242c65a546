"""`swift`: SwiftBalance of vllm-ascend, written anew from its published behaviour.

From the present placement, layer by layer. All redundant copies are taken back and dealt out anew by the window's
load, each to the coldest rank with a free place that lacks the expert; then the hottest rank exchanges one expert
with the coldest rank with which it may, again and again. It is slow from a cold start, and these published rules are
why:

* a pair of ranks sends at most one expert each way in a solve, and an expert that just arrived does not leave again;
* a second copy is taken to leave two thirds of the weight on each, a third one half, and so on, so copies look
  heavier than they are, ranks that hold them look hot, and the exchanges work against that;
* an exchange must gain 1 % of the mean rank load, there are at most 100, a layer under max / mean 1.01 stays;
* unless the summed maximum of all layers, by those weights, falls by 5 %, nothing at all happens.

The mean is each layer's own (the original takes the first layer's for all). Not idempotent, as published.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controller.solver.answer import Answer
from controller.solver.methods.heat import slot_heat, start_table
from controller.solver.problem import EMPTY, Bools, Floats, Ints, Problem
from controller.solver.repair import repair

THRESHOLD, GAIN, KEEP, EXCHANGES, TRANSFERS = 1.01, 0.01, 0.95, 100, 1
BUCKETS = 32
"""New experts of a rank take its free places by number modulo this, as the original's hash sets list them. It matters: of
two copies the one in the later place counts as redundant in the next solve."""


class SwiftPolicy:
    """Few moves, from the present placement."""

    name = "swift"

    def solve(self, problem: Problem) -> Answer:
        load = problem.observed()
        start = start_table(problem, load)
        table = start.copy()
        before = after = 0.0
        for layer in range(problem.layers):
            usable = problem.usable[layer]
            heat = slot_heat(load[layer], start[layer], problem.experts).sum(axis=1)
            mean = float(heat[usable > 0].mean())
            now = end = float(heat.max())
            if mean > 0 and now / mean >= THRESHOLD:
                work = _Layer.of(start[layer], usable, load[layer])
                end = work.exchange(mean)
                if end < now:
                    table[layer] = _settled(start[layer], work.table, usable)
            before, after = before + now, after + end
        kept = after >= KEEP * before
        shape = (problem.layers, problem.slots)
        placement = repair(problem, (start if kept else table).reshape(shape), load)
        note = f"summed maximum {before:.4g} -> {after:.4g}" + (", no 5 % less: nothing moves" if kept else "")
        return Answer.of(problem, placement, policy=self.name, strategy="incremental", decisions=[note])


@dataclass(slots=True)
class _Layer:
    """One layer at work. table [R, K]; weight [E] of one copy; rank_load [R]; sent [R, R] transfers from rank to rank;
    on, arrived [R, E] what a rank holds, and what of it is new."""

    table: Ints
    weight: Floats
    rank_load: Floats
    sent: Ints
    on: Bools
    arrived: Bools
    use: Bools

    @classmethod
    def of(cls, before: Ints, usable: Ints, load: Floats) -> _Layer:
        """Redundant copies taken back and dealt out anew."""
        ranks, experts = len(before), len(load)
        table, home, free = _first_copies(before, usable, experts)
        use = usable > 0
        extra, weight = _more_copies(load, sum(map(len, free)), int(use.sum()))
        held = table != EMPTY
        out = cls(
            table=table,
            weight=weight,
            rank_load=np.where(held, weight[table], 0.0).sum(axis=1),
            sent=np.zeros((ranks, ranks), dtype=np.int64),
            on=np.zeros((ranks, experts), dtype=np.bool_),
            arrived=np.zeros((ranks, experts), dtype=np.bool_),
            use=use,
        )
        rank, place = np.nonzero(held)
        out.on[rank, table[rank, place]] = True
        out._deal(extra, home, free)
        if any(free):
            out._fill(load, home, free)
        return out

    def _put(self, expert: int, source: int, rank: int, place: int) -> None:
        self.table[rank, place] = expert
        self.on[rank, expert] = self.arrived[rank, expert] = True
        self.sent[source, rank] += 1

    def _deal(self, extra: list[int], home: Ints, free: list[list[int]]) -> None:
        """Each copy, heaviest first, to the coldest rank that has a place, lacks it and may still receive from home."""
        for expert in extra:
            source = int(home[expert])
            open_ranks = np.array([bool(places) for places in free]) & ~self.on[:, expert]
            open_ranks &= self.sent[source] < TRANSFERS
            if open_ranks.any():
                rank = int(np.where(open_ranks, self.rank_load, np.inf).argmin())
                self._put(expert, source, rank, free[rank].pop())
                self.rank_load[rank] += self.weight[expert]

    def _fill(self, load: Floats, home: Ints, free: list[list[int]]) -> None:
        """Places left over take the heaviest expert that their rank lacks, by weights that are right this time."""
        counts = self.on.sum(axis=0)
        self.weight = load / np.maximum(counts, 1)
        for rank, places in enumerate(free):
            for place in places:
                order = np.argsort(self.weight, kind="stable")[::-1]
                lacking = order[~self.on[rank, order]]
                if lacking.size:
                    expert = int(lacking[0])
                    self._put(expert, int(home[expert]), rank, place)
                    self.weight[expert] *= counts[expert] / (counts[expert] + 1)
                    counts[expert] += 1
        self.rank_load = np.where(self.table != EMPTY, self.weight[self.table], 0.0).sum(axis=1)

    def exchange(self, mean: float) -> float:
        """Exchange until nothing gains enough; returns the hottest rank's load as the method sees it."""
        for _ in range(EXCHANGES):
            order = np.argsort(self.rank_load, kind="stable")
            order = order[self.use[order]]
            hot = int(order[-1])
            peak = float(self.rank_load[hot])
            if not any(self._trade(hot, int(cold), GAIN * mean) for cold in order[:-1]):
                break
        return peak

    def _trade(self, hot: int, cold: int, gain: float) -> bool:
        """The exchange that leaves the hotter of the two coldest, if it gains enough and they may still exchange."""
        if max(self.sent[hot, cold], self.sent[cold, hot]) >= TRANSFERS:
            return False
        mine, theirs = (
            np.flatnonzero(self.on[a] & ~self.on[b] & ~self.arrived[a]) for a, b in ((hot, cold), (cold, hot))
        )
        if not mine.size or not theirs.size:
            return False
        shift = self.weight[mine][:, None] - self.weight[theirs][None, :]
        after = np.maximum(self.rank_load[hot] - shift, self.rank_load[cold] + shift)
        at = int(after.argmin())
        won = float(self.rank_load[hot]) - float(after.flat[at])
        if won <= 0 or won < gain:
            return False
        give, take = (int(i) for i in np.unravel_index(at, after.shape))
        out, back = int(mine[give]), int(theirs[take])
        self.rank_load[hot] -= shift[give, take]
        self.rank_load[cold] += shift[give, take]
        for rank, leaving, coming, source in ((hot, out, back, cold), (cold, back, out, hot)):
            self.on[rank, leaving] = False
            self._put(coming, source, rank, int(np.flatnonzero(self.table[rank] == leaving)[0]))
        return True


def _first_copies(before: Ints, usable: Ints, experts: int) -> tuple[Ints, Ints, list[list[int]]]:
    """(table with one copy of each expert, its rank [E], free places of each rank), found place by place over ranks."""
    table = np.full_like(before, EMPTY)
    home = np.zeros(experts, dtype=np.int64)
    free: list[list[int]] = [[] for _ in usable]
    seen = np.zeros(experts, dtype=np.bool_)
    for place in range(before.shape[1]):
        for rank in np.flatnonzero(usable > place).tolist():
            expert = int(before[rank, place])
            if expert == EMPTY or seen[expert]:
                free[rank].append(place)
                continue
            seen[expert] = True
            table[rank, place], home[expert] = expert, rank
    return table, home, free


def _more_copies(load: Floats, room: int, ranks: int) -> tuple[list[int], Floats]:
    """(expert of each further copy, heaviest first; weight [E] of a copy): always to the heaviest expert, of which each
    further copy is taken to leave 2/3, 3/4, 4/5, ... of the weight before."""
    weight = load.astype(np.float64).copy()
    more = np.zeros(len(load), dtype=np.int64)
    for _ in range(room):
        # Of equals the last, as in the original's order.
        able = np.flatnonzero(more + 1 < ranks)
        if not able.size:
            break
        best = int(able[::-1][weight[able[::-1]].argmax()])
        weight[best] *= (more[best] + 2) / (more[best] + 3)
        more[best] += 1
    expert_of = np.repeat(np.arange(len(load)), more)
    return expert_of[np.argsort(-weight[expert_of], kind="stable")].tolist(), weight


def _settled(before: Ints, after: Ints, usable: Ints) -> Ints:
    """[R, K] the experts of `after`: those that are in `before` where they are there, new ones in the places between."""
    out = np.full_like(before, EMPTY)
    for rank, count in enumerate(usable.tolist()):
        stay = np.isin(before[rank], after[rank]) & (before[rank] != EMPTY)
        out[rank][stay] = before[rank][stay]
        fresh = np.setdiff1d(after[rank], np.append(before[rank], EMPTY))
        gaps = np.flatnonzero(out[rank, :count] == EMPTY)
        out[rank, gaps[: len(fresh)]] = fresh[np.argsort(fresh % BUCKETS, kind="stable")]
    return out
