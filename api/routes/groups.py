"""Groups: everything that can be read about one, from any controller, without side effect."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response

from api.access import Group, Prefer, Reader, controller_of, desk_of, reading_desk, reply

router = APIRouter(prefix="/v1/groups", tags=["groups"])


@router.get("", summary="The groups this controller knows, and who leads each")
async def list_groups(request: Request, caller: Reader) -> JSONResponse:
    controller = controller_of(request)
    groups = [
        {"group": g, "leads_here": controller.is_leader(g), "leader_url": controller.leader_url(g)}
        for g in controller.groups()
    ]
    return reply({"groups": groups})


@router.get("/{group}/status", summary="Mode, leader, world, epoch, balancedness, verdict, migration, nodes")
async def read_status(request: Request, group: Group, caller: Reader, prefer: Prefer = None) -> JSONResponse:
    status = await reading_desk(request, group, prefer).status()
    return reply(status, epoch=status.get("epoch") if isinstance(status, dict) else None)


@router.get("/{group}/load", summary="Load windows per layer and expert, load per rank, completeness")
async def read_load(request: Request, group: Group, caller: Reader, prefer: Prefer = None) -> JSONResponse:
    return reply(await reading_desk(request, group, prefer).load())


@router.get("/{group}/windows", summary="The newest complete load windows one by one; only the leader has them")
async def read_windows(
    request: Request,
    group: Group,
    caller: Reader,
    since_step: Annotated[int, Query(ge=-1)] = -1,
    prefer: Prefer = None,
) -> JSONResponse:
    return reply({"windows": await reading_desk(request, group, prefer).windows(since_step)})


@router.get(
    "/{group}/recording",
    summary="The complete load windows that are kept, oldest first, as .npz: load [W, L, E], last_step, ...; 204: none newer",
    response_class=Response,
)
async def read_recording(
    request: Request,
    group: Group,
    caller: Reader,
    since_step: Annotated[int, Query(ge=-1)] = -1,
    world: Annotated[str | None, Query(max_length=64, description="the world that since_step counts in")] = None,
    prefer: Prefer = None,
) -> Response:
    found = await reading_desk(request, group, prefer).recording(since_step, world)
    if found is None:
        return Response(status_code=204)
    return Response(await asyncio.to_thread(_npz, found), media_type="application/octet-stream")


def _npz(arrays: Mapping[str, Any]) -> bytes:
    import numpy as np

    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


@router.get("/{group}/placement", summary="Which expert every slot holds: now, or in an epoch of the past")
async def read_placement(
    request: Request, group: Group, caller: Reader, epoch: Annotated[int | None, Query(ge=0)] = None
) -> JSONResponse:
    return reply(await desk_of(request, group).placement(epoch))


@router.get("/{group}/nodes", summary="The nodes, their ranks and their agents")
async def read_nodes(request: Request, group: Group, caller: Reader) -> JSONResponse:
    return reply(await desk_of(request, group).nodes())


@router.get("/{group}/goals", summary="The goals and their verdicts: YES, THROTTLE or NO, each with its sentence")
async def read_goals(request: Request, group: Group, caller: Reader) -> JSONResponse:
    return reply(await desk_of(request, group).goals())


@router.get("/{group}/anomalies", summary="What is not as it should be, and since when")
async def read_anomalies(request: Request, group: Group, caller: Reader, prefer: Prefer = None) -> JSONResponse:
    return reply(await reading_desk(request, group, prefer).anomalies())


@router.get("/{group}/history", summary="The epochs, newest first: who made each, why, and what it brought")
async def read_history(
    request: Request, group: Group, caller: Reader, limit: Annotated[int, Query(ge=1, le=1000)] = 50
) -> JSONResponse:
    return reply(await desk_of(request, group).history(limit))


@router.get("/{group}/explain", summary="Why an expert lives where it does")
async def read_explanation(
    request: Request,
    group: Group,
    caller: Reader,
    layer: Annotated[int, Query(ge=0)],
    expert: Annotated[int, Query(ge=0)],
    prefer: Prefer = None,
) -> JSONResponse:
    return reply(await reading_desk(request, group, prefer).explain(layer, expert))
