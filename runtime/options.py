"""What a launcher is told: one frozen object, checked once, handed to every rank it starts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from eplane.errors import BadInput

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """`nodes[r]`: node of rank r; `ranks`: the ranks that this launcher starts; `slots`: K of each rank and layer.

    `spare_cells`: cells of a rank beyond its slots (None: 2 a layer). `master`: where rank 0 hosts the rendezvous.
    `routing_sample`: tokens of a rank and window whose experts are kept together, 0: none.
    """

    model: str
    group: str = "default"
    world_size: int = 1
    ranks: tuple[int, ...] = (0,)
    nodes: tuple[str, ...] = ("local",)
    node: str = "local"
    master: str = "127.0.0.1:29500"
    link_dir: str | None = None
    http: str = "127.0.0.1:8000"
    slots: int | None = None
    spare_cells: int | None = None
    placement: str | None = None
    state_dir: str | None = None
    window_steps: int = 32
    routing_sample: int = 32
    tick_ms: float = 25.0
    deterministic: bool = True
    max_tokens_per_step: int = 64
    kv_tokens: int = 8192
    queue: int = 256
    collective_timeout_s: float = 60.0
    start_timeout_s: float = 180.0
    device: str = "auto"
    transfer_host: str | None = None
    fault: str | None = None

    def __post_init__(self) -> None:
        if self.world_size < 1 or len(self.nodes) != self.world_size:
            raise BadInput(f"--nodes names {len(self.nodes)} ranks; the world has {self.world_size}")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise BadInput("--ranks must name at least one rank, each once")
        for rank in self.ranks:
            if not 0 <= rank < self.world_size:
                raise BadInput(f"--ranks names rank {rank}; the world has ranks 0 to {self.world_size - 1}")
            if self.nodes[rank] != self.node:
                raise BadInput(f"rank {rank} is on node {self.nodes[rank]}, this launcher is node {self.node}")
        for name in ("window_steps", "max_tokens_per_step", "queue"):
            if getattr(self, name) < 1:
                raise BadInput(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.routing_sample <= 1024:
            raise BadInput(f"--routing-sample must be between 0 and 1024, got {self.routing_sample}")
        if self.spare_cells is not None and self.spare_cells < 0:
            raise BadInput(f"--spare-cells must be at least 0, got {self.spare_cells}")
        if not 1.0 <= self.tick_ms <= 1000.0:
            raise BadInput(f"--tick-ms must be between 1 and 1000, got {self.tick_ms}")
        if self.collective_timeout_s <= 1.0:
            raise BadInput(f"--collective-timeout-s must be above 1, got {self.collective_timeout_s}")
        host_port(self.master, "--master")
        host_port(self.http, "--http")

    @property
    def state_file(self) -> Path | None:
        """Where rank 0 keeps the last live placement of the group."""
        return None if self.state_dir is None else Path(self.state_dir) / f"{self.group}.placement.json"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServeOptions:
        given: dict[str, Any] = json.loads(text)
        lists = {"ranks", "nodes"}
        values: dict[str, Any] = {
            f.name: tuple(given[f.name]) if f.name in lists else given[f.name] for f in fields(cls)
        }
        return cls(**values)


def host_port(address: str, option: str) -> tuple[str, int]:
    """`HOST:PORT` in parts. Raises BadInput naming the option."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise BadInput(f"{option} must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def rank_list(text: str) -> tuple[int, ...]:
    """`0-1,4` -> (0, 1, 4). Raises BadInput."""
    result: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise BadInput(f"--ranks must look like 0-3 or 0,2, got {text!r}")
        result.extend(range(int(first), int(last if dash else first) + 1))
    return tuple(result)
