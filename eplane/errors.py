"""Every error EPlane raises on purpose, in one tree. Each line says what the caller may do.

EPlaneError
├── ProblemError    a placement problem cannot be read: correct the named field (exit 2)
├── PlacementError  a placement or its shares are not valid: correct the table (exit 2)
├── TopologyError   a world or a model shape is impossible: correct the numbers (exit 2)
└── Infeasible      no placement meets the hard goals: relax the named goal (exit 3)
"""

from __future__ import annotations


class EPlaneError(Exception):
    """Base of every error raised on purpose. `exit_code` is what a command ends with."""

    exit_code = 1


class ProblemError(EPlaneError):
    """A placement problem cannot be read. Correct the field named in the sentence."""

    exit_code = 2

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class Infeasible(EPlaneError):
    """No placement meets the hard goals. `goal` names the one that cannot be met."""

    exit_code = 3

    def __init__(self, goal: str, reason: str) -> None:
        super().__init__(f"goal {goal} cannot be met: {reason}")
        self.goal = goal


class PlacementError(EPlaneError):
    """A placement, or the shares of one, are not valid. Correct the table that the sentence describes."""

    exit_code = 2


class TopologyError(EPlaneError):
    """A world or a model shape is impossible. Correct the numbers named in the sentence."""

    exit_code = 2
