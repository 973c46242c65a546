"""The application: routes, guard and problems around one controller."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException

import eplane
from api.auth import Auth
from api.guard import Guard
from api.idempotency import Answers
from api.port import ControllerPort
from api.problems import MEDIA_TYPE, Code, Problem, problem_of
from api.routes import cluster, config, groups, migrations, modes, page, plans, reports, simulations
from api.schemas import ProblemBody
from eplane.errors import EPlaneError

_BY_STATUS = {404: Code.NOT_FOUND, 405: Code.METHOD_NOT_ALLOWED, 413: Code.TOO_LARGE, 415: Code.UNSUPPORTED_MEDIA}
_PROBLEM: dict[str, Any] = {
    "description": "A problem (RFC 9457); `code` is one of a closed set",
    "model": ProblemBody,
}


def create_app(controller: ControllerPort, auth: Auth) -> FastAPI:
    """The REST API and the web page of `controller`. It starts nothing and keeps no state beyond recent answers."""
    app = FastAPI(
        title="EPlane",
        version=eplane.__version__,
        summary="Control plane for expert parallelism",
        docs_url=None,
        redoc_url=None,
        responses={"default": _PROBLEM},
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.controller = controller
    app.state.auth = auth
    app.state.answers = Answers()
    app.state.simulations = simulations.Simulations()
    app.state.registry = CollectorRegistry()
    for part in (groups, plans, migrations, simulations, modes, config, reports, cluster, page):
        app.include_router(part.router)
    app.add_exception_handler(EPlaneError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_middleware(Guard, auth=auth, registry=app.state.registry)
    return app


async def _on_error(request: Request, error: Exception) -> JSONResponse:
    location = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    problem = problem_of(error, location) if isinstance(error, EPlaneError) else Problem(Code.INTERNAL, str(error))
    return _write(problem, request)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """FastAPI's own refusals: the first wrong field in one sentence, all of them in `errors`."""
    found = error.errors() if isinstance(error, RequestValidationError) else []
    if any(item["type"] == "json_invalid" for item in found):
        return _write(Problem(Code.BAD_REQUEST, "the body is not JSON"), request)
    errors = [{"field": _field(item["loc"]), "sentence": str(item["msg"])} for item in found]
    first = errors[0] if errors else {"field": "request", "sentence": "can not be used"}
    detail = f"{first['field']}: {first['sentence']}"
    return _write(Problem(Code.INVALID, detail, field=first["field"], errors=errors), request)


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    detail = f"{request.method} {request.url.path} is not known here"
    if status not in (404, 405) and isinstance(error, HTTPException):
        detail = str(error.detail)
    problem = Problem(_BY_STATUS.get(status, Code.BAD_REQUEST), detail)
    if isinstance(error, HTTPException) and error.headers:
        problem.headers.update(error.headers)
    return _write(problem, request)


def _field(location: tuple[Any, ...]) -> str:
    """`("body", "reason")` as `reason`, `("query", "limit")` as `limit`."""
    return ".".join(str(part) for part in location[1:]) or str(location[0])


def _write(problem: Problem, request: Request) -> JSONResponse:
    body = json.loads(json.dumps(problem.body(request.url.path), default=str))
    return JSONResponse(body, problem.status, headers=problem.headers, media_type=MEDIA_TYPE)
