"""Migrations: plans under way and those that ended, wave by wave."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from api.access import Group, MigrationId, Operator, Reader, desk_of, reply
from api.schemas import Change

router = APIRouter(prefix="/v1/groups/{group}/migrations", tags=["migrations"])


@router.get("", summary="The migrations, newest first")
async def list_migrations(request: Request, group: Group, caller: Reader) -> JSONResponse:
    return reply(await desk_of(request, group).migrations())


@router.get("/{migration_id}", summary="One migration, with its waves")
async def read_migration(request: Request, group: Group, migration_id: MigrationId, caller: Reader) -> JSONResponse:
    return reply(await desk_of(request, group).migration(migration_id))


@router.post("/{migration_id}/abort", status_code=202, summary="Stop a migration: waves past their cutover stay live")
async def abort(
    request: Request, group: Group, migration_id: MigrationId, change: Change, changer: Operator
) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        result = await desk.abort(migration_id, changer.actor(change), change.reason)
        return reply(result, 202, location=f"/v1/groups/{group}/migrations/{migration_id}")

    return await changer.answer(work)
