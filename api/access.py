"""What every route builds on: who calls, which desk, and the frame around a change.

A route that reads takes `Reader`; a route that changes takes `Changer` and answers through `Changer.answer`, which
checks the role, the media type and the idempotency key. A route with neither is open: health and the page only.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import Depends, Header, Path, Query, Request
from fastapi.responses import JSONResponse, Response

from api.auth import Auth, Caller, Right
from api.idempotency import Answers
from api.port import ControllerPort, DeskPort, Json, plain
from api.problems import Code, Problem
from api.schemas import GROUP_PATTERN, ID_PATTERN, Change
from eplane.errors import NotFound, NotLeader

Group = Annotated[str, Path(pattern=GROUP_PATTERN, description="name of the expert-parallel group")]
PlanId = Annotated[str, Path(pattern=ID_PATTERN)]
MigrationId = Annotated[str, Path(pattern=ID_PATTERN)]
Prefer = Annotated[Literal["leader"] | None, Query(description="`leader`: 307 to it; only it knows the load")]


def controller_of(request: Request) -> ControllerPort:
    controller: ControllerPort = request.app.state.controller
    return controller


def caller_of(request: Request, authorization: str | None) -> Caller:
    auth: Auth = request.app.state.auth
    return auth.caller(authorization)


def desk_of(request: Request, group: str) -> DeskPort:
    controller = controller_of(request)
    if group not in controller.groups():
        known = ", ".join(sorted(controller.groups())) or "none"
        raise NotFound(f"there is no group {group!r}; known are: {known}")
    return controller.desk(group)


def reading_desk(request: Request, group: str, prefer: Literal["leader"] | None) -> DeskPort:
    """The desk to read from: this controller's, or (307) the leader's where that is preferred.

    Agents report to the leader alone, so only it knows the load, and what follows from it.
    """
    desk = desk_of(request, group)
    controller = controller_of(request)
    url = controller.leader_url(group)
    if prefer == "leader" and url is not None and not controller.is_leader(group):
        raise NotLeader(url)
    return desk


def _reader(request: Request, authorization: Annotated[str | None, Header()] = None) -> Caller:
    caller = caller_of(request, authorization)
    caller.check(Right.READ)
    return caller


Reader = Annotated[Caller, Depends(_reader)]


@dataclass(frozen=True, slots=True)
class Changer:
    """A caller with the right to change, and the frame around the change."""

    caller: Caller
    request: Request
    key: str

    def actor(self, change: Change) -> str:
        return self.caller.name or change.actor or "local"

    async def answer(self, work: Callable[[], Awaitable[Response]]) -> Response:
        """Run `work` once for this idempotency key; the same request sent again gets the same answer."""
        answers: Answers = self.request.app.state.answers
        body = await self.request.body()
        if_match = self.request.headers.get("if-match", "")
        frame = f"{self.request.method} {self.request.url.path}\n{if_match}\n".encode()
        first, again = await answers.once(self.caller.name or "", self.key, frame + body, work)
        response = Response(first.body, first.status_code, media_type=first.media_type)
        for name in ("location", "etag", "retry-after"):
            if name in first.headers:
                response.headers[name] = first.headers[name]
        response.headers["Idempotency-Key"] = self.key
        if again:
            response.headers["Idempotent-Replayed"] = "true"
        return response


def changer(right: Right) -> Any:
    """The dependency of a route that changes something: needs `right`, JSON, and a key (made if none was sent)."""

    def check(
        request: Request,
        authorization: Annotated[str | None, Header()] = None,
        idempotency_key: Annotated[str | None, Header(pattern=r"^[\x21-\x7e]{1,128}$")] = None,
    ) -> Changer:
        caller = caller_of(request, authorization)
        caller.check(right)
        # A form or plain text could be sent by a foreign page without the browser asking first.
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise Problem(Code.UNSUPPORTED_MEDIA, "send the change as application/json, with at least a reason")
        return Changer(caller, request, idempotency_key or secrets.token_hex(16))

    return Depends(check)


Operator = Annotated[Changer, changer(Right.OPERATE)]
Administrator = Annotated[Changer, changer(Right.ADMINISTER)]
Reporter = Annotated[Changer, changer(Right.REPORT)]


def reply(body: Json, status: int = 200, *, location: str | None = None, epoch: int | None = None) -> JSONResponse:
    """A JSON answer; `location` names the resource that was made, `epoch` becomes the ETag that If-Match takes."""
    response = JSONResponse(plain(body), status)
    if location is not None:
        response.headers["Location"] = location
    if epoch is not None:
        response.headers["ETag"] = f'"{epoch}"'
    return response
