"""Reports: what agents send, load windows and what their ranks say. Only the leader takes them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Request
from fastapi.responses import JSONResponse

from api.access import Group, Reporter, desk_of, reply
from api.problems import RETRY_AFTER_S, Code, Problem
from eplane.errors import NotLeader

router = APIRouter(prefix="/v1/groups/{group}", tags=["reports"])


@router.post("/reports", summary="An agent's report; the reply carries shares and what the leader wants next")
async def take_report(
    request: Request, group: Group, body: Annotated[dict[str, Any], Body()], changer: Reporter
) -> JSONResponse:
    """No idempotency key is kept: sub-windows carry numbers of their own, a second one is counted once."""
    try:
        return reply(await desk_of(request, group).ingest(body))
    except NotLeader as error:
        # Not a redirect: an agent finds the leader in the store, and must not spread a report over two controllers.
        problem = Problem(Code.NOT_LEADER, str(error), status=409 if error.url else 503, leader=error.url)
        problem.headers["Retry-After"] = str(RETRY_AFTER_S)
        raise problem from None
