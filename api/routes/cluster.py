"""Cluster: who leads, is this process well, and its metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from api.access import Reader, controller_of, reply

router = APIRouter(tags=["cluster"])


@router.get("/v1/leader", summary="Who leads each group, as seen from this controller")
async def read_leaders(request: Request, caller: Reader) -> JSONResponse:
    controller = controller_of(request)
    return reply(
        {
            "groups": {
                g: {"leads_here": controller.is_leader(g), "url": controller.leader_url(g)} for g in controller.groups()
            }
        }
    )


@router.get("/health", summary="Answers as long as the process does; no token needed")
async def read_health(request: Request) -> JSONResponse:
    return reply({"ok": True})


@router.get("/metrics", summary="Prometheus text: the controller's metrics and this API's")
async def read_metrics(request: Request, caller: Reader) -> Response:
    own: bytes = generate_latest(request.app.state.registry)
    return Response(controller_of(request).metrics_text() + own, media_type=CONTENT_TYPE_LATEST)
