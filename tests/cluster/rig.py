"""A small deployment of real processes: etcd, two controllers, two agents, a model engine; a supervisor restarts them.

What is asked and ordered goes over REST, as a person would; what is true is read from etcd's own JSON gateway and from
the engine's diary, past the code under test.
"""

from __future__ import annotations

import base64
import json
import signal
import sys
import time
import urllib.error
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from api.client import Client, ClientSettings, path_of
from api.supervise import Backoff, ProcessEvent, ProcessSpec, Restart, Supervisor
from eplane.errors import ApiProblem, Superseded
from eplane.keys import GroupKeys
from eplane.migration import FINAL, MigrationState
from eplane.records import EpochPointer, HistoryRecord, LeaderRecord, PresenceRecord, Record, decode
from eplane.work import MigrationRecord, WaveRecord
from tests.etcd_process import EtcdProcess, free_port

GROUP = "g"
KEYS = GroupKeys(GROUP)
NODES = ("n0", "n1")
CONTROLLERS = ("c0", "c1")
TTL_S = 2.0
ROOT = Path(__file__).resolve().parents[2]
# Waits end in time even where the machine is very busy; nothing is concluded from how long they took.
PATIENCE_S = 90.0
# Every plan of the tests has several waves, and a wave several moves on both nodes.
SETTINGS = {"policy": "eplb", "max_moves_per_wave": 6, "cooldown_s": 0, "stall_s": 3.0}

T = TypeVar("T")
SomeRecord = TypeVar("SomeRecord", bound=Record)


def until(look: Callable[[], T | None], what: str, limit_s: float = PATIENCE_S) -> T:
    """The first answer of `look` that is neither None nor False."""
    limit = time.monotonic() + limit_s
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        if time.monotonic() > limit:
            raise TimeoutError(f"never: {what}")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class Stored:
    """The group as etcd holds it at one moment: values and create revisions by key."""

    values: Mapping[str, bytes]
    created: Mapping[str, int]

    def one(self, kind: type[SomeRecord], key: str) -> SomeRecord | None:
        return decode(kind, self.values[key]) if key in self.values else None

    def all(self, kind: type[SomeRecord], prefix: str) -> list[SomeRecord]:
        return [decode(kind, value) for key, value in sorted(self.values.items()) if key.startswith(prefix)]

    @property
    def pointer(self) -> EpochPointer | None:
        return self.one(EpochPointer, KEYS.epoch)

    @property
    def history(self) -> list[HistoryRecord]:
        return self.all(HistoryRecord, KEYS.histories)

    @property
    def migrations(self) -> list[MigrationRecord]:
        keys = sorted(key for key in self.values if key.startswith(KEYS.migrations) and "/waves/" not in key)
        return [decode(MigrationRecord, self.values[key]) for key in keys]

    def migration(self, name: str) -> MigrationRecord | None:
        return self.one(MigrationRecord, KEYS.migration(name))

    def waves(self, migration: str) -> list[WaveRecord]:
        return self.all(WaveRecord, KEYS.waves(migration))

    @property
    def leader(self) -> tuple[str, int] | None:
        """The leader's id and the create revision of its seat."""
        found = self.one(LeaderRecord, KEYS.leader)
        return None if found is None else (found.id, self.created[KEYS.leader])

    @property
    def agents(self) -> dict[str, PresenceRecord]:
        return {agent.node: agent for agent in self.all(PresenceRecord, KEYS.agents)}


def stored(etcd: EtcdProcess) -> Stored | None:
    """None while etcd does not answer."""
    end = base64.b64encode(KEYS.prefix[:-1].encode() + b"0").decode()
    try:
        answer = etcd.post("kv/range", {"key": base64.b64encode(KEYS.prefix.encode()).decode(), "range_end": end})
    except (urllib.error.URLError, OSError, TimeoutError):
        return None
    found = [(base64.b64decode(kv["key"]).decode(), kv) for kv in answer.get("kvs", ())]
    values = {key: base64.b64decode(kv.get("value", "")) for key, kv in found}
    return Stored(values, {key: int(kv["create_revision"]) for key, kv in found})


class Cluster:
    """Use as a context manager; when the body begins, the engine's world is adopted.

    `crash`: EPLANE_CRASH of the processes whose name begins with the key. `port`: where controllers and agents find
    etcd, if not at its own port.
    """

    def __init__(
        self,
        folder: Path,
        etcd: EtcdProcess,
        *,
        crash: Mapping[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.folder = folder
        self.etcd = etcd
        self.hold_file = folder / "hold"
        self.hold_switch = folder / "hold-switch"
        self.marks = folder / "marks"
        self.events: list[ProcessEvent] = []
        self._crash = dict(crash or {})
        self._etcd_url = f"http://127.0.0.1:{port or etcd.client_port}"
        self._ports = {name: free_port() for name in CONTROLLERS}
        self._supervisor: Supervisor | None = None

    @property
    def supervisor(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the cluster is not running")
        return self._supervisor

    def __enter__(self) -> Cluster:
        for node in NODES:
            (self.folder / "link" / node).mkdir(parents=True, exist_ok=True)
        self.marks.mkdir(exist_ok=True)
        self._supervisor = Supervisor(self.folder, self.events.append, Backoff(0.1, 0.5, 30.0))
        try:
            for name in ("engine", *CONTROLLERS, *NODES):
                self.supervisor.start(self.spec(name))
            until(lambda: (self.now() or Stored({}, {})).pointer, "the adoption of the engine's world")
            body = {"settings": SETTINGS, "reason": "the tests' settings"}
            self.change("PATCH", "config", body)
        except BaseException:
            self.supervisor.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.supervisor.close()

    # --- processes ---

    def spec(self, name: str) -> ProcessSpec:
        if name == "engine":
            argv = ["-m", "tests.cluster.engine", "--dir", str(self.folder / "link"), "--nodes", "n0,n0,n1,n1"]
            argv += ["--group", GROUP, "--hold-file", str(self.hold_file)]
            argv += ["--hold-switch", str(self.hold_switch), "--diary", str(self.folder / "diary")]
        elif name in CONTROLLERS:
            argv = ["-m", "api.cli", "controller", "--etcd", self._etcd_url, "--group", GROUP, "--id", name]
            argv += ["--mode", "observe", "--ttl", f"{TTL_S}", "--listen", f"127.0.0.1:{self._ports[name]}"]
        else:
            node = name.partition(".")[0]
            argv = ["-m", "agent", "--group", GROUP, "--node", node, "--etcd", self._etcd_url]
            argv += ["--link-dir", str(self.folder / "link" / node), "--ttl", f"{TTL_S}"]
        env = {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        crash = next((text for prefix, text in self._crash.items() if name.startswith(prefix)), "")
        env["EPLANE_CRASH"] = crash
        # As the one-machine stack has it: who was superseded is not started again.
        final = frozenset({Superseded.exit_code})
        return ProcessSpec(name, (sys.executable, *argv), env, stop_grace_s=5.0, final_codes=final)

    def restart(self, *names: str, restart: Restart = Restart.ALWAYS, **crash: str) -> None:
        """Anew, with other crash points: `restart("n0", n="agent.arm.before:kill")`."""
        self._crash = {**crash, **{prefix: text for prefix, text in self._crash.items() if prefix not in crash}}
        for name in names:
            self.supervisor.stop(name)
        for name in names:
            self.supervisor.start(replace(self.spec(name), restart=restart))

    def signal(self, name: str, number: signal.Signals) -> int:
        return self.supervisor.kill(name, number)

    def is_stopped(self, name: str) -> bool:
        """Whether the process stands still by SIGSTOP."""
        pid = self.supervisor.pid(name)
        try:
            return pid is not None and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
        except OSError:
            return False

    # --- looking ---

    def now(self) -> Stored | None:
        return stored(self.etcd)

    def see(self) -> Stored:
        return until(self.now, "an answer of etcd")

    def engine(self) -> dict[str, Any]:
        """The engine's diary."""
        text = until(lambda: _text(self.folder / "diary"), "the engine's diary")
        found: dict[str, Any] = json.loads(text)
        return found

    # --- ordering ---

    def change(self, method: str, path: str, body: Mapping[str, Any], if_match: int | None = None) -> Any:
        """A change at whoever leads, however long an election takes."""
        urls = tuple(f"http://127.0.0.1:{port}" for port in self._ports.values())
        # A leader that stands still takes requests and answers none: ask again soon.
        with Client(ClientSettings(urls, patience_s=PATIENCE_S, call_s=4.0)) as client:
            return client.change(method, f"/v1/groups/{GROUP}/{path}", body, if_match=if_match)

    def plan(self) -> dict[str, Any]:
        """A plan that moves something: what the policy finds, else the way back to an older placement."""

        def ask() -> dict[str, Any] | None:
            old = self._older_epoch()
            try:
                if old is None:
                    wish = {"reason": "the load is tilted", "options": {"anyway": True}}
                    answer = self.change("POST", "plans", wish)
                else:
                    answer = self.change("POST", "rollback", {"reason": "and back again", "to_epoch": old})
            except ApiProblem as problem:
                if problem.code != "conflict":
                    raise
                return None
            found: dict[str, Any] | None = answer["plan"]
            return found

        return until(ask, "a plan")

    def _older_epoch(self) -> int | None:
        """The first epoch, if what is live differs from it."""
        history = self.see().history
        return history[0].epoch if history[-1].digest != history[0].digest else None

    def begin(self) -> str:
        """Plan and execute; the id of the migration, also if the reply that named it was lost."""
        for _ in range(5):
            plan = self.plan()
            try:
                path = path_of("plans", plan["id"], "execute").lstrip("/")
                done = self.change("POST", path, {"reason": "go"}, if_match=plan["base_epoch"])
                return str(done["id"])
            except ApiProblem as problem:
                if problem.code not in ("conflict", "stale_epoch"):
                    raise
                mine = [m.id for m in self.see().migrations if m.plan == plan["id"]]
                if mine:
                    return mine[0]
        raise TimeoutError("never: a migration")

    def abort(self, migration: str) -> None:
        """Abort, whoever has to be asked how often; that it has ended meanwhile is fine."""
        try:
            self.change("POST", f"migrations/{migration}/abort", {"reason": "enough"})
        except ApiProblem:
            record = self.see().migration(migration)
            if record is None or record.state not in FINAL:
                raise

    def ended(self, migration: str) -> MigrationState:
        def look() -> MigrationState | None:
            now = self.now()
            record = None if now is None else now.migration(migration)
            return record.state if record is not None and record.state in FINAL else None

        return until(look, f"the end of {migration}")

    def wave_in(self, migration: str, state: str) -> int:
        """Wait until a wave is in `state`; its number."""

        def look() -> int | None:
            now = self.now()
            waves = [] if now is None else now.waves(migration)
            return next((w.wave.number for w in waves if w.wave.state.value == state), None)

        return until(look, f"a wave of {migration} in {state}")


def crashes(folder: Path, actor: str, points: tuple[str, ...], kind: str) -> str:
    """EPLANE_CRASH: each of the points ends or stops one process of `actor`, once."""
    return ",".join(f"{actor}.{point}:{kind}@{folder}/{actor}.{point}" for point in points)


def _text(file: Path) -> str | None:
    with suppress(OSError):
        return file.read_text() or None
    return None
