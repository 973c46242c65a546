"""Named places at which a process kills or stops itself, so that tests reach every interrupted state.

`EPLANE_CRASH` is a comma list of `name[#n][:kill|stop|exit][@file]`: at the n-th pass (1 if not given) of the point the
process sends itself SIGKILL (kill, the default) or SIGSTOP (stop), or exits at once without cleaning up (exit). With
`@file` it does so once only: the file is created first, so that a restarted process does not crash again. Where the
variable is not set, a point costs one comparison.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from eplane.errors import SettingsError

VARIABLE = "EPLANE_CRASH"
EXIT_CODE = 86
POINTS = frozenset(
    f"{actor}.{point}.{side}"
    for actor, points in (
        ("controller", ("stage", "cutover", "finish", "adopt", "plan", "abort")),
        ("agent", ("stage", "verified", "arm", "switched", "clean", "abort")),
    )
    for point in points
    for side in ("before", "after")
)
_ENTRY = re.compile(r"(?P<name>[a-z.]+)(?:#(?P<nth>[0-9]{1,9}))?(?::(?P<kind>[a-z]+))?(?:@(?P<file>.+))?", re.ASCII)


class Ending(Enum):
    KILL = "kill"
    STOP = "stop"
    EXIT = "exit"


@dataclass(frozen=True, slots=True)
class CrashSpec:
    """End the process by `ending` at the `nth` pass of the point `name`; only if `once` can be created, where given."""

    name: str
    nth: int
    ending: Ending
    once: Path | None


def parse_crashes(text: str) -> tuple[CrashSpec, ...]:
    """The entries of an `EPLANE_CRASH` value. Raises SettingsError that names the bad entry."""
    result: list[CrashSpec] = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(entry)
        if match is None:
            raise SettingsError(VARIABLE, f"{entry!r:.80} is not name[#n][:kill|stop|exit][@file]")
        name, kind = match["name"], match["kind"] or Ending.KILL.value
        if name not in POINTS:
            raise SettingsError(VARIABLE, f"no crash point is named {name!r}; known are {', '.join(sorted(POINTS))}")
        endings = {ending.value: ending for ending in Ending}
        if kind not in endings:
            raise SettingsError(VARIABLE, f"{kind!r} is not one of {', '.join(endings)}")
        nth = int(match["nth"] or 1)
        if nth < 1:
            raise SettingsError(VARIABLE, f"{entry!r:.80}: passes are counted from 1")
        result.append(CrashSpec(name, nth, endings[kind], Path(match["file"]) if match["file"] else None))
    return tuple(result)


class CrashPoints:
    """Counts the passes of each point and ends the process where a spec says so. Safe to call from any thread."""

    __slots__ = ("_lock", "_passes", "_specs")

    def __init__(self, specs: tuple[CrashSpec, ...]) -> None:
        self._specs = specs
        self._passes: dict[str, int] = {}
        self._lock = threading.Lock()

    def due(self, name: str) -> CrashSpec | None:
        """Count one pass of `name`; the spec that is due now, its file created."""
        with self._lock:
            passed = self._passes[name] = self._passes.get(name, 0) + 1
            for spec in self._specs:
                if spec.name == name and spec.nth == passed and (spec.once is None or _create(spec.once)):
                    return spec
        return None


_text = os.environ.get(VARIABLE, "")
_points: CrashPoints | None = None


def crash_point(name: str) -> None:
    """End or stop this process here, if `EPLANE_CRASH` says so. Raises SettingsError where its value is wrong."""
    if not _text:
        return
    global _points
    if _points is None:
        _points = CrashPoints(parse_crashes(_text))
    spec = _points.due(name)
    if spec is not None:
        _end(spec.ending)


def _end(ending: Ending) -> None:
    match ending:
        case Ending.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        case Ending.STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        case Ending.EXIT:
            os._exit(EXIT_CODE)


def _create(path: Path) -> bool:
    """Create `path`; False if it is there already."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
