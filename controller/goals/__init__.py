"""Goals: rules with a verdict YES, THROTTLE or NO, each with one sentence."""

from __future__ import annotations

from controller.goals.case import Case, Goal, Verdict, judge
from controller.goals.hard import HARD
from controller.goals.soft import LIMITS, SOFT

ALL: tuple[Goal, ...] = (*HARD, *SOFT)

__all__ = ["ALL", "HARD", "LIMITS", "SOFT", "Case", "Goal", "Verdict", "judge"]
