"""One group as a controller process knows it, leader or not: its records, its load, its ranks' words, its last verdict."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from controller.decide import Decider, Solver
from controller.metrics import Metrics
from controller.observe import WindowBook
from controller.roster import Roster
from controller.state import GroupState
from controller.verdict import Verdict, VerdictKind
from eplane.clock import Clock
from eplane.keys import GroupKeys
from eplane.placement import FloatTable
from eplane.store.base import Store
from eplane.store.mirror import Mirror

VERDICTS_KEPT = 256
TABLES_KEPT = 8
HINT_AGAIN_S = 5.0
# Epochs whose placements counts may still come in for.
LATE_EPOCHS = 8


class Hint:
    """Shares for the placement `digest`; dropped by a rank that serves another."""

    def __init__(self, digest: str, shares: FloatTable) -> None:
        self.digest = digest
        self.shares = shares
        # Made once: every agent is told the same.
        self.json: dict[str, object] = {
            "digest": digest,
            "shares": [[round(x, 9) for x in row] for row in shares.tolist()],
        }


@dataclass(eq=False)
class Group:
    """Lives as long as the process; what belongs to one term of leadership is in `Lead`."""

    name: str
    store: Store
    mirror: Mirror
    state: GroupState
    solver: Solver
    clock: Clock
    metrics: Metrics
    book: WindowBook = field(default_factory=WindowBook)
    roster: Roster = field(default_factory=Roster)
    verdicts: deque[Verdict] = field(default_factory=lambda: deque(maxlen=VERDICTS_KEPT))
    balance: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=4096))
    hint: Hint | None = None
    first_shares: dict[str, FloatTable] = field(default_factory=dict)
    _booked: tuple[str, int] | None = None
    _counted: Counter[str] = field(default_factory=Counter)
    _told: dict[str, tuple[str, int, float]] = field(default_factory=dict)

    @property
    def keys(self) -> GroupKeys:
        return self.state.keys

    def new_decider(self) -> Decider:
        return Decider(self.solver, self.metrics.solve_seconds.labels(self.name).time)

    def speak(self, kind: VerdictKind, sentence: str) -> Verdict:
        verdict = Verdict(self.clock.now(), kind, sentence)
        self.verdicts.append(verdict)
        self.metrics.verdicts.labels(self.name, kind.value).inc()
        return verdict

    def start_with(self, digest: str, shares: FloatTable) -> None:
        """The shares that the table of a planned placement shall start with."""
        while len(self.first_shares) >= TABLES_KEPT:
            self.first_shares.pop(next(iter(self.first_shares)))
        self.first_shares[digest] = shares

    def open_book(self) -> None:
        """Have the book count for the adopted world, under the live placement and the few before it."""
        world, pointer = self.state.world(), self.state.epoch()
        if world is None or pointer is None:
            self.book.leave()
            self._booked = None
            return
        self.book.enter(world.world)
        if self._booked == (pointer.world, pointer.epoch):
            return
        histories = self.state.histories()
        for epoch in range(max(1, pointer.epoch - LATE_EPOCHS), pointer.epoch + 1):
            record = histories.get(epoch)
            if record is not None and record.world == pointer.world:
                self.book.know(self.state.placement(epoch))
        self._booked = (pointer.world, pointer.epoch)

    def hint_for(self, node: str, incarnation: str) -> dict[str, object] | None:
        """The hint, if this life of the node's agent was not told it lately. A reply may be lost, so it is told again."""
        if self.hint is None:
            return None
        now, told = self.clock.monotonic(), self._told.get(node)
        if told is not None and told[:2] == (incarnation, id(self.hint)) and now - told[2] < HINT_AGAIN_S:
            return None
        self._told[node] = (incarnation, id(self.hint), now)
        return self.hint.json

    def new_refusals(self) -> Counter[str]:
        """Refused sub-windows by cause, since this was asked last."""
        fresh = self.book.refused - self._counted
        self._counted = Counter(self.book.refused)
        return fresh

    def forget(self) -> None:
        """A new term begins with what it hears itself; agents replay what they told the leader before."""
        self.book = WindowBook()
        self.roster = Roster()
        self.hint = None
        self._told = {}
        self._booked = None
        self._counted = Counter()
