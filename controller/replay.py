"""A group's controller in the time of a trace: what it would observe, decide, plan and move, entry after entry.

It decides with the controller's own parts (`Decider`, goals, gate, planner) on facts that a trace gives instead of a
store. What a trace can not show is left out: agents and engines that fail, what a person orders, and the time that a
wave's switch and its acknowledgements take.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from controller.costs import hardware_named
from controller.decide import UNDECIDED, Decider, Found, Said, Solver, problem_of, too_little, undecided
from controller.facts import Facts, facts_of
from controller.gate import Split, level, link_rate
from controller.limits import HOUR_S, Spending, spent
from controller.observe import Seen
from controller.planner import transfer_seconds
from controller.settings import GroupSettings
from controller.sharing import level_shares
from controller.solver import Answer, Problem, solve
from controller.verdict import VerdictKind
from eplane.load import FloatLoad, LoadWindow
from eplane.placement import FloatTable, IntTable, Placement
from eplane.records import EpochPointer
from eplane.routing import TokenSample
from eplane.topology import World

Value = TypeVar("Value")


class InlineSolver:
    """The solver in this process. `fields`: further fields of every problem, as in its JSON form. `speeds [R]`: relative
    ones of the ranks, None: all alike."""

    def __init__(self, fields: Mapping[str, Any] | None = None, speeds: FloatLoad | None = None) -> None:
        self._fields = dict(fields or {})
        self._speeds = speeds

    async def solve(self, problem: Mapping[str, Any], timeout_s: float) -> Answer:
        return solve(self.problem(problem))

    def problem(self, raw: Mapping[str, Any]) -> Problem:
        """What is solved. Raises ProblemError, Infeasible."""
        return Problem.from_dict({**raw, **self._fields})

    async def shares(self, p2l: IntTable, ranks: int, load: FloatLoad, timeout_s: float) -> FloatTable:
        return level_shares(p2l, ranks, load, self._speeds)


@dataclass(frozen=True, slots=True, eq=False)
class Cycle:
    """What one control cycle came to. `refused_by`: the goal that refused or throttled; `found`: what was begun.

    `fitted`: balancedness of the load window under what the cycle leads to; `migration_s`: seconds the plan travels.
    """

    kind: VerdictKind
    sentence: str
    fitted: float
    refused_by: str | None = None
    found: Found | None = None
    migration_s: float = 0.0
    solve_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Coming:
    """A wave that goes live before entry `entry`, at second `at` of the trace."""

    entry: int
    at: float
    split: Split
    moves: int
    bytes: int


class Replay:
    """One group from `start` on. Time is that of the trace: entry `n` begins at second `n * entry_s`.

    delay: entries until a whole plan is live, its waves evenly between; None: as long as its bundles travel over the
    links of the settings' hardware, under their rate limit. routings [L][n][K]: experts that single tokens of the trace go
    to together, for all of it; a sample of one entry alone comes with it. speeds [R]: relative ones of the ranks, None: all
    alike.
    """

    def __init__(
        self,
        world: World,
        settings: GroupSettings,
        start: Placement,
        entry_s: float,
        delay: int | None = None,
        solver: Solver | None = None,
        routings: Any = None,
        speeds: FloatLoad | None = None,
    ) -> None:
        self._routings = routings
        self._speeds = speeds
        self._world = world
        self._settings = settings
        self._solver = solver or InlineSolver()
        self._decider = Decider(self._solver)
        self._live = Split(start, start.even_shares())
        self._hint: FloatTable | None = None
        self._entry_s = entry_s
        self._delay = delay
        self._entry = 0
        self._step = 0
        self._epoch = 1
        self._seen: deque[Seen] = deque(maxlen=settings.history)
        self._coming: deque[_Coming] = deque()
        self._log: deque[Spending] = deque()
        self._last_end: float | None = None

    @property
    def live(self) -> Split:
        """The placement that serves the next entry, and its shares."""
        self._go_live()
        return self._live if self._hint is None else Split(self._live.placement, self._hint)

    @property
    def now(self) -> float:
        """Seconds since the trace began."""
        return self._entry * self._entry_s

    def observe(self, load: FloatLoad, steps: int, sample: TokenSample | None = None) -> FloatLoad:
        """`load [L, E]` tokens fall in `steps` steps; returns `[L, R]` tokens as they fell on the ranks."""
        live = self.live
        ranks = live.placement.rank_load(load, live.shares)
        digest, last = live.placement.digest, self._step + max(1, steps)
        window = LoadWindow(
            self._world.world,
            digest,
            self._step,
            last,
            load,
            np.zeros_like(load),
            complete=True,
            ranks_seen=tuple(range(self._world.ranks)),
        )
        self._step = last
        self._entry += 1
        self._seen.append(Seen(window, ranks, sample, self.now))
        return ranks

    def facts(self) -> Facts:
        """What a controller knows now."""
        live = self.live.placement
        while self._log and self._log[0].at <= self.now - HOUR_S:
            self._log.popleft()
        pointer = EpochPointer(self._epoch, live.digest, self._world.world, self._epoch, "")
        used = spent(self._log, self._last_end, self.now)
        return facts_of(
            self._settings, self._world, pointer, live, tuple(self._seen), used, self._routings, self._speeds
        )

    def place(self) -> None:
        """Start anew from where the policy puts everything in an empty world, for the load seen so far."""
        facts = self.facts()
        problem = problem_of(facts, self._settings.policy, {"prior": None})
        answer = _at_once(self._solver.solve(problem, self._settings.solver_timeout_s))
        placed = Placement(answer.placement, self._world.ranks, self._world.shape.experts)
        self._live, self._hint = _at_once(self._decider.split(facts, placed)), None

    def cycle(self) -> Cycle:
        """One control cycle: shares, then a change that every goal agrees to and later traffic confirmed."""
        started = time.perf_counter()
        facts = self.facts()
        found: Found | None = None
        refused: str | None = None
        seconds = 0.0
        kind, sentence = self._idle(facts) or (VerdictKind.STARTED, "")
        if not sentence:
            self.resplit(facts)
            decided = self._decide(facts)
            if isinstance(decided, Found):
                found, seconds = decided, self._begin(decided)
                sentence = f"a migration begins, {found.told}"
            else:
                kind, sentence = decided
                refused = self._decider.refused_by
        fitted = found.estimate.balancedness_after if found else level(facts.load, self.live, self._speeds)
        return Cycle(kind, sentence, fitted, refused, found, seconds, time.perf_counter() - started)

    def resplit(self, facts: Facts | None = None) -> None:
        """The fast loop: a better split of the live placement's tokens, where the settings want it. No bytes move."""
        facts = facts or self.facts()
        if self._idle(facts) is None:
            self._hint = _at_once(self._decider.resplit(facts, self._hint))

    def _idle(self, facts: Facts) -> Said | None:
        if self._coming:
            left = len(self._coming)
            return VerdictKind.MIGRATING, f"a migration is under way, {left} wave{'s' * (left > 1)} to go"
        return too_little(facts)

    def _decide(self, facts: Facts) -> Found | Said:
        try:
            return _at_once(self._decider.decide(facts))
        except UNDECIDED as error:
            return undecided(error)

    def _begin(self, found: Found) -> float:
        """Have the waves go live one after another; returns the seconds that the bundles travel."""
        world, settings = self._world, self._settings
        rate = link_rate(world, hardware_named(settings.hardware), settings.bytes_per_s)
        at, placement = self.now, found.before.placement
        for number, wave in enumerate(found.waves, start=1):
            placement = wave.applied_to(placement)
            whole = number == len(found.waves)
            split = found.after if whole else Split(placement, placement.even_shares())
            at += transfer_seconds(wave, world.slots, world.shape.bundle_bytes, rate)
            # A switch in the first half of an entry counts for all of it.
            entry = int(at / self._entry_s + 0.5) if self._delay is None else self._spread(number, len(found.waves))
            self._coming.append(_Coming(entry, at, split, len(wave.loads), wave.bytes))
        return at - self.now

    def _spread(self, number: int, of: int) -> int:
        return self._entry + -(-number * (self._delay or 0) // of)

    def _go_live(self) -> None:
        while self._coming and self._coming[0].entry <= self._entry:
            wave = self._coming.popleft()
            self._live, self._hint = wave.split, None
            self._epoch += 1
            at = wave.at if self._delay is None else wave.entry * self._entry_s
            self._log.append(Spending(at, wave.moves, wave.bytes))
            self._last_end = at


def _at_once(work: Coroutine[Any, Any, Value]) -> Value:
    """The result of a coroutine that waits for nothing: here the solver answers in the same process."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    work.close()
    raise RuntimeError("the solver of a replay must answer at once")
