"""The demo's own arithmetic: phases, balance before and after, kill log, verdict."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from api.demo.chaos import Chaos
from api.demo.judge import Judgement
from api.demo.ledger import Ledger, Window, balancedness
from api.demo.result import Result, step_times
from api.demo.script import QUIET_S, DemoSettings, phase_at, phases
from eplane.crash import parse_crashes
from eplane.errors import BadInput
from eplane.placement import linear

WORLD = "ab" * 8


def window(first: int, rank_load: list[float], expert_load: list[float] | None = None, digest: str = "d") -> Window:
    experts = expert_load or [sum(rank_load) / 4] * 4
    return Window(WORLD, digest, first, first + 10, np.array([rank_load]), np.array([experts]))


def test_three_shifts_come_before_the_quiet_minute() -> None:
    script = phases(180.0)
    assert len(script) == 4
    assert [p.start_s for p in script[1:]] == [p.end_s for p in script[:-1]]
    assert all(a.domain != b.domain for a, b in itertools.pairwise(script))
    assert script[-1].start_s < 180 - QUIET_S
    assert phase_at(script, 0).number == 0
    assert phase_at(script, 179).number == 3
    assert phase_at(script, 1e9).number == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 30.0},
        {"seconds": float("nan")},
        {"seconds": float("inf")},
        {"fault": "none"},
        {"chaos": True, "controllers": 1},
        {"clients": 0},
    ],
)
def test_settings_that_can_not_be_played_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(BadInput):
        DemoSettings(**wrong)  # type: ignore[arg-type]


def test_layers_without_tokens_do_not_count() -> None:
    assert balancedness(np.array([[4.0, 2.0], [0.0, 0.0]])) == pytest.approx(0.75)
    assert np.isnan(balancedness(np.zeros((2, 2))))


def test_a_window_counts_once_and_at_the_time_of_its_middle_step() -> None:
    ledger = Ledger()
    ledger.saw_step(0.0, 0)
    ledger.saw_step(10.0, 100)
    ledger.add([window(20, [1.0, 1.0]), window(20, [9.0, 1.0])])
    ledger.add([window(40, [0.0, 0.0])])
    assert [(t.at_s, t.window.balancedness) for t in ledger.timed()] == [(2.5, 1.0)]


def test_a_phase_is_cut_at_its_first_retired_wave() -> None:
    ledger = Ledger(linear(1, 4, 2, 2))
    ledger.saw_step(0.0, 0)
    ledger.saw_step(100.0, 1000)
    ledger.add([window(100, [3.0, 1.0], [2, 1, 1, 0]), window(200, [30.0, 10.0])])
    ledger.add(window(at, [20.0, 20.0]) for at in (300, 400, 500))
    phase = phases(400.0)[0]
    cut = ledger.phase(phase, [25.0])
    # Weighed by tokens: 4 and 40 before the wave, both at 2/3.
    assert cut.before == pytest.approx(2 / 3)
    assert cut.after == pytest.approx(1.0)
    assert cut.static == pytest.approx(1.0)
    assert cut.windows_after == 3
    whole = ledger.phase(phase, [])
    assert whole.before == whole.after
    assert whole.windows_after == 5
    assert ledger.phase(phase, [45.0]) == whole, "two windows are too few to judge a wave by"


def test_where_nothing_may_move_static_is_what_was_served() -> None:
    ledger = Ledger(linear(1, 4, 2, 2), still=True)
    ledger.saw_step(0.0, 0)
    ledger.saw_step(100.0, 1000)
    ledger.add([window(100, [3.0, 1.0], [1, 1, 1, 1])])
    phase = ledger.phase(phases(400.0)[0], [])
    assert phase.static == phase.after == pytest.approx(2 / 3)


def test_chaos_plans_both_actors_in_both_states_and_reads_what_happened(tmp_path: Path) -> None:
    chaos = Chaos(tmp_path / "kills")
    planned = {actor: parse_crashes(v["EPLANE_CRASH"]) for actor, v in chaos.environment().items()}
    assert set(planned) == {"controller", "agent"}
    assert all(spec.once is not None for specs in planned.values() for spec in specs)
    assert chaos.kills(0.0) == []
    for specs in planned.values():
        for spec in specs:
            assert spec.once is not None
            spec.once.touch()
    kills = chaos.kills(0.0)
    assert {(k.actor, k.wave_state) for k in kills} == {
        (actor, state) for actor in ("controller", "agent") for state in ("STAGING", "SWITCHING")
    }


def result(**changes: object) -> Result:
    values: dict[str, object] = {
        "settings": DemoSettings(),
        "requests_ok": 3,
        "requests_failed": 0,
        "failures": (),
        "tokens_returned": 9,
        "judgement": Judgement(9, 0, 3, 1e-6),
        "migrations": (),
        "epochs": 0,
        "kill_log": (),
        "phases": (),
        "step_ms": {},
        "loud_stop": None,
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flaw",
    [
        {"requests_failed": 1},
        {"judgement": Judgement(9, 1, 3, 1e-6)},
        {"judgement": Judgement(8, 0, 3, 1e-6)},
        {"judgement": Judgement(9, 0, 3, 0.5)},
        {"loud_stop": "ranks disagree"},
    ],
)
def test_every_flaw_is_one(flaw: dict[str, object]) -> None:
    assert result().flawless
    assert not result(**flaw).flawless


def test_the_result_says_what_was_counted(tmp_path: Path) -> None:
    late = {"ended_s": 149.0, "bytes": 5, "started_s": 140.0}
    one = result(migrations=[late], settings=DemoSettings(seconds=150.0))
    one.write(tmp_path / "out.json")
    told = json.loads((tmp_path / "out.json").read_text())
    assert told["migrations_in_last_minute"] == 1
    assert (told["tokens_checked"], told["tokens_returned"], told["tokens_wrong"]) == (9, 9, 0)
    assert "SOME IN THE LAST MINUTE" in one.summary()
    assert "was NOT caught" in result(settings=DemoSettings(fault="skip-digest"), migrations=[late]).summary()


def test_steps_are_split_by_whether_a_wave_was_in_progress() -> None:
    rows = [(step, float(step), 1, 4, step % 2) for step in range(10)]
    told = step_times(rows)
    assert told["with_wave"]["steps"] == told["without_wave"]["steps"] == 5
    assert told["with_wave"]["p50"] == 5.0
    assert step_times([])["with_wave"] == {"steps": 0, "p50": None, "p99": None}
