"""What goals judge: one change from the present placement to a target, with all that bears on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from controller.gate import Estimate
from controller.limits import Spent
from controller.settings import GroupSettings
from eplane.placement import Placement
from eplane.plan import Decision, Ruling, WavePlan
from eplane.topology import World


@dataclass(frozen=True, slots=True)
class Case:
    """`estimate`: predicted gain and cost; `spent`: what the group moved lately; both at the moment of judging.

    `forced`: the present placement breaks a hard goal that the target meets, so the change is not weighed against its cost.
    """

    world: World
    base: Placement
    target: Placement
    waves: Sequence[WavePlan]
    settings: GroupSettings
    estimate: Estimate
    spent: Spent
    forced: bool = False

    @property
    def moves(self) -> int:
        return sum(len(wave.loads) for wave in self.waves)

    @property
    def bytes(self) -> int:
        return sum(wave.bytes for wave in self.waves)


class Goal(Protocol):
    """A rule with a verdict. Pure. A hard goal's NO refuses a change whoever asks for it; a soft one's only the automatic."""

    @property
    def name(self) -> str: ...

    @property
    def hard(self) -> bool: ...

    def judge(self, case: Case) -> Decision: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """All goals together: NO if one says NO, else THROTTLE if one says so, else YES. `sentence` is the deciding one's."""

    ruling: Ruling
    sentence: str
    decisions: tuple[Decision, ...]
    refused_by: str | None


def judge(case: Case, goals: Sequence[Goal]) -> Verdict:
    """Every goal is asked, so that a person sees all of them, not the first that refuses."""
    decisions = tuple(goal.judge(case) for goal in goals)
    for ruling in (Ruling.NO, Ruling.THROTTLE):
        found = next((d for d in decisions if d.ruling is ruling), None)
        if found is not None:
            return Verdict(ruling, found.sentence, decisions, found.goal)
    return Verdict(Ruling.YES, "every goal agrees", decisions, None)
