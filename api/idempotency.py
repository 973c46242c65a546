"""One answer for one idempotency key: a request that is sent again gets the answer of the first, not a second effect.

Kept in the memory of the controller that answered, so it covers lost replies and retries, not a change of leader;
across that the epoch in If-Match, the plan's state and the store's compares keep an effect from happening twice.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fastapi.responses import Response

from api.problems import Code, Problem

MOST_ANSWERS = 1024
MOST_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Answer:
    fingerprint: bytes
    response: asyncio.Future[Response]


class Answers:
    """The last answers by (caller, key), bounded in number and in bytes (a plan can be large). For one event loop."""

    def __init__(self, most: int = MOST_ANSWERS, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0
        self._known: OrderedDict[tuple[str, str], _Answer] = OrderedDict()

    async def once(
        self, caller: str, key: str, request: bytes, work: Callable[[], Awaitable[Response]]
    ) -> tuple[Response, bool]:
        """The response to `request` and whether it is a repetition. A failed first try is forgotten, not repeated."""
        fingerprint = hashlib.sha256(request).digest()
        known = self._known.get((caller, key))
        if known is not None:
            if known.fingerprint != fingerprint:
                raise Problem(
                    Code.KEY_REUSED, f"the idempotency key {key!r} was used for another request; take a new one"
                )
            return await asyncio.shield(known.response), True
        answer = _Answer(fingerprint, asyncio.get_running_loop().create_future())
        self._known[caller, key] = answer
        try:
            response = await work()
        except BaseException as error:
            self._known.pop((caller, key), None)
            answer.response.set_exception(_retriable(error))
            answer.response.exception()
            raise
        answer.response.set_result(response)
        self._bytes += len(response.body)
        self._forget()
        return response, False

    def _forget(self) -> None:
        """Drop the oldest answers beyond the bounds; those still being made stay, a second request may wait for them."""
        for name, answer in list(self._known.items()):
            if len(self._known) <= self._most and self._bytes <= self._most_bytes:
                return
            if answer.response.done():
                del self._known[name]
                self._bytes -= len(answer.response.result().body)


def _retriable(error: BaseException) -> BaseException:
    """What a second request that waited for the first is told: its error, or to come again if it was cancelled."""
    if isinstance(error, Exception):
        return error
    return Problem(Code.UNAVAILABLE, "the first request with this idempotency key was cut off; send it again")
