"""Crash points, in real processes: they end or stop where told, once if told, and cost nothing when unset."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from eplane import crash
from eplane.crash import POINTS, CrashPoints, CrashSpec, Ending, crash_point, parse_crashes
from eplane.errors import SettingsError

PROGRAM = """
import sys
from eplane.crash import crash_point
for name in sys.argv[1:]:
    crash_point(name)
    print(name, flush=True)
"""


def start(spec: str, *names: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "EPLANE_CRASH": spec}
    command = [sys.executable, "-c", PROGRAM, *names]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_it_kills_at_the_nth_pass_and_only_once_with_a_file(tmp_path: Path) -> None:
    spec = f"agent.arm.before, controller.cutover.after#2@{tmp_path / 'once'}"
    passes = ["controller.cutover.after"] * 3
    with start(spec, "controller.stage.before", *passes) as first:
        out, _ = first.communicate(timeout=60)
        assert first.returncode == -signal.SIGKILL
    assert out.split() == ["controller.stage.before", "controller.cutover.after"]
    with start(spec, *passes) as second:
        out, _ = second.communicate(timeout=60)
        assert (second.returncode, out.split()) == (0, passes)


def test_it_exits_without_cleaning_up() -> None:
    with start("agent.clean.before:exit", "agent.clean.before") as process:
        assert process.wait(timeout=60) == crash.EXIT_CODE


def test_it_stops_and_goes_on_when_continued() -> None:
    with start("agent.verified.before:stop", "agent.verified.before") as process:
        pid, status = os.waitpid(process.pid, os.WUNTRACED)
        assert pid == process.pid
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out.split()) == (0, ["agent.verified.before"])


def test_a_wrong_value_stops_the_program_with_a_sentence() -> None:
    with start("agent.arms.before", "agent.arm.before") as process:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1
    assert "SettingsError: EPLANE_CRASH: no crash point is named 'agent.arms.before'" in err


def test_unset_it_does_nothing() -> None:
    crash_point("controller.cutover.before")
    assert crash._points is None


def test_the_points_are_named() -> None:
    assert len(POINTS) == 24
    assert {"controller.adopt.before", "agent.switched.after"} <= POINTS


def test_entries_are_read() -> None:
    found = parse_crashes(" agent.arm.before , controller.plan.after#3:stop@/tmp/x y,agent.abort.after:exit,")
    assert found == (
        CrashSpec("agent.arm.before", 1, Ending.KILL, None),
        CrashSpec("controller.plan.after", 3, Ending.STOP, Path("/tmp/x y")),
        CrashSpec("agent.abort.after", 1, Ending.EXIT, None),
    )
    assert parse_crashes("") == ()


@pytest.mark.parametrize(
    "text", ["x", "agent.arm", "agent.arm.before#0", "agent.arm.before#x", "agent.arm.before:hang", "agent.arm.before@"]
)
def test_a_wrong_entry_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="EPLANE_CRASH"):
        parse_crashes(text)


def test_passes_are_counted_for_each_point() -> None:
    points = CrashPoints(parse_crashes("agent.arm.before#2"))
    assert points.due("agent.arm.after") is None
    assert points.due("agent.arm.before") is None
    assert points.due("agent.arm.before") == CrashSpec("agent.arm.before", 2, Ending.KILL, None)
    assert points.due("agent.arm.before") is None
