"""A real etcd for tests: one process on free loopback ports, with everything that can happen to it as a method."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any


def etcd_binary() -> str:
    """`EPLANE_ETCD`, else `etcd` on the PATH."""
    found = os.environ.get("EPLANE_ETCD") or shutil.which("etcd")
    if not found:
        raise FileNotFoundError("no etcd: set EPLANE_ETCD or install etcd-server")
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdProcess:
    """`start` waits until it is healthy. Use as a context manager, so that no process is left behind."""

    def __init__(self, folder: Path, *, name: str = "e0", options: tuple[str, ...] = (), tls: bool = False) -> None:
        self.folder = folder
        self.name = name
        self.client_port = free_port()
        self.peer_port = free_port()
        self.peers: tuple[EtcdProcess, ...] = (self,)
        self._options = options
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("etcd is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    def start(self, *, wait: bool = True) -> EtcdProcess:
        self.folder.mkdir(parents=True, exist_ok=True)
        scheme = "https" if self._tls else "http"
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        cluster = ",".join(f"{etcd.name}=http://127.0.0.1:{etcd.peer_port}" for etcd in self.peers)
        command = [etcd_binary(), "--name", self.name, "--data-dir", str(self.folder / self.name)]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", cluster]
        command += ["--heartbeat-interval", "50", "--election-timeout", "500", *self._options]
        # An etcd of the tests must not pick up settings of one that runs on this machine.
        env = {key: value for key, value in os.environ.items() if not key.startswith("ETCD_")}
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env)
        if wait:
            self.wait_healthy()
        return self

    def wait_healthy(self, seconds: float = 30.0) -> None:
        """Until it answers a read that needs a leader; with TLS, until the port takes connections."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"etcd ended: {self.log[-2000:]}")
            try:
                if self._tls:
                    socket.create_connection(("127.0.0.1", self.client_port), timeout=1).close()
                else:
                    self.post("kv/range", {"key": "AA=="})
                return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code in (400, 401, 403):
                    return  # it wants a user: it answers
            except (OSError, TimeoutError):
                pass
            time.sleep(0.03)
        raise RuntimeError(f"etcd is not healthy after {seconds} s: {self.log[-2000:]}")

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
        """One call over etcd's JSON gateway: independent of the client under test."""
        url = f"http://{self.endpoint}/v3/{path}"
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=2) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
        return answer

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. The data stays."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()

    def wipe(self) -> None:
        """Kill it and lose its data; `start` then makes a new store at the same place."""
        self.kill()
        shutil.rmtree(self.folder / self.name)

    def revision(self) -> int:
        return int(self.post("kv/range", {"key": "AA=="})["header"]["revision"])

    def compact(self, revision: int | None = None) -> int:
        """Forget the history before `revision` (default: all of it); returns that revision."""
        revision = revision or self.revision()
        self.post("kv/compaction", {"revision": revision, "physical": True})
        return revision

    def stop(self) -> None:
        self.kill()

    def __enter__(self) -> EtcdProcess:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def cluster(folder: Path, size: int) -> tuple[EtcdProcess, ...]:
    """`size` members that know each other, not yet started: start all with `wait=False`, then wait."""
    members = tuple(EtcdProcess(folder, name=f"e{n}") for n in range(size))
    for member in members:
        member.peers = members
    return members
