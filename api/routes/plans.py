"""Plans: proposed dry, looked at, then executed or discarded. A rollback is a plan like any other."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Request
from fastapi.responses import JSONResponse, Response

from api.access import Group, Operator, PlanId, Reader, controller_of, desk_of, reply
from api.port import Json, plain
from api.problems import Code, Problem
from api.schemas import Change, ProposeRequest, RollbackRequest
from eplane.plan import PlanState

router = APIRouter(prefix="/v1/groups/{group}", tags=["plans"])


@router.get("/plans", summary="The plans, newest first")
async def list_plans(request: Request, group: Group, caller: Reader) -> JSONResponse:
    return reply(await desk_of(request, group).plans())


@router.get("/plans/{plan_id}", summary="One plan; its ETag is the base epoch that execute wants in If-Match")
async def read_plan(request: Request, group: Group, plan_id: PlanId, caller: Reader) -> JSONResponse:
    plan = plain(await desk_of(request, group).plan(plan_id))
    return reply(plan, epoch=plan.get("base_epoch"))


@router.post("/plans", status_code=201, summary="Compute a plan (dry): 201 with the plan, 200 with why there is none")
async def propose(request: Request, group: Group, change: ProposeRequest, changer: Operator) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        result = await desk.propose(change.policy, changer.actor(change), change.reason, change.options)
        return _proposed(group, result)

    return await changer.answer(work)


@router.post("/plans/{plan_id}/execute", status_code=202, summary="Start the plan's migration; needs If-Match: EPOCH")
async def execute(
    request: Request,
    group: Group,
    plan_id: PlanId,
    change: Change,
    changer: Operator,
    if_match: Annotated[str | None, Header(description="the epoch the plan starts from")] = None,
) -> Response:
    desk = desk_of(request, group)
    epoch = _epoch_of(if_match)

    async def work() -> Response:
        if controller_of(request).is_leader(group):
            now = plain(await desk.status()).get("epoch")
            # A plan that is done, discarded or under way says so itself: its epoch is not what is wrong with it.
            open_ = plain(await desk.plan(plan_id)).get("state") == PlanState.PROPOSED.value
            if open_ and now is not None and now != epoch:
                raise Problem(Code.STALE_EPOCH, f"the group is at epoch {now}, the request assumes {epoch}", epoch=now)
        result = plain(await desk.execute(plan_id, epoch, changer.actor(change), change.reason))
        migration = result.get("migration", result) if isinstance(result, dict) else result
        name = migration.get("id") if isinstance(migration, dict) else str(migration)
        return reply(result, 202, location=f"/v1/groups/{group}/migrations/{name}")

    return await changer.answer(work)


@router.post("/plans/{plan_id}/discard", summary="Put a proposed plan away")
async def discard(request: Request, group: Group, plan_id: PlanId, change: Change, changer: Operator) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        return reply(await desk.discard(plan_id, changer.actor(change), change.reason))

    return await changer.answer(work)


@router.post("/rollback", status_code=201, summary="Plan the way back to an earlier epoch's placement (dry)")
async def rollback(request: Request, group: Group, change: RollbackRequest, changer: Operator) -> Response:
    desk = desk_of(request, group)

    async def work() -> Response:
        return _proposed(group, await desk.rollback(change.to_epoch, changer.actor(change), change.reason))

    return await changer.answer(work)


def _proposed(group: str, result: Json) -> Response:
    """A plan, or the sentence that says why there is none."""
    body = plain(result)
    if isinstance(body, str):
        return reply({"plan": None, "sentence": body})
    plan = body.get("plan", body)
    if plan is None:
        return reply({"plan": None, "sentence": body.get("sentence", "no plan")})
    location = f"/v1/groups/{group}/plans/{plan['id']}"
    sentence = body.get("sentence") if "plan" in body else None
    return reply({"plan": plan, "sentence": sentence}, 201, location=location, epoch=plan.get("base_epoch"))


def _epoch_of(if_match: str | None) -> int:
    if if_match is None:
        raise Problem(Code.PRECONDITION_REQUIRED, "send If-Match with the epoch the plan starts from (its base_epoch)")
    text = if_match.strip().strip('"')
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise Problem(Code.INVALID, f"If-Match: {if_match!r:.40} is no epoch", field="If-Match")
    return int(text)
