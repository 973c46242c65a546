"""Problems: the closed set of answers that are not a success (RFC 9457, `application/problem+json`).

A problem has `type` (a URN that ends with the code), `title`, `status`, `detail` (one sentence that says what to do),
`code`, and where it helps `field`, `leader` or `retry_after_s`. The same table gives the command line its exit codes.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from eplane.errors import (
    BadInput,
    Conflict,
    EPlaneError,
    IllegalTransition,
    Infeasible,
    Invalid,
    LoadReportError,
    NameRefused,
    NotFound,
    NotLeader,
    PlacementError,
    PlanImpossible,
    ProblemError,
    RefusedByGoal,
    SettingsError,
    SolverFailed,
    StoreError,
    TopologyError,
)

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 1

EXIT_OK, EXIT_USAGE, EXIT_REFUSED, EXIT_CONFLICT, EXIT_UNAVAILABLE = 0, 2, 3, 4, 5


class Code(enum.Enum):
    """Every code there is. Its value is what clients compare; it never changes its meaning."""

    BAD_REQUEST = "bad_request"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    CONFLICT = "conflict"
    REFUSED_BY_GOAL = "refused_by_goal"
    STALE_EPOCH = "stale_epoch"
    TOO_LARGE = "too_large"
    UNSUPPORTED_MEDIA = "unsupported_media"
    MISDIRECTED = "misdirected"
    INVALID = "invalid"
    KEY_REUSED = "key_reused"
    PRECONDITION_REQUIRED = "precondition_required"
    BUSY = "busy"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    NOT_LEADER = "not_leader"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a code means over HTTP, to a reader, and to the shell."""

    status: int
    title: str
    exit_code: int


KINDS: Mapping[Code, Kind] = {
    Code.BAD_REQUEST: Kind(400, "The request can not be read", EXIT_USAGE),
    Code.UNAUTHENTICATED: Kind(401, "A token is needed", EXIT_USAGE),
    Code.FORBIDDEN: Kind(403, "The token's role does not allow this", EXIT_USAGE),
    Code.NOT_FOUND: Kind(404, "There is no such thing", EXIT_USAGE),
    Code.METHOD_NOT_ALLOWED: Kind(405, "The resource does not know this method", EXIT_USAGE),
    Code.CONFLICT: Kind(409, "The state is not what the request assumed", EXIT_CONFLICT),
    Code.REFUSED_BY_GOAL: Kind(409, "A goal says no", EXIT_REFUSED),
    Code.STALE_EPOCH: Kind(412, "The epoch has moved on", EXIT_CONFLICT),
    Code.TOO_LARGE: Kind(413, "The request is too large", EXIT_USAGE),
    Code.UNSUPPORTED_MEDIA: Kind(415, "Changes are sent as application/json", EXIT_USAGE),
    Code.MISDIRECTED: Kind(421, "The request names another host", EXIT_USAGE),
    Code.INVALID: Kind(422, "A field can not be used", EXIT_USAGE),
    Code.KEY_REUSED: Kind(422, "The idempotency key belongs to another request", EXIT_CONFLICT),
    Code.PRECONDITION_REQUIRED: Kind(428, "If-Match with the epoch is needed", EXIT_USAGE),
    Code.BUSY: Kind(429, "As much of this runs as may run", EXIT_UNAVAILABLE),
    Code.INTERNAL: Kind(500, "The controller failed", EXIT_UNAVAILABLE),
    Code.UNAVAILABLE: Kind(503, "Not available now", EXIT_UNAVAILABLE),
    Code.NOT_LEADER: Kind(503, "Another controller leads the group", EXIT_UNAVAILABLE),
}


class Problem(EPlaneError):
    """An answer that is not a success, raised by routes and guards, written by the application."""

    def __init__(self, code: Code, detail: str, *, status: int | None = None, **extra: object) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.status = KINDS[code].status if status is None else status
        self.extra = extra
        self.headers: dict[str, str] = {}
        if self.status in (429, 503):
            self.headers["Retry-After"] = str(RETRY_AFTER_S)
            self.extra = {"retry_after_s": RETRY_AFTER_S, **extra}
        elif self.status == 401:
            self.headers["WWW-Authenticate"] = 'Bearer realm="eplane"'

    def body(self, instance: str) -> dict[str, object]:
        return {
            "type": f"urn:eplane:problem:{self.code.value}",
            "title": KINDS[self.code].title,
            "status": self.status,
            "detail": self.detail,
            "instance": instance,
            "code": self.code.value,
            **self.extra,
        }


def problem_of(error: EPlaneError, location: str = "") -> Problem:
    """The problem an error of the ground or the controller becomes.

    `location`: path and query of the request, so that a follower can send a change on to the leader (307).
    """
    if isinstance(error, Problem):
        return error
    if isinstance(error, NotLeader):
        return _not_leader(error.url, location)
    if isinstance(error, (Invalid, ProblemError, *_FIELDS)):
        return Problem(Code.INVALID, str(error), field=error.field)
    if isinstance(error, StoreError):
        return Problem(Code.UNAVAILABLE, f"the store does not serve: {error}")
    for kind, code in _CODES:
        if isinstance(error, kind):
            return Problem(code, str(error))
    return Problem(Code.INTERNAL, str(error) or type(error).__name__)


# Refusals of fields that a request brought; a RecordError is about what is stored, so no fault of the caller.
_FIELDS = (LoadReportError, NameRefused, SettingsError)
# Infeasible is a RefusedByGoal that the solver found; both name the goal.
_CODES: tuple[tuple[type[EPlaneError], Code], ...] = (
    (NotFound, Code.NOT_FOUND),
    (Conflict, Code.CONFLICT),
    (RefusedByGoal, Code.REFUSED_BY_GOAL),
    (Infeasible, Code.REFUSED_BY_GOAL),
    (PlanImpossible, Code.REFUSED_BY_GOAL),
    (IllegalTransition, Code.CONFLICT),
    (SolverFailed, Code.UNAVAILABLE),
    (PlacementError, Code.INVALID),
    (TopologyError, Code.INVALID),
    (BadInput, Code.INVALID),
)


def _not_leader(url: str | None, location: str) -> Problem:
    if url is None:
        return Problem(Code.NOT_LEADER, "no controller leads the group now; try again in a moment", leader=None)
    problem = Problem(Code.NOT_LEADER, f"this controller does not lead the group; the leader is at {url}", status=307)
    problem.headers["Location"] = url.rstrip("/") + location
    problem.extra = {"leader": url}
    return problem
