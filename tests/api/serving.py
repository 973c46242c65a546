"""A real HTTP server in a thread, for clients that speak over a socket."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import uvicorn

from api.app import create_app
from api.auth import Auth
from api.serving import listening_socket
from tests.api.desk import SmallController


@contextlib.contextmanager
def served(controller: SmallController, auth: Auth | None = None) -> Iterator[str]:
    """The URL of an API over `controller`."""
    listener = listening_socket("127.0.0.1", 0)
    config = uvicorn.Config(create_app(controller, auth or Auth()), log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        if not thread.is_alive():
            raise RuntimeError("the test server did not start")
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=20)
        listener.close()
