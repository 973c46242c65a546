"""One wave: every reachable state with every event, against the drawn table; the rules of each state."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import eplane.wave as machine
from eplane.errors import IllegalTransition, InvariantBroken
from eplane.wave import (
    AbortAsked,
    AbortOn,
    ArmOn,
    CutoverDone,
    DeadlinePassed,
    NodeClean,
    NodeFailed,
    NodeSwitched,
    NodeVerified,
    ReportStalled,
    StageOn,
    Start,
    TryCutover,
    Wave,
    WaveEvent,
    WaveState,
    WorldLost,
    advance_wave,
    check_wave,
    check_wave_step,
    due_in_wave,
    newly_due,
)
from tests.ground.machines import BASE, NODES, digest, reachable_waves, wave, wave_events

ALL = frozenset(NODES)


def run(*events: WaveEvent, start: Wave | None = None) -> Wave:
    at = start or wave()
    for event in events:
        at, _ = advance_wave(at, event)
    return at


STAGING = (Start(),)
VERIFIED = (*STAGING, NodeVerified("n0"), NodeVerified("n1"))
SWITCHING = (*VERIFIED, CutoverDone(BASE + 1))
RETIRED = (*SWITCHING, NodeSwitched("n0"), NodeSwitched("n1"), NodeClean("n0"), NodeClean("n1"))


def test_the_way_of_a_wave_and_what_is_due_on_it() -> None:
    at, due = advance_wave(wave(), Start())
    assert (at.state, due) == (WaveState.STAGING, (StageOn(1, NODES),))
    at, due = advance_wave(at, NodeVerified("n1"))
    assert (at.state, due) == (WaveState.STAGING, ())
    assert due_in_wave(at) == (StageOn(1, ("n0",)),)
    at, due = advance_wave(at, NodeVerified("n0"))
    assert (at.state, due) == (WaveState.VERIFIED, (TryCutover(1, BASE + 1),))
    at, due = advance_wave(at, CutoverDone(BASE + 1))
    assert (at.state, at.cut, due) == (WaveState.SWITCHING, True, (ArmOn(1, NODES),))
    at, due = advance_wave(at, NodeSwitched("n0"))
    assert (at.state, due) == (WaveState.SWITCHING, ())
    assert due_in_wave(at) == (ArmOn(1, ("n1",)),)
    at = run(NodeSwitched("n1"), NodeClean("n0"), start=at)
    assert at.state is WaveState.SWITCHING
    assert at.all_switched
    at, due = advance_wave(at, NodeClean("n1"))
    assert (at.state, due, due_in_wave(at)) == (WaveState.RETIRED, (), ())


def test_clean_implies_switched_in_either_order() -> None:
    assert run(*SWITCHING, NodeClean("n0"), NodeSwitched("n0"), NodeClean("n1")) == run(*RETIRED)


@pytest.mark.parametrize("events", [STAGING, VERIFIED])
@pytest.mark.parametrize("end", [NodeFailed("n1", "no memory"), AbortAsked("op", "wanted"), DeadlinePassed("600 s")])
def test_before_the_cutover_it_aborts_and_waits_for_clean(events: tuple[WaveEvent, ...], end: WaveEvent) -> None:
    at, due = advance_wave(run(*events), end)
    assert (at.state, at.cut, due) == (WaveState.ABORTED, False, (AbortOn(1, NODES),))
    assert at.reason
    at = run(NodeClean("n0"), start=at)
    assert due_in_wave(at) == (AbortOn(1, ("n1",)),)
    assert run(NodeClean("n1"), start=at).all_clean


def test_a_wave_that_never_staged_is_clean_when_aborted() -> None:
    at = run(AbortAsked("op", "wanted"))
    assert (at.state, at.all_clean, due_in_wave(at)) == (WaveState.ABORTED, True, ())


@pytest.mark.parametrize("late", [DeadlinePassed("waits for n1 for 30 s"), NodeFailed("n1", "odd")])
def test_after_the_cutover_it_only_stalls_and_goes_on(late: WaveEvent) -> None:
    at, due = advance_wave(run(*SWITCHING, NodeClean("n0")), late)
    assert (at.state, at.stalled) == (WaveState.SWITCHING, True)
    assert due == (ReportStalled(1, ("n1",), at.reason),)
    at = run(NodeClean("n1"), start=at)
    assert (at.state, at.stalled) == (WaveState.RETIRED, False)


def test_an_aborted_wave_stalls_while_a_node_is_not_clean() -> None:
    at = run(*STAGING, AbortAsked("op", "wanted"), DeadlinePassed("waits"))
    assert at.stalled
    assert not run(NodeClean("n0"), NodeClean("n1"), start=at).stalled


@pytest.mark.parametrize("events", [(), STAGING, VERIFIED, SWITCHING, (*STAGING, AbortAsked("op", "x"))])
def test_a_lost_world_ends_it_from_everywhere_and_frees_its_memory(events: tuple[WaveEvent, ...]) -> None:
    at = run(*events, WorldLost("b" * 16))
    assert (at.state, at.lost, at.all_clean, due_in_wave(at)) == (WaveState.ABORTED, True, True, ())


def test_a_retired_wave_does_not_mind_a_lost_world() -> None:
    assert run(*RETIRED, WorldLost("b" * 16)) == run(*RETIRED)


def test_every_cell_of_the_drawn_table_is_what_happens() -> None:
    """Every reachable state x every event; the drawing is parsed, so that it can not go stale."""
    drawn = _drawn()
    met: set[tuple[str, str]] = set()
    for before, event, after in reachable_waves(wave()):
        name = type(event).__name__
        cell = drawn[name][before.state.value]
        met.add((name, before.state.value))
        refused = cell == "x" or (cell.startswith("x (") and not before.cut)
        assert (after is None) == refused, f"{name} in {before}"
        if after is None:
            continue
        if cell.startswith((".", "x")):
            assert after == before, f"{name} in {before}"
        words = set(re.findall("[A-Z]{3,}", cell))
        assert after.state.value in words | {before.state.value}, f"{name} in {before}"
        if not cell.startswith(("+", ".", "!", "x")):
            assert after.state.value in words, f"{name} in {before}"
    assert len(met) == 9 * 6


def _drawn() -> dict[str, dict[str, str]]:
    lines = (machine.__doc__ or "").splitlines()
    top = next(at for at, line in enumerate(lines) if line.strip().startswith("event"))
    starts = [match.start() for match in re.finditer(r"\S+", lines[top])][3:]
    names = lines[top].split()[3:]
    assert names == [state.value for state in WaveState]
    table: dict[str, dict[str, str]] = {}
    for line in lines[top + 1 : top + 10]:
        ends = [*starts[1:], len(line) + 1]
        cells = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        table[line.split()[0]] = dict(zip(names, cells, strict=True))
    return table


def test_repeating_any_event_changes_nothing() -> None:
    for _, event, after in reachable_waves(wave()):
        if after is None:
            continue
        try:
            again, due = advance_wave(after, event)
        except IllegalTransition:
            # An abort that ended it, or a start: said twice it may be refused, but never acted on.
            assert isinstance(event, Start)
            continue
        assert again == after or isinstance(event, DeadlinePassed)
        assert due == () or isinstance(event, DeadlinePassed)


def test_a_node_that_is_not_of_the_wave_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="n9"):
        advance_wave(run(*STAGING), NodeVerified("n9"))


def test_a_cutover_to_another_epoch_is_refused() -> None:
    with pytest.raises(IllegalTransition):
        run(*VERIFIED, CutoverDone(BASE + 2))
    with pytest.raises(IllegalTransition):
        run(*SWITCHING, CutoverDone(BASE + 2))


GOOD = [run(*events) for events in ((), STAGING, VERIFIED, SWITCHING, RETIRED, (*STAGING, AbortAsked("op", "x")))]


@pytest.mark.parametrize(
    "broken",
    [
        replace(GOOD[0], nodes=()),
        replace(GOOD[0], nodes=("n0", "n0")),
        replace(GOOD[0], number=0),
        replace(GOOD[0], epoch=0),
        replace(GOOD[0], target_digest=digest(0)),
        replace(GOOD[0], verified=frozenset({"n0"})),
        replace(GOOD[1], verified=frozenset({"n9"})),
        replace(GOOD[1], verified=ALL),
        replace(GOOD[1], clean=frozenset({"n0"})),
        replace(GOOD[2], verified=frozenset({"n0"})),
        replace(GOOD[2], switched=frozenset({"n0"})),
        replace(GOOD[2], cut=True),
        replace(GOOD[3], cut=False),
        replace(GOOD[3], verified=frozenset({"n0"})),
        replace(GOOD[3], clean=frozenset({"n0"})),
        replace(GOOD[3], switched=ALL, clean=ALL),
        replace(GOOD[3], lost=True),
        replace(GOOD[4], clean=frozenset({"n0"})),
        replace(GOOD[4], switched=frozenset({"n0"})),
        replace(GOOD[5], verified=ALL, cut=True),
        replace(GOOD[5], lost=True),
        replace(GOOD[5], reason=""),
    ],
)
def test_each_rule_of_a_state_is_checked(broken: Wave) -> None:
    with pytest.raises(InvariantBroken):
        check_wave(broken)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (GOOD[2], GOOD[1]),
        (GOOD[3], GOOD[2]),
        (GOOD[3], GOOD[5]),
        (GOOD[4], GOOD[3]),
        (GOOD[0], GOOD[2]),
        (GOOD[1], replace(GOOD[1], nodes=("n0",))),
        (GOOD[1], replace(GOOD[1], target_digest=digest(9))),
        (replace(GOOD[1], verified=frozenset({"n0"})), GOOD[1]),
    ],
)
def test_nothing_is_taken_back(before: Wave, after: Wave) -> None:
    with pytest.raises(InvariantBroken):
        check_wave_step(before, after)


def test_a_broken_table_is_seen_by_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules hold the table, not the other way round: an abort planted after the cutover is refused."""
    row = machine._TABLE[AbortAsked]
    monkeypatch.setitem(machine._TABLE, AbortAsked, (*row[:3], machine._abort, *row[4:]))
    with pytest.raises(InvariantBroken, match="only the end of the world"):
        run(*SWITCHING, AbortAsked("op", "late"))


def test_actions_for_fewer_nodes_are_nothing_new() -> None:
    assert newly_due((StageOn(1, NODES),), (StageOn(1, ("n1",)),)) == ()
    assert newly_due((StageOn(1, ("n1",)),), (StageOn(1, NODES),)) == (StageOn(1, NODES),)
    assert newly_due((StageOn(1, NODES),), (StageOn(2, NODES),)) == (StageOn(2, NODES),)
    assert newly_due((TryCutover(1, 8),), (TryCutover(1, 8), ArmOn(1, NODES))) == (ArmOn(1, NODES),)


def test_from_every_state_some_way_leads_to_an_end() -> None:
    ends = {WaveState.RETIRED, WaveState.ABORTED}
    for before, _, _ in reachable_waves(wave()):
        at = before
        for event in (Start(), *wave_events()[1:], *wave_events()):
            if isinstance(event, AbortAsked | WorldLost | DeadlinePassed | NodeFailed):
                continue
            try:
                at, _ = advance_wave(at, event)
            except IllegalTransition:
                continue
        assert at.state in ends
