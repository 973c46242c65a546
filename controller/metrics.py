"""What a controller counts, in a registry of its own. Labels are groups (few, named at start) and closed sets."""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Metrics:
    """One per controller process."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        def counter(name: str, help_: str, *labels: str) -> Counter:
            return Counter(f"eplane_{name}", help_, ("group", *labels), registry=self.registry)

        def gauge(name: str, help_: str, *labels: str) -> Gauge:
            return Gauge(f"eplane_{name}", help_, ("group", *labels), registry=self.registry)

        def seconds(name: str, help_: str) -> Histogram:
            return Histogram(f"eplane_{name}", help_, ("group",), registry=self.registry, buckets=_SECONDS)

        made = {
            "leader": gauge("leader", "1 while this controller leads the group"),
            "terms": counter("terms", "terms of leadership that this controller began"),
            "epoch": gauge("epoch", "the live epoch"),
            "balancedness": gauge("balancedness", "mean / max rank load, averaged over layers, in the newest window"),
            "completeness": gauge("window_completeness", "part of the last spans that all ranks reported"),
            "agents": gauge("agents", "agents that are present"),
            "subwindows": counter("subwindows", "sub-windows of load taken"),
            "refused": counter("subwindows_refused", "sub-windows of load, and samples beside them, refused", "cause"),
            "verdicts": counter("verdicts", "control cycles by what they came to", "kind"),
            "cycle_seconds": seconds("cycle_seconds", "length of a control cycle"),
            "solve_seconds": seconds("solve_seconds", "length of a solve, waiting included"),
            "solver_failures": counter("solver_failures", "solves that gave no answer"),
            "cutovers": counter("cutovers", "waves that made their epoch"),
            "adoptions": counter("adoptions", "worlds adopted"),
            "moves": counter("moves", "bundles moved by waves that were cut over"),
            "moved_bytes": counter("moved_bytes", "bytes moved by waves that were cut over"),
            "migrations": counter("migrations", "migrations that ended, by outcome", "outcome"),
            "stalled": gauge("stalled_waves", "waves that wait longer than they should"),
            "task_deaths": counter("task_deaths", "tasks that ended by an error nobody foresaw", "task"),
            "timer_events": counter("timer_events", "timer runs that were missed, piled up or failed", "event"),
        }
        for name, metric in made.items():
            object.__setattr__(self, name, metric)

    leader: Gauge = field(init=False)
    terms: Counter = field(init=False)
    epoch: Gauge = field(init=False)
    balancedness: Gauge = field(init=False)
    completeness: Gauge = field(init=False)
    agents: Gauge = field(init=False)
    subwindows: Counter = field(init=False)
    refused: Counter = field(init=False)
    verdicts: Counter = field(init=False)
    cycle_seconds: Histogram = field(init=False)
    solve_seconds: Histogram = field(init=False)
    solver_failures: Counter = field(init=False)
    cutovers: Counter = field(init=False)
    adoptions: Counter = field(init=False)
    moves: Counter = field(init=False)
    moved_bytes: Counter = field(init=False)
    migrations: Counter = field(init=False)
    stalled: Gauge = field(init=False)
    task_deaths: Counter = field(init=False)
    timer_events: Counter = field(init=False)

    def text(self) -> bytes:
        """The Prometheus exposition."""
        return generate_latest(self.registry)
