"""The HTTP front of a launcher: OpenAI-compatible completions, health, metrics and the world. No torch here."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass
from secrets import randbits
from typing import Annotated, Any, TypeVar
from uuid import uuid4

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from eplane.errors import BadInput, EPlaneError, QueueFull, WorldEnded
from runtime.exposition import CONTENT_TYPE, exposition
from runtime.front import Ask, Front, NewToken, WorldState
from runtime.text import StopText, Text
from runtime.wire import BOUNDS_MS, MAX_LOGPROBS

PROBLEM_JSON = "application/problem+json"
MAX_STOPS = 16
Result = TypeVar("Result")


class CompletionRequest(BaseModel):
    """The body of POST /v1/completions. Fields that are not known are ignored, as OpenAI-compatible clients expect."""

    model_config = ConfigDict(extra="ignore", strict=True)

    prompt: str | list[int]
    model: str | None = None
    max_tokens: int = Field(16, ge=1)
    temperature: float = Field(0.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**63)
    n: int = Field(1, ge=1, le=1)
    stream: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stop: str | list[str] | None = None
    return_token_ids: bool = False
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token adds: text that may be shown now, the token, and the end if it is the last."""

    text: str
    token: NewToken
    finish: str | None


def build_app(front: Front, text: Text, group: str, model: str) -> FastAPI:
    """The app; `front` may still be starting."""
    app = FastAPI(title="EPlane runtime", docs_url=None, redoc_url=None, openapi_url=None)
    _add_problems(app)

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        prompt = _encoded(text, body.prompt) if isinstance(body.prompt, str) else list(body.prompt)
        if len(body.stops) > MAX_STOPS:
            raise BadInput(f"at most {MAX_STOPS} stop strings, got {len(body.stops)}")
        seed = randbits(63) if body.seed is None else body.seed
        ask = Ask(
            tuple(prompt), body.max_tokens, body.temperature, body.top_p, seed, body.logprobs or 0, body.ignore_eos
        )
        answer = Answer(f"cmpl-{uuid4().hex}", int(time.time()), model, body, prompt)
        pieces = _pieces(front, text, ask, body.stops)
        try:
            if not body.stream:
                return await _unless_gone(request, _whole(answer, pieces))
            # Refusals must come before the status line.
            first = await _unless_gone(request, anext(pieces))
        except _ClientGone:
            return Response(status_code=499)
        return StreamingResponse(_events(answer, first, pieces), media_type="text/event-stream")

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "eplane"}]}

    @app.get("/health")
    async def health() -> Response:
        if front.state is WorldState.READY:
            return JSONResponse({"status": "ok"})
        return problem(503, "unavailable", front.reason)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(exposition(front), media_type=CONTENT_TYPE)

    @app.get("/v1/world")
    async def world(recent_since: Annotated[int | None, Query(ge=-1)] = None) -> dict[str, object]:
        return _world(front, group, recent_since)

    return app


def _encoded(text: Text, prompt: str) -> list[int]:
    """JSON can carry halves of UTF-16 pairs, which stand for no character: no tokenizer has a token for one."""
    try:
        return text.encode(prompt)
    except UnicodeEncodeError as error:
        raise BadInput(f"the prompt is no text: character {error.start} is half of a surrogate pair") from None


async def _pieces(front: Front, text: Text, ask: Ask, stops: tuple[str, ...]) -> AsyncGenerator[Piece, None]:
    """Tokens as text, cut at the first stop string. Closing it takes the request back."""
    decoder, cut = text.decoder(), StopText(stops)
    tokens = front.run(ask)
    try:
        async for token in tokens:
            shown = cut.push(decoder.push([token.token]))
            if token.finish is not None and not cut.stopped:
                shown += cut.push(decoder.finish()) + cut.finish()
            finish = "stop" if cut.stopped else token.finish
            if cut.stopped:
                with contextlib.suppress(StopAsyncIteration):
                    await tokens.asend(True)
            yield Piece(shown, token, finish)
            if finish is not None:
                return
    finally:
        await tokens.aclose()


@dataclass(frozen=True, slots=True)
class Answer:
    """What all parts of one response share."""

    id: str
    created: int
    model: str
    body: CompletionRequest
    prompt: list[int]

    def to_json(self, pieces: list[Piece], *, with_prompt: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "text": "".join(p.text for p in pieces),
            "finish_reason": pieces[-1].finish,
            "logprobs": None,
        }
        if self.body.logprobs is not None:
            choice["logprobs"] = {
                "token_logprobs": [p.token.logprob for p in pieces],
                "tokens": [p.token.token for p in pieces],
                "top_logprobs": [{str(t): lp for t, lp in p.token.top} for p in pieces],
            }
        if self.body.return_token_ids:
            choice["token_ids"] = [p.token.token for p in pieces]
            if with_prompt:
                choice["prompt_token_ids"] = self.prompt
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
        }


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """What `work` gives. Raises _ClientGone, with `work` ended, when the client leaves before it is done.

    A request that is queued makes no token by which its leaving would be noticed, and would keep its place.
    """
    doing, gone = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise _ClientGone
        return doing.result()
    finally:
        doing.cancel()
        gone.cancel()
        await asyncio.gather(doing, gone, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def _whole(answer: Answer, pieces: AsyncGenerator[Piece, None]) -> Response:
    """The response in one piece."""
    got: list[Piece] = []
    try:
        async for piece in pieces:
            got.append(piece)
    finally:
        await pieces.aclose()
    body = answer.to_json(got, with_prompt=True)
    prompt, made = len(answer.prompt), len(got)
    body["usage"] = {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}
    return JSONResponse(body)


async def _events(answer: Answer, first: Piece, pieces: AsyncGenerator[Piece, None]) -> AsyncIterator[bytes]:
    """Server-sent events, one a token. An error after the start is an event of its own, then the stream ends."""
    try:
        yield _event(answer.to_json([first], with_prompt=True))
        async for piece in pieces:
            yield _event(answer.to_json([piece], with_prompt=False))
        yield b"data: [DONE]\n\n"
    except EPlaneError as error:
        yield _event({"error": problem_body(503, "unavailable", str(error))})
    finally:
        await pieces.aclose()


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def _world(front: Front, group: str, recent_since: int | None) -> dict[str, object]:
    """The world as the local ranks report it. `recent_since`: tell each busy step after that one."""
    facts = front.facts
    ranks = []
    for rank in front.ranks.values():
        stats = rank.stats
        entry: dict[str, object] = {
            "rank": rank.number,
            "digest": stats.get("digest", facts["digest"]),
            "epoch": stats.get("epoch"),
            "step": stats.get("step", -1),
            "steps": stats.get("steps", 0),
            "ticks": stats.get("ticks", 0),
            "switches": stats.get("switches", 0),
            "waiting": stats.get("waiting", 0),
            "running": stats.get("running", 0),
            "tokens": {"prefill": stats.get("prefill", 0), "decode": stats.get("decode", 0)},
            "step_ms": {
                "bounds": list(BOUNDS_MS),
                "counts": stats.get("counts", [0] * (len(BOUNDS_MS) + 1)),
                "sum": stats.get("sum_ms", 0.0),
            },
        }
        if recent_since is not None:
            entry["recent"] = [row for row in front.recent[rank.number] if row[0] > recent_since]
        ranks.append(entry)
    first = ranks[0]
    return {
        "group": group, "world": facts["world"], "model": facts["model"], "digest": first["digest"],
        "epoch": first["epoch"], "steps": first["steps"], "kv_tokens": facts["kv_tokens"],
        "step_ms": first["step_ms"], "ranks": ranks,
    }  # fmt: skip


def problem_body(status: int, code: str, detail: str) -> dict[str, object]:
    return {"type": f"urn:eplane:problem:{code}", "title": code, "status": status, "detail": detail, "code": code}


def problem(status: int, code: str, detail: str, retry_after_s: int | None = None) -> JSONResponse:
    """An error as RFC 9457 asks."""
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return JSONResponse(problem_body(status, code, detail), status, headers, media_type=PROBLEM_JSON)


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"] if part != "body")
        return problem(400, "invalid", f"{where or 'body'}: {first['msg']}")

    @app.exception_handler(BadInput)
    async def bad(_: Request, error: BadInput) -> Response:
        return problem(400, "invalid", str(error))

    @app.exception_handler(QueueFull)
    async def full(_: Request, error: QueueFull) -> Response:
        return problem(429, "busy", str(error), 1)

    @app.exception_handler(WorldEnded)
    async def ended(_: Request, error: WorldEnded) -> Response:
        return problem(503, "unavailable", str(error), 5)

    @app.exception_handler(HTTPException)
    async def other(_: Request, error: HTTPException) -> Response:
        return problem(error.status_code, "not_found" if error.status_code == 404 else "invalid", str(error.detail))
