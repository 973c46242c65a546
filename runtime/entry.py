"""Where a forked rank process begins. It imports nothing itself, so the launcher can name it without loading torch."""

from __future__ import annotations

from multiprocessing.connection import Connection


def enter(options_text: str, rank: int, connection: Connection) -> None:
    """The life of a rank; see runtime.rank."""
    from runtime.rank import rank_main

    rank_main(options_text, rank, connection)
