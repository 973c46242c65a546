"""What the demo plays: how its time is cut into phases of one domain each, and what it was asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eplane.errors import BadInput

# The order in which the traffic changes its domain. Three shifts; the last domain stays for the quiet end.
DOMAINS = ("python", "chinese", "english", "python")
# The last minute is played without a shift: nothing may move in it.
QUIET_S = 60.0
FAULTS = ("wrong-bundle", "mixed-epoch", "skip-digest")


@dataclass(frozen=True, slots=True)
class Phase:
    """Traffic of one domain, from `start_s` to `end_s` after the start."""

    number: int
    domain: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What was asked for. `seconds` of traffic: three shifts of domain, then the last minute without one."""

    ranks: int = 4
    nodes: int = 2
    controllers: int = 2
    seconds: float = 200.0
    json_path: Path = Path("out.json")
    png_path: Path = Path("out.png")
    policy: str = "eplane"
    chaos: bool = False
    fault: str | None = None
    run_dir: Path | None = None
    slots: int = 10
    clients: int = 20
    seed: int = 1

    def __post_init__(self) -> None:
        if not QUIET_S + 40 <= self.seconds < float("inf"):
            raise BadInput(
                f"--seconds {self.seconds:g}: the last {QUIET_S:g} s are quiet and four phases come before them; "
                f"give at least {QUIET_S + 40:g}"
            )
        if self.fault is not None and self.fault not in FAULTS:
            raise BadInput(f"--fault {self.fault}: must be one of {', '.join(FAULTS)}")
        if self.chaos and self.controllers < 2:
            raise BadInput("--chaos kills the leader: give --controllers 2 or more, so that another takes over")
        if self.clients < 1 or self.slots < 1:
            raise BadInput("clients and slots must be at least 1")


def phases(seconds: float) -> tuple[Phase, ...]:
    """Four phases of equal length before the quiet minute; the last one goes on through it."""
    each = (seconds - QUIET_S) / len(DOMAINS)
    ends = [each * (n + 1) for n in range(len(DOMAINS) - 1)] + [seconds]
    starts = [0.0, *ends[:-1]]
    return tuple(Phase(n, d, s, e) for n, (d, s, e) in enumerate(zip(DOMAINS, starts, ends, strict=True)))


def phase_at(script: tuple[Phase, ...], seconds: float) -> Phase:
    return next((phase for phase in script if seconds < phase.end_s), script[-1])
