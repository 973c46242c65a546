"""Supervisor: starts processes, restarts what dies, stops everything in order and leaves no orphan.

Each process leads a session of its own (a Ctrl-C at the terminal reaches the supervisor alone) and writes to
`RUN_DIR/logs/NAME.log`. Three guards against orphans, each enough for its case:

    the supervisor stops           close() stops the processes in reverse order of their start
    the supervisor is killed       PR_SET_PDEATHSIG: the kernel signals every process
    a process leaves children      its whole process group is killed before it is restarted or forgotten

The kernel ties PR_SET_PDEATHSIG to the THREAD that forked, so one thread, which lives as long as the supervisor,
starts every process; callers hand it their wishes and wait.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import IO, TypeVar

from eplane.errors import StackError

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 0.05
# Runs before the program itself: asks for a signal at the parent's death, checks that the parent did not die in
# between, then becomes the program. A separate interpreter, because code between fork and exec of a threaded
# process (gRPC has threads) may deadlock.
_TETHER = (
    "import ctypes,os,sys\n"
    "ctypes.CDLL(None,use_errno=True).prctl(1,int(sys.argv[1]),0,0,0)\n"
    "if os.getppid()!=int(sys.argv[2]): os._exit(0)\n"
    "try: os.execvp(sys.argv[3],sys.argv[3:])\n"
    "except OSError as e: sys.stderr.write(f'{sys.argv[3]}: {e.strerror}\\n'); os._exit(127)\n"
)


class Restart(enum.Enum):
    """What to do when a process ends without having been asked to."""

    ALWAYS = "always"
    ON_FAILURE = "on-failure"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run. `env` is laid over the supervisor's environment.

    `together` names processes that live and die as one (the launchers of one world): when one ends, the others are
    ended too and all are started again at once. `death_signal` is what the kernel sends if the supervisor is killed.
    `final_codes`: exit codes by which a process says that it is not to be started again.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    restart: Restart = Restart.ALWAYS
    together: str | None = None
    stop_signal: int = signal.SIGTERM
    stop_grace_s: float = 10.0
    death_signal: int = signal.SIGKILL
    final_codes: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Backoff:
    """Wait before the n-th restart in a row; a process that stayed up `healthy_s` starts the row anew."""

    first_s: float = 0.2
    most_s: float = 5.0
    healthy_s: float = 10.0

    def wait_s(self, restarts_in_a_row: int) -> float:
        return float(min(self.most_s, self.first_s * 2 ** min(restarts_in_a_row, 16)))


class EventKind(enum.Enum):
    STARTED = "started"
    ENDED = "ended"
    STOPPED = "stopped"
    KILLED = "killed"


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """Something happened to process `name`. `code`: exit status (negative: the signal), or the signal sent."""

    kind: EventKind
    name: str
    pid: int
    code: int | None
    at: float


@dataclass(frozen=True, slots=True)
class ProcessState:
    """What the supervisor knows of one process now."""

    name: str
    pid: int | None
    running: bool
    restarts: int
    last_code: int | None


@dataclass(slots=True)
class _Process:
    """The supervising thread's own record of one process; nobody else writes it."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    due_at: float | None = 0.0
    restarts: int = 0
    in_a_row: int = 0
    last_code: int | None = None
    end_by: float | None = None
    wanted: bool = True


class Supervisor:
    """Keeps processes running. Thread-safe; `on_event` is called from the supervising thread and must be quick."""

    def __init__(
        self,
        run_dir: Path,
        on_event: Callable[[ProcessEvent], None] | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._logs = run_dir / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._on_event = on_event
        self._backoff = backoff or Backoff()
        self._processes: dict[str, _Process] = {}
        self._wishes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # ---------------------------------------------------------------- what callers ask for

    def start(self, spec: ProcessSpec) -> int:
        """Start a process and keep it running from now on. Returns its pid. Its name must be new."""
        return self._ask(lambda: self._add(spec))

    def kill(self, name: str, signum: int = signal.SIGKILL) -> int:
        """Send a signal to the process itself (not its group) and return its pid; the restart policy then acts."""
        return self._ask(lambda: self._kill(name, signum))

    def stop(self, name: str) -> None:
        """Stop a process for good: its stop signal, after its grace SIGKILL, its group with it. Blocks until gone.

        Those that live together with it are stopped too: alone they would only end and start again.
        """
        for one in self._ask(lambda: self._unwant(name)):
            self._await_gone(one)

    def pid(self, name: str) -> int | None:
        """The pid of a running process, None while it waits to be restarted."""
        return self.state(name).pid

    def state(self, name: str) -> ProcessState:
        process = self._processes.get(name)
        if process is None:
            raise StackError(f"there is no process {name}; known are {', '.join(sorted(self._processes)) or 'none'}")
        return _state(process)

    def states(self) -> dict[str, ProcessState]:
        return {name: _state(process) for name, process in list(self._processes.items())}

    def log_path(self, name: str) -> Path:
        return self._logs / f"{name}.log"

    def log_tail(self, name: str, lines: int = 12) -> str:
        """The last lines of a process's log, '' if it wrote none."""
        try:
            with self.log_path(name).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - 16_384))
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def close(self) -> None:
        """Stop all processes, the last started first, and end the supervising thread. May be called twice."""
        if self._closed.is_set():
            return
        atexit.unregister(self.close)
        if self._thread.is_alive():
            # Asked, not read: a caller may have been interrupted while its wish to start one more still waited.
            for name in self._ask(lambda: list(reversed(self._processes))):
                try:
                    self.stop(name)
                except StackError as error:
                    log.error("while closing: %s", error)
        self._closed.set()
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # ---------------------------------------------------------------- the supervising thread

    def _ask(self, wish: Callable[[], T]) -> T:
        if self._closed.is_set() or not self._thread.is_alive():
            raise StackError("the supervisor has been closed")
        answer: Future[T] = Future()

        def grant() -> None:
            try:
                answer.set_result(wish())
            except Exception as error:
                answer.set_exception(error)

        self._wishes.put(grant)
        return answer.result(timeout=30.0)

    def _supervise(self) -> None:
        try:
            while not self._closed.is_set():
                self._grant_wishes()
                for process in list(self._processes.values()):
                    self._tend(process)
        except BaseException:
            # The end of this thread makes the kernel end every process; say why before that happens.
            log.exception("the supervising thread failed; all processes end with it")
            raise

    def _grant_wishes(self) -> None:
        with contextlib.suppress(Empty):
            self._wishes.get(timeout=POLL_S)()
            while True:
                self._wishes.get_nowait()()

    def _tend(self, process: _Process) -> None:
        now = time.monotonic()
        if process.popen is not None:
            if _has_ended(process.popen.pid):
                self._ended(process, now)
            elif process.end_by is not None and now >= process.end_by:
                _signal_group(process.popen.pid, signal.SIGKILL)
        elif process.wanted and process.due_at is not None and now >= process.due_at and self._partners_gone(process):
            process.restarts += 1
            try:
                self._spawn(process)
            except OSError as error:
                process.in_a_row += 1
                process.due_at = now + self._backoff.wait_s(process.in_a_row)
                log.error("process %s can not be started: %s", process.spec.name, error)

    def _ended(self, process: _Process, now: float) -> None:
        if process.popen is None:
            return
        pid = process.popen.pid
        # While the leader is not yet reaped its number can not be given to a stranger's group.
        _signal_group(pid, signal.SIGKILL)
        code = process.popen.wait()
        process.popen, process.last_code, process.end_by = None, code, None
        self._tell(EventKind.ENDED if process.wanted else EventKind.STOPPED, process.spec.name, pid, code)
        if not process.wanted:
            return
        policy = process.spec.restart
        final = code in process.spec.final_codes
        if final or policy is Restart.NEVER or (policy is Restart.ON_FAILURE and code == 0):
            process.due_at = None
            if final:
                log.error(
                    "process %s ended with %d and is not started again: %s",
                    process.spec.name,
                    code,
                    self.log_tail(process.spec.name, 1),
                )
            return
        process.in_a_row = 0 if now - process.started_at >= self._backoff.healthy_s else process.in_a_row + 1
        process.due_at = now + self._backoff.wait_s(max(0, process.in_a_row - 1))
        self._end_partners(process, process.due_at)

    def _end_partners(self, process: _Process, due_at: float) -> None:
        for other in self._partners(process):
            other.due_at = due_at
            if other.popen is not None and other.end_by is None:
                _signal(other.popen.pid, other.spec.stop_signal)
                other.end_by = time.monotonic() + other.spec.stop_grace_s

    def _partners(self, process: _Process) -> list[_Process]:
        group = process.spec.together
        return [p for p in self._processes.values() if group and p is not process and p.spec.together == group]

    def _partners_gone(self, process: _Process) -> bool:
        """A partner that was asked to end must be gone before anyone of the group starts again."""
        return not any(p.popen is not None and p.end_by is not None for p in self._partners(process))

    def _add(self, spec: ProcessSpec) -> int:
        known = self._processes.get(spec.name)
        if known is not None and (known.wanted or known.popen is not None):
            raise StackError(f"there is already a process named {spec.name}")
        process = _Process(spec)
        self._processes.pop(spec.name, None)
        pid = self._spawn(process)
        self._processes[spec.name] = process
        return pid

    def _spawn(self, process: _Process) -> int:
        spec = process.spec
        argv = [sys.executable, "-I", "-S", "-c", _TETHER, str(int(spec.death_signal)), str(os.getpid()), *spec.argv]
        with self._open_log(spec) as out:
            process.popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **spec.env},
                start_new_session=True,
            )
        process.started_at, process.due_at, process.end_by = time.monotonic(), None, None
        self._tell(EventKind.STARTED, spec.name, process.popen.pid, None)
        return process.popen.pid

    def _open_log(self, spec: ProcessSpec) -> IO[bytes]:
        return self.log_path(spec.name).open("ab")

    def _kill(self, name: str, signum: int) -> int:
        process = self._processes.get(name)
        if process is None or process.popen is None or _has_ended(process.popen.pid):
            raise StackError(f"process {name} is not running")
        pid = process.popen.pid
        _signal(pid, signum)
        self._tell(EventKind.KILLED, name, pid, int(signum))
        return pid

    def _unwant(self, name: str) -> list[str]:
        asked = self._processes.get(name)
        if asked is None:
            raise StackError(f"there is no process {name}")
        together = [asked, *self._partners(asked)]
        for process in together:
            process.wanted, process.due_at = False, None
            if process.popen is not None:
                _signal(process.popen.pid, process.spec.stop_signal)
                # A stopped process (SIGSTOP) takes its signal only once it goes on.
                _signal(process.popen.pid, signal.SIGCONT)
                process.end_by = time.monotonic() + process.spec.stop_grace_s
        return [process.spec.name for process in together]

    def _await_gone(self, name: str) -> None:
        process = self._processes[name]
        limit = time.monotonic() + process.spec.stop_grace_s + 5.0
        while process.popen is not None:
            if time.monotonic() > limit:
                raise StackError(f"process {name} can not be stopped, see {self.log_path(name)}")
            time.sleep(POLL_S / 5)

    def _tell(self, kind: EventKind, name: str, pid: int, code: int | None) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(ProcessEvent(kind, name, pid, code, time.time()))
        except Exception:
            log.exception("an observer of the supervisor failed on %s %s", name, kind.value)


def _state(process: _Process) -> ProcessState:
    popen = process.popen
    pid = None if popen is None else popen.pid
    return ProcessState(process.spec.name, pid, pid is not None, process.restarts, process.last_code)


def _has_ended(pid: int) -> bool:
    """Has our child ended? Looks without reaping it."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _signal(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _signal_group(pid: int, signum: int) -> None:
    """Signal what is left of a process's group; the pid was the group's leader and is not yet reused by us."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
