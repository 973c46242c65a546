"""What an agent is told at its start. Durations in seconds, names checked once, here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eplane.errors import NameRefused
from eplane.keys import check_name
from eplane.settings import Secret, Settings, setting


@dataclass(frozen=True, slots=True)
class AgentSettings(Settings):
    """One agent: its `group` and `node`, where the store is, where the engine's sockets and counters lie.

    ttl_s: presence lease. report_every_s: how often load is read and posted. describe_every_s: how often the ranks are
    described to the leader unasked. replay_windows: sub-windows of a rank that are kept to replay to a new leader.
    token: bearer token for the leader's API, where it asks for one.
    """

    group: str
    node: str
    link_dir: Path
    # A shorter lease can not be kept alive.
    ttl_s: float = setting(3.0, low=1)
    report_every_s: float = setting(0.5, low=0, above=True)
    describe_every_s: float = setting(10.0, low=0, above=True)
    move_every_s: float = setting(0.1, low=0, above=True)
    replay_windows: int = setting(16, low=1)
    queue_windows: int = setting(512, low=1)
    request_timeout_s: float = setting(2.0, low=0, above=True)
    token: Secret | None = None
    verify_tls: str | bool = True

    def rules(self) -> Iterator[tuple[str, str]]:
        for name in ("group", "node"):
            try:
                check_name(name, getattr(self, name))
            except NameRefused as error:
                yield name, error.reason
        if self.replay_windows > self.queue_windows:
            yield "replay_windows", f"must not exceed queue_windows ({self.queue_windows})"
