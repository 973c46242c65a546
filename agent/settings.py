"""What an agent is told at its start. Durations in seconds, names checked once, here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eplane.errors import SettingsError
from eplane.keys import check_name


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """One agent: its `group` and `node`, where the store is, where the engine's sockets and counters lie.

    ttl_s: presence lease. report_every_s: how often load is read and posted. describe_every_s: how often the ranks are
    described to the leader unasked. replay_windows: sub-windows of a rank that are kept to replay to a new leader.
    token: bearer token for the leader's API, where it asks for one.
    """

    group: str
    node: str
    link_dir: Path
    ttl_s: float = 3.0
    report_every_s: float = 0.5
    describe_every_s: float = 10.0
    move_every_s: float = 0.1
    replay_windows: int = 16
    queue_windows: int = 512
    request_timeout_s: float = 2.0
    token: str | None = None
    verify_tls: str | bool = True

    def __post_init__(self) -> None:
        check_name("group", self.group)
        check_name("node", self.node)
        if self.ttl_s < 1:
            raise SettingsError("ttl_s", f"a lease of {self.ttl_s} s cannot be kept alive; give at least 1 s")
        for name in ("report_every_s", "describe_every_s", "move_every_s", "request_timeout_s"):
            if getattr(self, name) <= 0:
                raise SettingsError(name, f"must be above 0, got {getattr(self, name)}")
        if not 1 <= self.replay_windows <= self.queue_windows:
            raise SettingsError("replay_windows", f"must lie between 1 and queue_windows ({self.queue_windows})")

    def __repr__(self) -> str:
        shown = {name: getattr(self, name) for name in self.__slots__ if name != "token"}
        return f"AgentSettings({shown}, token={'set' if self.token else None})"
