"""The supervisor: restarts, order, and no orphan whatever ends first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from api.supervise import Backoff, EventKind, ProcessEvent, ProcessSpec, Restart, Supervisor
from eplane.errors import StackError

QUICK = Backoff(first_s=0.05, most_s=0.2, healthy_s=30.0)
SLEEP = ("sleep", "600")


def wait_until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    limit = time.monotonic() + limit_s
    while not holds():
        if time.monotonic() > limit:
            raise TimeoutError("the state that was waited for did not come")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def events() -> list[ProcessEvent]:
    return []


@pytest.fixture
def supervisor(tmp_path: Path, events: list[ProcessEvent]) -> Iterator[Supervisor]:
    with Supervisor(tmp_path, events.append, QUICK) as one:
        yield one


def test_a_killed_process_is_started_again(supervisor: Supervisor, events: list[ProcessEvent]) -> None:
    first = supervisor.start(ProcessSpec("a", SLEEP))
    assert supervisor.kill("a") == first
    wait_until(lambda: supervisor.pid("a") not in (None, first))
    assert supervisor.state("a").restarts == 1
    assert supervisor.state("a").last_code == -signal.SIGKILL
    assert [e.kind for e in events] == [EventKind.STARTED, EventKind.KILLED, EventKind.ENDED, EventKind.STARTED]


def test_restart_policies(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec("never", ("false",), restart=Restart.NEVER))
    supervisor.start(ProcessSpec("ended-well", ("true",), restart=Restart.ON_FAILURE))
    supervisor.start(ProcessSpec("failed", ("false",), restart=Restart.ON_FAILURE))
    wait_until(lambda: supervisor.state("failed").restarts >= 2)
    assert supervisor.state("never").restarts == 0
    assert supervisor.state("never").last_code == 1
    assert supervisor.state("ended-well").restarts == 0


def test_who_says_that_it_must_not_run_again_does_not(supervisor: Supervisor) -> None:
    said = ("sh", "-c", "echo superseded; exit 76")
    supervisor.start(ProcessSpec("older", said, final_codes=frozenset({76})))
    supervisor.start(ProcessSpec("other", said, final_codes=frozenset({75})))
    wait_until(lambda: supervisor.state("other").restarts >= 2)
    assert (supervisor.state("older").restarts, supervisor.state("older").last_code) == (0, 76)


def test_backoff_grows_and_is_bounded() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0)
    assert [backoff.wait_s(n) for n in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert backoff.wait_s(10_000) == 4.0


def test_a_command_that_is_not_there_says_so_in_its_log(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec("lost", ("/no/such/program",), restart=Restart.NEVER))
    wait_until(lambda: supervisor.state("lost").last_code is not None)
    assert supervisor.state("lost").last_code == 127
    assert "/no/such/program: No such file or directory" in supervisor.log_tail("lost")


def test_output_and_environment_reach_the_log(supervisor: Supervisor) -> None:
    spec = ProcessSpec("say", ("sh", "-c", "echo out $WORD; echo err >&2"), {"WORD": "hello"}, restart=Restart.NEVER)
    supervisor.start(spec)
    wait_until(lambda: supervisor.state("say").last_code == 0)
    assert supervisor.log_tail("say").splitlines() == ["out hello", "err"]
    assert supervisor.log_tail("unknown") == ""


def test_children_of_a_dead_process_do_not_stay(supervisor: Supervisor, tmp_path: Path) -> None:
    note = tmp_path / "child"
    supervisor.start(ProcessSpec("parent", ("sh", "-c", f"sleep 600 & echo $! > {note}; wait"), restart=Restart.NEVER))
    wait_until(lambda: note.exists() and note.read_text().strip() != "")
    child = int(note.read_text())
    supervisor.kill("parent")
    wait_until(lambda: not is_alive(child))


def test_processes_that_live_together_restart_together(supervisor: Supervisor) -> None:
    pids = {n: supervisor.start(ProcessSpec(n, SLEEP, together="world", stop_grace_s=0.2)) for n in ("a", "b")}
    alone = supervisor.start(ProcessSpec("c", SLEEP))
    supervisor.kill("b", signal.SIGSTOP)
    supervisor.kill("a")
    wait_until(lambda: all(supervisor.pid(n) not in (None, pids[n]) for n in pids))
    assert supervisor.pid("c") == alone
    supervisor.stop("a")
    assert not supervisor.state("b").running
    assert supervisor.state("b").restarts == 1
    assert supervisor.pid("c") == alone


def test_stop_takes_a_hung_and_a_stubborn_process(supervisor: Supervisor, events: list[ProcessEvent]) -> None:
    hung = supervisor.start(ProcessSpec("hung", SLEEP, stop_grace_s=0.3))
    supervisor.kill("hung", signal.SIGSTOP)
    supervisor.stop("hung")
    stubborn = supervisor.start(ProcessSpec("stubborn", ("sh", "-c", "trap '' TERM; sleep 600"), stop_grace_s=0.3))
    supervisor.stop("stubborn")
    assert not is_alive(hung)
    assert not is_alive(stubborn)
    assert supervisor.state("stubborn").restarts == 0
    assert events[-1].kind is EventKind.STOPPED


def test_close_stops_the_last_started_first(tmp_path: Path) -> None:
    events: list[ProcessEvent] = []
    with Supervisor(tmp_path, events.append, QUICK) as supervisor:
        for name in ("etcd", "controller", "agent"):
            supervisor.start(ProcessSpec(name, SLEEP))
    assert [e.name for e in events if e.kind is EventKind.STOPPED] == ["agent", "controller", "etcd"]
    with pytest.raises(StackError, match="closed"):
        supervisor.start(ProcessSpec("late", SLEEP))


def test_what_was_asked_for_just_before_the_end_is_stopped_too(tmp_path: Path) -> None:
    """A caller that is interrupted while it waits for its process to start goes on to close."""
    entered, go = threading.Event(), threading.Event()

    def observe(event: ProcessEvent) -> None:
        if event.name == "first" and event.kind is EventKind.STARTED:
            entered.set()
            go.wait(10)

    supervisor = Supervisor(tmp_path, observe, QUICK)
    for name in ("first", "second"):
        threading.Thread(target=supervisor.start, args=(ProcessSpec(name, SLEEP),)).start()
        entered.wait(10)
    closing = threading.Thread(target=supervisor.close)
    closing.start()
    time.sleep(0.2)
    go.set()
    closing.join(30)
    assert {name: state.running for name, state in supervisor.states().items()} == {"first": False, "second": False}


def test_names_are_checked(supervisor: Supervisor) -> None:
    supervisor.start(ProcessSpec("a", SLEEP))
    with pytest.raises(StackError, match="already"):
        supervisor.start(ProcessSpec("a", SLEEP))
    with pytest.raises(StackError, match="no process b; known are a"):
        supervisor.state("b")
    supervisor.stop("a")
    with pytest.raises(StackError, match="not running"):
        supervisor.kill("a")
    assert supervisor.start(ProcessSpec("a", SLEEP)) == supervisor.pid("a")


def test_an_observer_that_fails_ends_nothing(tmp_path: Path) -> None:
    def fail(event: ProcessEvent) -> None:
        raise ValueError(event.name)

    with Supervisor(tmp_path, fail, QUICK) as supervisor:
        first = supervisor.start(ProcessSpec("a", SLEEP))
        supervisor.kill("a")
        wait_until(lambda: supervisor.pid("a") not in (None, first))


def test_a_killed_supervisor_leaves_no_process(tmp_path: Path) -> None:
    script = (
        "import sys, time, pathlib\n"
        "from api.supervise import ProcessSpec, Supervisor\n"
        "s = Supervisor(pathlib.Path(sys.argv[1]))\n"
        "print(s.start(ProcessSpec('a', ('sleep', '600'))), flush=True)\n"
        "time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        assert is_alive(child)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
    wait_until(lambda: not is_alive(child))
