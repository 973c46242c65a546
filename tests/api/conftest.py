from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from api.app import create_app
from api.auth import Auth
from tests.api.desk import SmallController, SmallDesk


@pytest.fixture
def controller() -> SmallController:
    return SmallController()


@pytest.fixture
def desk(controller: SmallController) -> SmallDesk:
    return controller.small


@pytest.fixture
async def http(controller: SmallController) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an open loopback API over the small controller."""
    transport = httpx.ASGITransport(create_app(controller, Auth()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:7070") as client:
        yield client
