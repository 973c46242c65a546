"""The one sentence that every control cycle ends with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class VerdictKind(StrEnum):
    """What a cycle came to. A closed set: also metric labels and API values."""

    STARTING = "starting"
    FOLLOWING = "following"
    OFF = "off"
    OBSERVING = "observing"
    NO_WORLD = "no_world"
    DISAGREE = "disagree"
    ABSENT = "absent"
    PAUSED = "paused"
    MIGRATING = "migrating"
    DEAD = "dead"
    NO_LOAD = "no_load"
    LEVEL = "level"
    NOT_WORTH_IT = "not_worth_it"
    THROTTLED = "throttled"
    CONFIRMING = "confirming"
    PROPOSED = "proposed"
    STARTED = "started"
    STATIC = "static"
    INFEASIBLE = "infeasible"
    FAILED = "failed"
    BROKEN_RECORD = "broken_record"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`at`: seconds since 1970."""

    at: float
    kind: VerdictKind
    sentence: str

    def to_json(self) -> dict[str, object]:
        return {"at": self.at, "kind": self.kind.value, "sentence": self.sentence}
