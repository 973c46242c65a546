"""`python -m runtime serve` as a real process, for tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from tests.runtime.rankworker import free_port

START_S = 90.0


@dataclass
class Serve:
    """A running launcher. `folder` holds its link directory and its log."""

    model: str
    folder: Path
    ranks: int = 1
    options: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._running().pid

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def link(self, rank: int) -> Path:
        return self.folder / "link" / f"rank{rank}.sock"

    def start(self) -> Serve:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable, "-m", "runtime", "serve", "--model", self.model, "--world-size", str(self.ranks),
            "--master", f"127.0.0.1:{free_port()}", "--http", f"127.0.0.1:{self.port}", "--device", "cpu",
            "--link-dir", str(self.folder / "link"), *self.options,
        ]  # fmt: skip
        with (self.folder / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        return self

    def ready(self) -> Serve:
        process = self._running()
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise RuntimeError(f"the launcher ended with {process.returncode}: {self.log}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise TimeoutError(self.log)

    def wait(self, seconds: float = 60.0) -> int:
        return self._running().wait(seconds)

    def descendants(self) -> list[int]:
        """Every process of the launcher's session: forkserver, ranks, itself."""
        session = self._running().pid
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                if int(fields[3]) == session and fields[0] != "Z":
                    found.append(int(entry.name))
        return found

    def rank_pids(self) -> list[int]:
        """Processes that hold a rank's counters open, by rank."""
        pids: dict[int, int] = {}
        for pid in self.descendants():
            for rank in range(self.ranks):
                wanted = str(self.folder / "link" / f"rank{rank}.counters")
                if wanted in _maps(pid):
                    pids[rank] = pid
        return [pids[rank] for rank in range(self.ranks)]

    def __enter__(self) -> Serve:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        process = self._running()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self.descendants():
            os.kill(pid, signal.SIGKILL)

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            raise RuntimeError("not started")
        return self.process


def _maps(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return ""


@contextmanager
def serving(model: str, folder: Path, ranks: int = 1, *options: str) -> Iterator[Serve]:
    """A world that answers."""
    with Serve(model, folder, ranks, options).start() as serve:
        yield serve.ready()


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60)
