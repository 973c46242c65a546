"""Config: the settings of the groups, adjustable while they run."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from api.access import Administrator, Group, Reader, controller_of, desk_of, reply
from api.port import plain
from api.schemas import ConfigPatch

router = APIRouter(prefix="/v1", tags=["config"])


@router.get("/config", summary="The settings of every group")
async def read_all(request: Request, caller: Reader) -> JSONResponse:
    controller = controller_of(request)
    return reply({"groups": {g: plain(await controller.desk(g).config()) for g in controller.groups()}})


@router.get("/groups/{group}/config", summary="The settings of a group")
async def read_config(request: Request, group: Group, caller: Reader) -> JSONResponse:
    return reply(await desk_of(request, group).config())


@router.patch("/groups/{group}/config", summary="Change settings; the others keep their values")
async def patch_config(request: Request, group: Group, change: ConfigPatch, changer: Administrator) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        return reply(await desk.set_settings(change.settings, changer.actor(change), change.reason))

    return await changer.answer(work)
