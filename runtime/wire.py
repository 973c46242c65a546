"""Messages between the launcher and its ranks: JSON over a pipe. No torch here, and nothing is unpickled."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection
from typing import Any

Message = dict[str, Any]

START, CANCEL, STOP = "start", "cancel", "stop"
"""To a rank: take a request; forget it; end."""

READY, TOKENS, REFUSED, STATS, ENDED = "ready", "tokens", "refused", "stats", "ended"
"""From a rank: it serves; new tokens; a request it can not take; how it does; why it ends."""

FULL, BAD = "full", "bad"
"""Why a request was refused: too many wait, or it can never run."""

EXIT_WORLD_LOST = 70
"""Exit code of a launcher whose world ended."""


def send(connection: Connection, kind: str, **fields: object) -> None:
    connection.send_bytes(json.dumps({"is": kind, **fields}, separators=(",", ":")).encode())


def receive(connection: Connection) -> Message:
    """The next message. Raises EOFError when the other side is gone."""
    message: Message = json.loads(connection.recv_bytes())
    return message


MAX_LOGPROBS = 20
"""Most alternatives that a request may ask for."""

BOUNDS_MS = tuple(round(0.5 * 1.25**i, 3) for i in range(48))
"""Upper bounds of the step time histogram, 0.5 ms to 18 s, each a quarter above the last; one more bucket is open."""
