"""What was moved lately, counted from the records in the store, so that a limit outlives the leader that spent it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Spending:
    """One wave's moves, as logged by its cutover; `at` in seconds since 1970."""

    at: float
    moves: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Spent:
    """Moved in the last hour, and seconds since the last cutover or end of a migration; None if there was none."""

    moves: int = 0
    bytes: int = 0
    since_last_s: float | None = None


def spent(log: Iterable[Spending], last_end: float | None, now: float) -> Spent:
    """A clock that runs backwards between leaders must not open the budget: what lies in the future counts as now."""
    recent = [entry for entry in log if entry.at > now - HOUR_S]
    ends = [entry.at for entry in recent] + ([last_end] if last_end is not None else [])
    since = None if not ends else max(0.0, now - max(ends))
    return Spent(sum(e.moves for e in recent), sum(e.bytes for e in recent), since)
