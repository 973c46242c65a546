"""Small waves and migrations, and every event that can reach them."""

from __future__ import annotations

from collections.abc import Iterator

from eplane.errors import IllegalTransition
from eplane.migration import (
    AbortAsked,
    Ambiguous,
    CutoverDone,
    DeadlinePassed,
    Migration,
    MigrationEvent,
    NodeClean,
    NodeFailed,
    NodeSwitched,
    NodeVerified,
    OfWave,
    Start,
    Wave,
    WaveEvent,
    WorldLost,
    advance_migration,
    advance_wave,
)

NODES = ("n0", "n1")
BASE = 7


def digest(n: int) -> str:
    return f"{n:016x}"


def wave(number: int = 1, overlaps: bool = False, nodes: tuple[str, ...] = NODES) -> Wave:
    return Wave(number, BASE + number, digest(number - 1), digest(number), nodes, overlaps)


def migration(waves: int = 2, overlaps: bool = False, nodes: tuple[str, ...] = NODES) -> Migration:
    made = tuple(wave(n, overlaps, nodes) for n in range(1, waves + 1))
    return Migration("m1", "p1", "g", "a" * 16, BASE, made)


def wave_events(number: int = 1, nodes: tuple[str, ...] = NODES) -> list[WaveEvent]:
    events: list[WaveEvent] = [Start()]
    for node in nodes:
        events += [NodeVerified(node), NodeFailed(node, "no memory"), NodeSwitched(node), NodeClean(node)]
    events += [CutoverDone(BASE + number), AbortAsked("op", "wanted"), WorldLost("b" * 16), DeadlinePassed("too long")]
    return events


def migration_events(waves: int, nodes: tuple[str, ...] = NODES) -> list[MigrationEvent]:
    events: list[MigrationEvent] = [
        Start(),
        AbortAsked("op", "wanted"),
        WorldLost("b" * 16),
        Ambiguous("rank 1 is lost"),
    ]
    events += [OfWave(n, e) for n in range(1, waves + 1) for e in wave_events(n, nodes)]
    return events


def reachable_waves(start: Wave) -> Iterator[tuple[Wave, WaveEvent, Wave | None]]:
    """Every reachable state with every event and what it leads to; None where it is refused."""
    seen, todo = {start}, [start]
    while todo:
        at = todo.pop()
        for event in wave_events(at.number, at.nodes):
            try:
                after, _ = advance_wave(at, event)
            except IllegalTransition:
                yield at, event, None
                continue
            yield at, event, after
            if after not in seen:
                seen.add(after)
                todo.append(after)


def reachable_migrations(start: Migration) -> Iterator[tuple[Migration, MigrationEvent, Migration | None]]:
    """Every reachable state with every event and what it leads to; None where it is refused."""
    events = migration_events(len(start.waves), start.nodes)
    seen, todo = {start}, [start]
    while todo:
        at = todo.pop()
        for event in events:
            try:
                after, _ = advance_migration(at, event)
            except IllegalTransition:
                yield at, event, None
                continue
            yield at, event, after
            if after not in seen:
                seen.add(after)
                todo.append(after)
