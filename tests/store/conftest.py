"""The stores under the contract, and what it takes to lose replies on purpose in front of a real etcd."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from eplane.clock import SystemClock
from eplane.store.base import ModRevision, Put, Store
from eplane.store.etcd import EtcdStore
from eplane.store.memory import Fault, MemoryStore
from eplane.store.once import Answer, Attempt, Unanswered


async def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what some other task or process brings about."""
    clock = SystemClock()
    end = clock.monotonic() + seconds
    while not condition():
        if clock.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s")
        await clock.sleep(0.02)


async def put(store: Store, key: str, value: bytes = b"x", lease: int = 0) -> int:
    """Write without a condition of substance; the revision."""
    kv = await store.get(key)
    result = await store.transact([ModRevision(key, kv.mod_revision if kv else 0)], [Put(key, value, lease)])
    if not result.succeeded:
        raise AssertionError(f"{key} changed in between")
    return result.revision


class LossyEtcd(EtcdStore):
    """Loses the requests and replies of transactions by number, as `MemoryStore` does with its `Faults`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.faults: dict[int, Fault] = {}
        self.sent = 0
        self.held: list[Attempt] = []

    async def _attempt(self, attempt: Attempt) -> Answer:
        self.sent += 1
        fault = self.faults.get(self.sent)
        if fault is Fault.LOSE_REQUEST:
            raise Unanswered("the request was lost")
        if fault is Fault.HOLD:
            self.held.append(attempt)
            raise Unanswered("the request is held back")
        answer = await super()._attempt(attempt)
        if fault is Fault.LOSE_REPLY:
            raise Unanswered("the reply was lost")
        return answer

    async def release_held(self) -> list[Answer]:
        held, self.held = self.held, []
        return [await super(LossyEtcd, self)._attempt(attempt) for attempt in held]


@dataclass
class Bench:
    """One kind of store with a prefix of its own; `connect` makes clients of the same state."""

    kind: str
    endpoint: str
    prefix: str = field(default_factory=lambda: f"/t{secrets.token_hex(4)}/")
    clients: list[Any] = field(default_factory=list)

    def connect(
        self, faults: dict[int, Fault] | None = None, before: dict[int, Callable[[], Awaitable[object]]] | None = None
    ) -> Store:
        """`faults`: what becomes of the n-th request of a transaction; `before`: what happens just before it is sent."""
        client: Any
        if self.kind == "etcd":
            client = LossyEtcd([self.endpoint])
            client.faults = faults or {}
        else:
            client = self.clients[0].connect() if self.clients else MemoryStore(SystemClock())
            client.faults.transactions = faults or {}
        if before:
            client._transactor._attempt = _interleave(client._transactor._attempt, before)
        self.clients.append(client)
        store: Store = client
        return store

    async def release_held(self, client: Any) -> list[Answer]:
        released = client.release_held()
        answers: list[Answer] = await released if self.kind == "etcd" else released
        return answers

    async def close(self) -> None:
        for client in self.clients:
            await client.close()


def _interleave(
    attempt: Callable[[Attempt], Awaitable[Answer]], before: dict[int, Callable[[], Awaitable[object]]]
) -> Callable[[Attempt], Awaitable[Answer]]:
    number = itertools.count(1)

    async def attempt_after(request: Attempt) -> Answer:
        happens = before.get(next(number))
        if happens is not None:
            await happens()
        return await attempt(request)

    return attempt_after


@pytest.fixture(params=["memory", "etcd"])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[Bench]:
    endpoint = request.getfixturevalue("shared_etcd").endpoint if request.param == "etcd" else ""
    made = Bench(request.param, endpoint)
    yield made
    await made.close()
