"""A migration: every reachable state with every event, random interleavings, take-over by a new leader at any point."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eplane.migration as machine
from eplane.errors import IllegalTransition, InvariantBroken
from eplane.keys import AckKind
from eplane.migration import (
    FINAL,
    AbortAsked,
    AbortOn,
    Ambiguous,
    ArmOn,
    CallHuman,
    CutoverDone,
    DeadlinePassed,
    Finish,
    Migration,
    MigrationEvent,
    MigrationState,
    NodeClean,
    NodeFailed,
    NodeSwitched,
    NodeVerified,
    OfWave,
    SeenAck,
    StageOn,
    Start,
    TryCutover,
    WaveState,
    WorldLost,
    advance_migration,
    check_migration,
    contradiction,
    due,
    may_cut,
    resume,
)
from tests.ground.machines import BASE, NODES, digest, migration, migration_events, reachable_migrations

RUNNING, DONE, STOPPING = MigrationState.RUNNING, MigrationState.DONE, MigrationState.STOPPING
STOPPED, ABORTED, DEAD = MigrationState.STOPPED, MigrationState.ABORTED, MigrationState.DEAD


def run(at: Migration, *events: MigrationEvent) -> Migration:
    for event in events:
        at, _ = advance_migration(at, event)
    return at


def staged(wave: int) -> tuple[MigrationEvent, ...]:
    return tuple(OfWave(wave, NodeVerified(node)) for node in NODES)


def cut(wave: int) -> tuple[MigrationEvent, ...]:
    return (*staged(wave), OfWave(wave, CutoverDone(BASE + wave)))


def switched(wave: int) -> tuple[MigrationEvent, ...]:
    return tuple(OfWave(wave, NodeSwitched(node)) for node in NODES)


def clean(wave: int) -> tuple[MigrationEvent, ...]:
    return tuple(OfWave(wave, NodeClean(node)) for node in NODES)


def whole(wave: int) -> tuple[MigrationEvent, ...]:
    return (*cut(wave), *switched(wave), *clean(wave))


def states(at: Migration) -> list[str]:
    return [wave.state.value for wave in at.waves]


def test_waves_one_after_the_other() -> None:
    at, actions = advance_migration(migration(2), Start())
    assert (at.state, actions, at.epoch) == (RUNNING, (StageOn(1, NODES),), BASE)
    at = run(at, *cut(1), *switched(1), *clean(1)[:1])
    assert states(at) == ["SWITCHING", "PENDING"]
    at, actions = advance_migration(at, clean(1)[1])
    assert (states(at), actions) == (["RETIRED", "STAGING"], (StageOn(2, NODES),))
    at = run(at, *whole(2))
    assert (at.state, at.epoch, due(at)) == (DONE, BASE + 2, (Finish(DONE, ""),))


def test_the_next_wave_stages_while_the_last_switches_but_is_cut_only_after_all_have_switched() -> None:
    at, actions = advance_migration(
        run(migration(2, overlaps=True), Start(), *staged(1)), OfWave(1, CutoverDone(BASE + 1))
    )
    assert actions == (ArmOn(1, NODES), StageOn(2, NODES))
    at = run(at, *staged(2))
    assert states(at) == ["SWITCHING", "VERIFIED"]
    assert not may_cut(at, 2)
    with pytest.raises(IllegalTransition):
        advance_migration(at, OfWave(2, CutoverDone(BASE + 2)))
    at = run(at, switched(1)[0])
    assert not any(isinstance(action, TryCutover) for action in due(at))
    at, actions = advance_migration(at, switched(1)[1])
    assert actions == (TryCutover(2, BASE + 2),)
    at = run(at, OfWave(2, CutoverDone(BASE + 2)), *switched(2), *clean(2), *clean(1))
    assert at.state is DONE


def test_a_rank_is_not_staged_for_a_third_wave_before_the_first_is_clean() -> None:
    at = run(migration(3, overlaps=True), Start(), *cut(1), *switched(1), *cut(2), *switched(2), *clean(2))
    assert states(at) == ["SWITCHING", "RETIRED", "PENDING"]
    at, actions = advance_migration(run(at, clean(1)[0]), clean(1)[1])
    assert actions == (StageOn(3, NODES),)


@pytest.mark.parametrize(
    ("before", "ends", "live"),
    [((), ABORTED, 0), (whole(1), STOPPED, 1), ((*whole(1), *staged(2)), STOPPED, 1)],
)
def test_abort_ends_stopped_with_live_waves_and_aborted_with_none(
    before: tuple[MigrationEvent, ...], ends: MigrationState, live: int
) -> None:
    at, actions = advance_migration(run(migration(3), Start(), *before), AbortAsked("op", "wanted"))
    number = live + 1
    assert (at.state, actions) == (STOPPING, (AbortOn(number, NODES),))
    at = run(at, clean(number)[0])
    assert at.state is STOPPING
    at, actions = advance_migration(at, clean(number)[1])
    assert (at.state, at.live, actions) == (ends, live, (Finish(ends, "op: wanted"),))


def test_a_wave_that_switches_goes_forward_when_the_next_is_aborted() -> None:
    at = run(migration(3, overlaps=True), Start(), *cut(1), AbortAsked("op", "wanted"))
    assert states(at) == ["SWITCHING", "ABORTED", "ABORTED"]
    at = run(at, *clean(2))
    assert (at.state, due(at)) == (STOPPING, (ArmOn(1, NODES),))
    assert run(at, *switched(1), *clean(1)).state is STOPPED


def test_an_abort_after_the_last_cutover_is_too_late() -> None:
    at = run(migration(1), Start(), *cut(1))
    with pytest.raises(IllegalTransition):
        advance_migration(at, AbortAsked("op", "late"))


@pytest.mark.parametrize("end", [NodeFailed("n0", "no memory"), DeadlinePassed("600 s"), AbortAsked("goal", "no")])
def test_a_wave_that_aborts_stops_the_migration(end: NodeFailed | DeadlinePassed | AbortAsked) -> None:
    at = run(migration(2), Start(), OfWave(1, end))
    assert (at.state, states(at)) == (STOPPING, ["ABORTED", "ABORTED"])
    assert run(at, *clean(1)).state is ABORTED


@pytest.mark.parametrize(
    "before", [(), (Start(),), (Start(), *cut(1)), (Start(), *whole(1)), (Start(), AbortAsked("op", "x"))]
)
def test_a_lost_world_ends_it_aborted_also_from_switching(before: tuple[MigrationEvent, ...]) -> None:
    at, actions = advance_migration(run(migration(2), *before), WorldLost("b" * 16))
    assert at.state is ABORTED
    assert at.reason.startswith("world lost")
    assert actions == (Finish(ABORTED, at.reason),)


def test_dead_waits_for_a_human_and_ends_with_the_world() -> None:
    at, actions = advance_migration(run(migration(2), Start(), *cut(1)), Ambiguous("rank 1 serves x"))
    assert (at.state, actions) == (DEAD, (CallHuman("rank 1 serves x"),))
    assert run(at, *switched(1)) == at
    assert run(at, WorldLost("")).state is ABORTED
    with pytest.raises(IllegalTransition):
        advance_migration(migration(2), Ambiguous("too early"))


def test_what_ranks_may_report() -> None:
    at = run(migration(2, overlaps=True), Start())
    assert contradiction(at, {0: digest(0), 1: digest(0)}) is None
    assert "rank 1" in (contradiction(at, {0: digest(0), 1: digest(1)}) or "")
    at = run(at, *cut(1))
    assert contradiction(at, {0: digest(0), 1: digest(1)}) is None
    assert contradiction(at, {0: digest(2)}) is not None
    at = run(at, *switched(1))
    assert contradiction(at, {0: digest(1)}) is None
    assert contradiction(at, {0: digest(0)}) is not None


def _check(at: Migration, after: Migration, event: MigrationEvent) -> None:
    """What must hold of every step, said without the machine's own rules."""
    assert after.live >= at.live
    armed = [w for w in after.waves if w.state is WaveState.SWITCHING and not w.all_switched]
    assert len(armed) <= 1
    staging = [w for w in after.waves if w.state in (WaveState.STAGING, WaveState.VERIFIED)]
    assert len(staging) <= 1
    for wave in staging:
        earlier = after.waves[: wave.number - 1]
        assert all(w.all_clean and w.state is WaveState.RETIRED for w in earlier[:-1])
        assert wave.overlaps or all(w.state is WaveState.RETIRED for w in earlier)
    for old, new in zip(at.waves, after.waves, strict=True):
        if new.cut and not old.cut:
            assert isinstance(event, OfWave)
            assert event == OfWave(new.number, CutoverDone(new.epoch))
            assert all(w.all_switched for w in after.waves[: new.number - 1])
        if old.cut and new.state is WaveState.ABORTED and old.state is not WaveState.ABORTED:
            assert isinstance(event, WorldLost)
    if after.state in (DONE, STOPPED):
        assert all(w.all_clean for w in after.waves)
    if after.state is STOPPED:
        assert 1 <= after.live < len(after.waves)
        assert [w.cut for w in after.waves] == sorted((w.cut for w in after.waves), reverse=True)
    if after.state is ABORTED:
        assert after.live == 0 or any(w.lost for w in after.waves)
    assert (after.state in FINAL) == any(isinstance(action, Finish) for action in due(after))
    assert after.state in (MigrationState.PLANNED, *FINAL) or due(after) or _waits(after)


def _waits(at: Migration) -> bool:
    """Nothing is to be done but to wait for CLEAN acks of a wave that has switched."""
    return any(w.state is WaveState.SWITCHING and w.all_switched and not w.all_clean for w in at.waves)


@pytest.mark.parametrize(("waves", "overlaps"), [(1, True), (2, False), (3, False)])
def test_every_reachable_state_with_every_event(waves: int, overlaps: bool) -> None:
    met, reached = set[MigrationState](), set[Migration]()
    for at, event, after in reachable_migrations(migration(waves, overlaps)):
        met.add(at.state)
        if after is None:
            continue
        if after not in reached:
            reached.add(after)
            _check(at, after, event)
            assert resume(after, ())[0] == after
    assert met == set(MigrationState) - ({STOPPED} if waves == 1 else set())


def test_the_drawn_table_of_the_migrations_own_events() -> None:
    """Where each of the migration's own events may lead from each state; `None`: refused, `.`: unchanged."""
    table: dict[type[MigrationEvent], dict[str, set[str | None]]] = {
        Start: {"PLANNED": {"RUNNING"}, "ABORTED": {None}, "DEAD": {None}},
        AbortAsked: {
            "PLANNED": {"ABORTED"},
            "RUNNING": {"STOPPING", None},
            **{state: {None} for state in ("DONE", "STOPPED", "DEAD")},
        },
        WorldLost: {state: {"ABORTED"} for state in ("PLANNED", "RUNNING", "STOPPING", "DEAD")},
        Ambiguous: {
            **{state: {"DEAD"} for state in ("RUNNING", "STOPPING")},
            **{state: {None} for state in ("PLANNED", "DONE", "STOPPED", "ABORTED")},
        },
    }
    met: dict[tuple[type[MigrationEvent], str], set[str | None]] = {}
    for at, event, after in reachable_migrations(migration(2, overlaps=False)):
        if not isinstance(event, OfWave):
            led = None if after is None else "." if after == at else after.state.value
            met.setdefault((type(event), at.state.value), set()).add(led)
        elif at.state is MigrationState.PLANNED or isinstance(event.event, Start | WorldLost):
            assert after is None or (at.state is DEAD and after == at)
    for kind, row in table.items():
        for state in MigrationState:
            assert met[kind, state.value] == row.get(state.value, {"."}), (kind, state)


@pytest.mark.parametrize("waves", [2, 3])
def test_every_reachable_state_of_overlapping_waves(waves: int) -> None:
    """A failure of one node stands for every way to abort or stall a wave, so that all states fit the time."""
    left_out = (DeadlinePassed, AbortAsked) if waves == 2 else (DeadlinePassed, AbortAsked, NodeFailed)
    events = [
        event
        for event in migration_events(waves)
        if not isinstance(event, Ambiguous)
        and not (isinstance(event, OfWave) and isinstance(event.event, left_out))
        and not (isinstance(event, OfWave) and event.event == NodeFailed("n1", "no memory"))
    ]
    start = migration(waves, overlaps=True)
    seen, todo = {start}, [start]
    while todo:
        at = todo.pop()
        for event in events:
            try:
                after, _ = advance_migration(at, event)
            except IllegalTransition:
                continue
            if after not in seen:
                _check(at, after, event)
                seen.add(after)
                todo.append(after)
    assert {at.state for at in seen} == set(MigrationState) - {DEAD}


def _act(at: Migration, acks: list[SeenAck], rng: random.Random) -> MigrationEvent | None:
    """What a healthy agent or leader does next about the stored state: one ack by one node, or the cutover."""
    for wave in at.waves:
        if wave.state is WaveState.SWITCHING and wave.switched and rng.random() < 0.5:
            acks.append(SeenAck(wave.number, AckKind.CLEAN, rng.choice(sorted(wave.switched))))
    actions = due(at)
    if not actions:
        return None
    match rng.choice(actions):
        case TryCutover(wave=number, epoch=epoch):
            return OfWave(number, CutoverDone(epoch))
        case StageOn(wave=number, nodes=nodes):
            acks.append(SeenAck(number, AckKind.VERIFIED, rng.choice(nodes)))
        case ArmOn(wave=number, nodes=nodes):
            acks.append(SeenAck(number, AckKind.SWITCHED, rng.choice(nodes)))
        case AbortOn(wave=number, nodes=nodes):
            acks.append(SeenAck(number, AckKind.CLEAN, rng.choice(nodes)))
    return None


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 2**32),
    st.booleans(),
    st.integers(1, 3),
    st.sampled_from([None, "abort", "fail", "deadline", "lost"]),
)
def test_it_ends_by_itself_whoever_leads(seed: int, overlaps: bool, waves: int, trouble: str | None) -> None:
    """Each turn has a new leader, who knows only what is stored, reads acks late, twice and in any order, and often

    dies before it has stored anything.
    """
    rng = random.Random(seed)
    stored, acks = run(migration(waves, overlaps), Start()), list[SeenAck]()
    strike = rng.randrange(1, 12)
    for turn in range(400):
        read = acks[: len(acks) - rng.randrange(3)] if rng.random() < 0.5 else list(acks)
        read += rng.sample(read, k=min(2, len(read)))
        rng.shuffle(read)
        at, _ = resume(stored, read)
        if turn == strike and trouble is not None:
            at = _strike(at, trouble)
        elif rng.random() < 0.3:
            continue
        stored = at
        if stored.state in FINAL:
            break
        event = _act(stored, acks, rng)
        stored = stored if event is None else run(stored, event)
    assert stored.state in FINAL
    assert trouble is not None or stored.state is DONE


def _strike(at: Migration, trouble: str) -> Migration:
    open_waves = [w for w in at.waves if w.state in (WaveState.STAGING, WaveState.VERIFIED, WaveState.SWITCHING)]
    number = open_waves[-1].number if open_waves else 1
    event: dict[str, MigrationEvent] = {
        "abort": AbortAsked("op", "wanted"),
        "fail": OfWave(number, NodeFailed("n0", "no memory")),
        "deadline": OfWave(number, DeadlinePassed("too long")),
        "lost": WorldLost("b" * 16),
    }
    try:
        return run(at, event[trouble])
    except IllegalTransition:
        return at


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(migration_events(3)), max_size=60), st.booleans())
def test_any_stream_of_events_is_taken_or_refused_and_never_breaks_a_rule(
    events: list[MigrationEvent], overlaps: bool
) -> None:
    at = run(migration(3, overlaps), Start())
    for event in events:
        try:
            after, actions = advance_migration(at, event)
        except IllegalTransition:
            continue
        _check(at, after, event)
        assert set(actions) <= set(due(after))
        at = after


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_take_over_sees_what_the_old_leader_saw_in_any_order(data: st.DataObject) -> None:
    """Acks folded one by one, or all at once by a successor from an older record: the same state."""
    overlaps = data.draw(st.booleans())
    stored = run(migration(2, overlaps), Start(), *cut(1))
    acks = [SeenAck(1, AckKind.VERIFIED, n) for n in NODES] + [SeenAck(1, AckKind.SWITCHED, n) for n in NODES]
    acks += [SeenAck(1, AckKind.CLEAN, n) for n in NODES]
    some = data.draw(st.lists(st.sampled_from(acks), max_size=10))
    first, _ = resume(stored, some)
    assert resume(first, reversed(some)) == resume(stored, data.draw(st.permutations(some)))


def test_a_successor_finishes_what_was_half_stored() -> None:
    """The wave's abort was stored, the migration's was not; a cutover was stored, the next wave's opening was not."""
    running = run(migration(2, overlaps=True), Start())
    aborted = run(running, OfWave(1, AbortAsked("op", "wanted"))).waves[0]
    half = replace(running, waves=(aborted, running.waves[1]))
    at, actions = resume(half, ())
    assert (at.state, actions) == (STOPPING, (AbortOn(1, NODES),))
    after_cut = run(running, *cut(1))
    half = replace(after_cut, waves=(after_cut.waves[0], running.waves[1]))
    assert resume(half, ()) == (after_cut, due(after_cut))


WAVE1 = run(migration(2, True), Start(), *cut(1))
CUT = run(migration(1), Start(), *cut(1))
STOPS = run(migration(3, True), Start(), *cut(1), AbortAsked("op", "x"))
LOST = run(WAVE1, WorldLost(""))


@pytest.mark.parametrize(
    "broken",
    [
        replace(WAVE1, waves=(), state=DONE),
        replace(migration(2), state=RUNNING),
        replace(STOPS, state=RUNNING),
        replace(CUT, state=STOPPING),
        replace(STOPS, waves=(*STOPS.waves[:2], migration(3, True).waves[2])),
        replace(LOST, state=DEAD, reason="odd"),
        replace(CUT, state=DEAD),
        replace(WAVE1, base_epoch=BASE + 1),
        replace(WAVE1, state=DONE),
        replace(WAVE1, state=STOPPED),
        replace(WAVE1, state=ABORTED),
        replace(WAVE1, state=MigrationState.PLANNED),
        replace(WAVE1, state=DEAD),
        replace(WAVE1, waves=(WAVE1.waves[0], replace(WAVE1.waves[1], overlaps=False))),
        replace(WAVE1, waves=(WAVE1.waves[0], replace(WAVE1.waves[1], base_digest=digest(5)))),
        replace(WAVE1, waves=(WAVE1.waves[0], replace(WAVE1.waves[1], nodes=("n0",)))),
        replace(
            WAVE1,
            waves=(
                WAVE1.waves[0],
                replace(WAVE1.waves[1], state=WaveState.SWITCHING, cut=True, verified=frozenset(NODES)),
            ),
        ),
    ],
)
def test_each_rule_of_a_migration_is_checked(broken: Migration) -> None:
    with pytest.raises(InvariantBroken):
        check_migration(broken)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (STOPS, replace(STOPS, state=RUNNING)),
        (LOST, replace(LOST, state=DEAD)),
        (WAVE1, replace(WAVE1, waves=WAVE1.waves[:1])),
        (WAVE1, replace(WAVE1, world="b" * 16)),
        (WAVE1, run(migration(2, True), Start())),
    ],
)
def test_the_rule_that_nothing_is_taken_back(before: Migration, after: Migration) -> None:
    with pytest.raises(InvariantBroken):
        machine._check_step(before, after)


def _always(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("rule", "sentence", "events"),
    [
        ("may_cut", "before all switched", (Start(), *cut(1), *cut(2))),
        ("_may_open", "two waves stage", (Start(), *staged(1))),
    ],
)
def test_a_rule_of_order_taken_out_is_seen(
    monkeypatch: pytest.MonkeyPatch, rule: str, sentence: str, events: tuple[MigrationEvent, ...]
) -> None:
    patched: Callable[..., bool] = _always
    monkeypatch.setattr(machine, rule, patched)
    with pytest.raises(InvariantBroken, match=sentence):
        run(migration(2, overlaps=True), *events)
