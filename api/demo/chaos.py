"""Kills the leader and agents at exactly the moments that hurt: with waves in STAGING and in SWITCHING.

The processes kill themselves (SIGKILL) at named crash points, each once: a file is created first, so that what the
supervisor restarts does not die again. The kill log is read from these files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# (actor, wave state in which it dies, crash point, pass of the point in one life of the process). The first four need
# only one wave; the others come with later ones.
_KILLS = (
    ("controller", "STAGING", "controller.stage.after", 1),
    ("agent", "STAGING", "agent.stage.after", 1),
    ("controller", "SWITCHING", "controller.cutover.after", 1),
    ("agent", "SWITCHING", "agent.arm.after", 1),
    ("agent", "STAGING", "agent.verified.before", 3),
    ("agent", "SWITCHING", "agent.switched.before", 4),
)


@dataclass(frozen=True, slots=True)
class Kill:
    """One process that died: who, in which state of the wave, when."""

    actor: str
    wave_state: str
    t: float

    def to_json(self) -> dict[str, object]:
        return {"actor": self.actor, "wave_state": self.wave_state, "t": round(self.t, 2)}


class Chaos:
    """The planned kills. `directory` holds a file for each that happened."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def environment(self) -> Mapping[str, Mapping[str, str]]:
        """Variables for the processes whose names begin with the key."""
        actors = {actor for actor, *_ in _KILLS}
        return {actor: {"EPLANE_CRASH": ",".join(self._specs(actor))} for actor in sorted(actors)}

    def _specs(self, actor: str) -> list[str]:
        return [f"{point}#{nth}:kill@{self._file(state, point)}" for who, state, point, nth in _KILLS if who == actor]

    def kills(self, started_at: float) -> Sequence[Kill]:
        """What happened so far, in order; `started_at`: wall time of the demo's second 0."""
        done = [
            Kill(actor, state, self._file(state, point).stat().st_mtime - started_at)
            for actor, state, point, _ in _KILLS
            if self._file(state, point).exists()
        ]
        return sorted(done, key=lambda kill: kill.t)

    def _file(self, state: str, point: str) -> Path:
        return self._directory / f"{state}.{point}"
