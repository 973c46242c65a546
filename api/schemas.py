"""What changes are made of: the bodies of requests, with their limits. Unknown fields are refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

GROUP_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

Reason = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=500)]
Actor = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@/ -]{0,63}$")]


class Change(BaseModel):
    """Every change says who asks and why. With tokens the actor is the token's name, whatever stands here."""

    model_config = ConfigDict(extra="forbid")

    reason: Reason = Field(description="why, in a sentence; it stands in the history")
    actor: Actor | None = Field(default=None, description="who; on a loopback without tokens only")


class ProposeRequest(Change):
    policy: Literal["static", "eplb", "omni", "omni-swap", "swift", "flash", "eplane"] | None = Field(
        default=None, description="null: the policy of the group's settings"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="for the policy and the planner")


class RollbackRequest(Change):
    to_epoch: int = Field(ge=0, description="the epoch whose placement is wanted back")


class ModeRequest(Change):
    mode: Literal["off", "observe", "propose", "auto"]


class ConfigPatch(Change):
    settings: dict[str, Any] = Field(min_length=1, description="the settings to change, with their new values")


class ProblemBody(BaseModel):
    """RFC 9457. `code` is one of a closed set; `detail` says in a sentence what to do."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
