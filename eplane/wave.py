"""The life of one wave: one switch of all ranks of a group, which makes one epoch.

    PENDING --> STAGING --> VERIFIED ==cutover==> SWITCHING --> RETIRED
       |           |            |                     |
       +-----------+------------+--> ABORTED <--------+ only when the world is lost

Up to the cutover (the one store transaction that makes the next epoch the truth) a wave can be aborted; after it, it
only goes forward. `advance_wave` is pure. What must be done in a state follows from the state alone (`due_in_wave`),
so whoever takes over reads the stored state, asks what is due, and does it again without harm.

    event \\ in      PENDING   STAGING    VERIFIED   SWITCHING  RETIRED   ABORTED
    Start           STAGING   .          .          .          .         x
    NodeVerified    x         + VERIFIED .          .          .         .
    NodeFailed      x         ABORTED    ABORTED    ! stalled  .         .
    CutoverDone     x         x          SWITCHING  .          .         x (. after a cutover)
    NodeSwitched    x         x          x          +          .         x (. after a cutover)
    NodeClean       x         x          x          + RETIRED  .         +
    AbortAsked      ABORTED   ABORTED    ABORTED    x          x         .
    WorldLost       ABORTED   ABORTED    ABORTED    ABORTED    .         + all
    DeadlinePassed  .         ABORTED    ABORTED    ! stalled  .         ! stalled

`+` notes the node, and goes on when all nodes are noted; `.` changes nothing (a duplicate, or a late word); `x` raises
IllegalTransition: whoever sends it has not read the stored state. CLEAN implies SWITCHED, in whatever order the two
are read. RETIRED: all nodes switched, and the cells that they freed may be used again. ABORTED: memory of a node that
has not said CLEAN may still be in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from eplane.errors import IllegalTransition, InvariantBroken


class WaveState(Enum):
    PENDING = "PENDING"
    STAGING = "STAGING"
    VERIFIED = "VERIFIED"
    SWITCHING = "SWITCHING"
    RETIRED = "RETIRED"
    ABORTED = "ABORTED"


class MigrationState(Enum):
    PLANNED = "PLANNED"
    RUNNING = "RUNNING"
    STOPPING = "STOPPING"
    DONE = "DONE"
    STOPPED = "STOPPED"
    ABORTED = "ABORTED"
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class Wave:
    """One wave as it stands. `nodes`: every node of the world, since all ranks switch together.

    `verified`, `switched`, `clean`: nodes whose ack was seen. `cut`: the cutover happened, the epoch is the truth.
    `lost`: the world ended, and with it every memory that the wave could hold. `stalled`: a deadline passed where
    only waiting is right. `reason`: why it was aborted or stalled.
    """

    number: int
    epoch: int
    base_digest: str
    target_digest: str
    nodes: tuple[str, ...]
    overlaps: bool = False
    state: WaveState = WaveState.PENDING
    verified: frozenset[str] = frozenset()
    switched: frozenset[str] = frozenset()
    clean: frozenset[str] = frozenset()
    cut: bool = False
    lost: bool = False
    stalled: bool = False
    reason: str = ""

    @property
    def all_switched(self) -> bool:
        return len(self.switched) == len(self.nodes)

    @property
    def all_clean(self) -> bool:
        return len(self.clean) == len(self.nodes)

    def without(self, seen: frozenset[str]) -> tuple[str, ...]:
        """The nodes that are not in `seen`, in order."""
        return tuple(node for node in self.nodes if node not in seen)


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the work."""


@dataclass(frozen=True, slots=True)
class NodeVerified:
    """All ranks of `node` hold the wave's bundles, compared with their digests."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeFailed:
    """`node` can not stage, for `reason`."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True)
class CutoverDone:
    """The cutover transaction succeeded: `epoch` is the truth."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NodeSwitched:
    """All ranks of `node` serve with the wave's target."""

    node: str


@dataclass(frozen=True, slots=True)
class NodeClean:
    """No rank of `node` holds memory for this wave that is not free again or live."""

    node: str


@dataclass(frozen=True, slots=True)
class AbortAsked:
    """`actor` wants it to end before its cutover."""

    actor: str
    reason: str


@dataclass(frozen=True, slots=True)
class WorldLost:
    """The processes of the group ended. `new_world`: the life that follows, "" where there is none yet."""

    new_world: str


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The present state has lasted longer than allowed; `sentence` says how long and for whom it waits."""

    sentence: str


WaveEvent = (
    Start | NodeVerified | NodeFailed | CutoverDone | NodeSwitched | NodeClean | AbortAsked | WorldLost | DeadlinePassed
)


@dataclass(frozen=True, slots=True)
class StageOn:
    """Have the ranks of `nodes` stage wave `wave`."""

    wave: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TryCutover:
    """Try the cutover transaction that makes `epoch` the truth."""

    wave: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ArmOn:
    """Have the ranks of `nodes` armed for wave `wave`."""

    wave: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbortOn:
    """Have the ranks of `nodes` drop what they staged for wave `wave`."""

    wave: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReportStalled:
    """Tell people: wave `wave` waits for `nodes` longer than it should. It goes on by itself when they are back."""

    wave: int
    nodes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class CallHuman:
    """The engines contradict the store; nothing is safe to do. A restart of the group ends it."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Write the outcome and let the next migration come."""

    outcome: MigrationState
    reason: str


Action = StageOn | TryCutover | ArmOn | AbortOn | ReportStalled | CallHuman | Finish


def advance_wave(wave: Wave, event: WaveEvent) -> tuple[Wave, tuple[Action, ...]]:
    """The wave after `event`, and what has become due by it.

    Raises IllegalTransition where the table has an x or the node is not of the wave, InvariantBroken where a rule
    would be broken; the wave given stays as it is.
    """
    node = getattr(event, "node", None)
    if node is not None and node not in wave.nodes:
        raise IllegalTransition(f"wave {wave.number} knows no node {node!r}; it has {', '.join(wave.nodes)}")
    after = _TABLE[type(event)][_COLUMN[wave.state]](wave, event)
    if after == wave:
        return wave, ()
    check_wave(after)
    check_wave_step(wave, after)
    return after, newly_due(due_in_wave(wave), due_in_wave(after))


def due_in_wave(wave: Wave) -> tuple[Action, ...]:
    """All that must be done in this state. Doing it again does no harm."""
    match wave.state:
        case WaveState.STAGING:
            return (StageOn(wave.number, wave.without(wave.verified)),)
        case WaveState.VERIFIED:
            return (TryCutover(wave.number, wave.epoch),)
        case WaveState.SWITCHING:
            arm = () if wave.all_switched else (ArmOn(wave.number, wave.without(wave.switched)),)
            return arm + _stalled(wave)
        case WaveState.ABORTED if not wave.all_clean:
            return (AbortOn(wave.number, wave.without(wave.clean)), *_stalled(wave))
    return ()


def newly_due(before: Iterable[Action], after: Iterable[Action]) -> tuple[Action, ...]:
    """The actions of `after` that `before` does not cover. Fewer nodes than before is nothing new."""
    old = tuple(before)
    return tuple(action for action in after if not any(_covers(known, action) for known in old))


def check_wave(wave: Wave) -> None:
    """Raises InvariantBroken unless state, acks and flags agree."""
    everyone = frozenset(wave.nodes)

    def rule(holds: bool, sentence: str) -> None:
        if not holds:
            raise InvariantBroken(f"wave {wave.number} in {wave.state.value}", sentence)

    rule(bool(wave.nodes) and len(everyone) == len(wave.nodes), "the nodes must be named, each once")
    rule(wave.number >= 1 and wave.epoch >= 1, "waves and epochs are counted from 1")
    rule(wave.base_digest != wave.target_digest, "base and target must differ")
    rule(wave.verified | wave.switched | wave.clean <= everyone, "an ack of a node that is not of the wave")
    rule(not wave.cut or wave.verified == everyone, "cut over before every node had verified")
    rule(not wave.switched or wave.cut, "a node switched before the cutover")
    match wave.state:
        case WaveState.PENDING:
            rule(not (wave.verified or wave.clean or wave.cut or wave.lost), "nothing can have happened yet")
        case WaveState.STAGING:
            rule(wave.verified != everyone and not (wave.clean or wave.cut or wave.lost), "still staging")
        case WaveState.VERIFIED:
            rule(wave.verified == everyone and not (wave.clean or wave.cut or wave.lost), "verified, not yet cut")
        case WaveState.SWITCHING:
            rule(wave.cut and not wave.lost, "switching needs the cutover and a living world")
            rule(wave.clean <= wave.switched and wave.clean != everyone, "clean nodes have switched; not all are clean")
        case WaveState.RETIRED:
            rule(wave.cut and wave.clean == everyone == wave.switched, "retired needs every node switched and clean")
        case WaveState.ABORTED:
            rule(not wave.cut or wave.lost, "after the cutover only the end of the world aborts")
            rule(not wave.lost or wave.clean == everyone, "a lost world holds no memory")
            rule(bool(wave.reason), "an abort has a reason")


def check_wave_step(before: Wave, after: Wave) -> None:
    """Raises InvariantBroken unless `after` can follow `before`: nothing is taken back, forward only."""
    if after.state is not before.state and after.state not in _MAY_FOLLOW[before.state]:
        raise InvariantBroken(f"wave {before.number}", f"{after.state.value} can not follow {before.state.value}")
    kept = before.verified <= after.verified and before.switched <= after.switched and before.clean <= after.clean
    if not kept or (before.cut and not after.cut) or (before.lost and not after.lost):
        raise InvariantBroken(f"wave {before.number}", "an ack or the cutover was taken back")
    if _frame(before) != _frame(after):
        raise InvariantBroken(f"wave {before.number}", "what the wave is about was changed")


def _frame(wave: Wave) -> tuple[object, ...]:
    return wave.number, wave.epoch, wave.base_digest, wave.target_digest, wave.nodes, wave.overlaps


def _covers(known: Action, action: Action) -> bool:
    if type(known) is not type(action):
        return False
    mine, theirs = getattr(action, "nodes", None), getattr(known, "nodes", None)
    if mine is None or theirs is None:
        return known == action
    return known == replace(action, nodes=theirs) and set(mine) <= set(theirs)


def _stalled(wave: Wave) -> tuple[Action, ...]:
    if not wave.stalled:
        return ()
    return (ReportStalled(wave.number, wave.without(wave.clean), wave.reason),)


def _same(wave: Wave, event: object) -> Wave:
    return wave


def _refuse(wave: Wave, event: object) -> Wave:
    raise IllegalTransition(f"wave {wave.number} is {wave.state.value}: {event} does not fit")


def _stage(wave: Wave, event: Start) -> Wave:
    return replace(wave, state=WaveState.STAGING)


def _verify(wave: Wave, event: NodeVerified) -> Wave:
    seen = wave.verified | {event.node}
    state = WaveState.VERIFIED if len(seen) == len(wave.nodes) else WaveState.STAGING
    return replace(wave, verified=seen, state=state)


def _fail(wave: Wave, event: NodeFailed) -> Wave:
    return replace(wave, state=WaveState.ABORTED, reason=f"node {event.node} failed: {event.reason}")


def _failed_late(wave: Wave, event: NodeFailed) -> Wave:
    return replace(wave, stalled=True, reason=f"node {event.node} failed: {event.reason}")


def _cut(wave: Wave, event: CutoverDone) -> Wave:
    if event.epoch != wave.epoch:
        return _refuse(wave, event)
    return replace(wave, state=WaveState.SWITCHING, cut=True)


def _cut_again(wave: Wave, event: CutoverDone) -> Wave:
    return wave if wave.cut and event.epoch == wave.epoch else _refuse(wave, event)


def _switch(wave: Wave, event: NodeSwitched) -> Wave:
    return replace(wave, switched=wave.switched | {event.node})


def _switch_again(wave: Wave, event: NodeSwitched) -> Wave:
    return wave if wave.cut else _refuse(wave, event)


def _clean(wave: Wave, event: NodeClean) -> Wave:
    after = replace(wave, switched=wave.switched | {event.node}, clean=wave.clean | {event.node})
    if not after.all_clean:
        return after
    return replace(after, state=WaveState.RETIRED, stalled=False, reason="")


def _clean_aborted(wave: Wave, event: NodeClean) -> Wave:
    after = replace(wave, clean=wave.clean | {event.node})
    return replace(after, stalled=after.stalled and not after.all_clean)


def _abort_unstaged(wave: Wave, event: AbortAsked) -> Wave:
    """Nothing was staged, so there is nothing to clean."""
    return replace(_abort(wave, event), clean=frozenset(wave.nodes))


def _abort(wave: Wave, event: AbortAsked) -> Wave:
    return replace(wave, state=WaveState.ABORTED, reason=f"{event.actor}: {event.reason}")


def _lose(wave: Wave, event: WorldLost) -> Wave:
    """The end of the processes freed their memory, whatever the wave had reached."""
    reason = f"world lost, {event.new_world} follows" if event.new_world else "world lost"
    return replace(wave, state=WaveState.ABORTED, lost=True, clean=frozenset(wave.nodes), stalled=False, reason=reason)


def _lose_aborted(wave: Wave, event: WorldLost) -> Wave:
    return replace(wave, lost=True, clean=frozenset(wave.nodes), stalled=False)


def _expire(wave: Wave, event: DeadlinePassed) -> Wave:
    return replace(wave, state=WaveState.ABORTED, reason=event.sentence)


def _stall(wave: Wave, event: DeadlinePassed) -> Wave:
    return wave if wave.all_clean else replace(wave, stalled=True, reason=wave.reason or event.sentence)


Handler = Callable[[Wave, Any], Wave]
_COLUMN = {state: column for column, state in enumerate(WaveState)}
_TABLE: dict[type[WaveEvent], tuple[Handler, ...]] = {
    Start: (_stage, _same, _same, _same, _same, _refuse),
    NodeVerified: (_refuse, _verify, _same, _same, _same, _same),
    NodeFailed: (_refuse, _fail, _fail, _failed_late, _same, _same),
    CutoverDone: (_refuse, _refuse, _cut, _cut_again, _cut_again, _cut_again),
    NodeSwitched: (_refuse, _refuse, _refuse, _switch, _same, _switch_again),
    NodeClean: (_refuse, _refuse, _refuse, _clean, _same, _clean_aborted),
    AbortAsked: (_abort_unstaged, _abort, _abort, _refuse, _refuse, _same),
    WorldLost: (_lose, _lose, _lose, _lose, _same, _lose_aborted),
    DeadlinePassed: (_same, _expire, _expire, _stall, _same, _stall),
}
_MAY_FOLLOW = {
    WaveState.PENDING: (WaveState.STAGING, WaveState.ABORTED),
    WaveState.STAGING: (WaveState.VERIFIED, WaveState.ABORTED),
    WaveState.VERIFIED: (WaveState.SWITCHING, WaveState.ABORTED),
    WaveState.SWITCHING: (WaveState.RETIRED, WaveState.ABORTED),
    WaveState.RETIRED: (),
    WaveState.ABORTED: (),
}
