"""Modes: how far the controller may go by itself (off, observe, propose, auto), and the pause that stops all moves."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from api.access import Administrator, Group, Operator, Reader, desk_of, reply
from api.port import plain
from api.schemas import Change, ModeRequest

router = APIRouter(prefix="/v1/groups/{group}", tags=["modes"])


@router.get("/mode", summary="The mode, and whether the group is paused")
async def read_mode(request: Request, group: Group, caller: Reader) -> JSONResponse:
    status = plain(await desk_of(request, group).status())
    return reply({"group": group, "mode": status.get("mode"), "paused": status.get("paused")})


@router.put("/mode", summary="Set the mode")
async def set_mode(request: Request, group: Group, change: ModeRequest, changer: Administrator) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        return reply(await desk.set_mode(change.mode, changer.actor(change), change.reason))

    return await changer.answer(work)


@router.post("/pause", summary="No wave is cut over from now on; what is live stays live")
async def pause(request: Request, group: Group, change: Change, changer: Operator) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        return reply(await desk.pause(changer.actor(change), change.reason))

    return await changer.answer(work)


@router.post("/resume", summary="End the pause")
async def resume(request: Request, group: Group, change: Change, changer: Operator) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        return reply(await desk.resume(changer.actor(change), change.reason))

    return await changer.answer(work)
