"""What the ranks of a group say of themselves, as agents pass it on: who they are, and what they serve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from eplane.errors import LoadReportError, PlacementError, TopologyError
from eplane.fields import Fields
from eplane.placement import Placement
from eplane.plan import DIGEST_DIGITS, WORLD_DIGITS
from eplane.topology import Capabilities, ModelShape, World

KNOWN_TABLES = 4


@dataclass(frozen=True, slots=True)
class RankSaid:
    """One rank's description of itself. `cells`: of this rank over all layers; `epoch`: None until it was told one."""

    world: str
    group: str
    rank: int
    node: str
    node_of_rank: tuple[str, ...]
    shape: ModelShape
    slots: int
    cells: int
    capabilities: Capabilities
    digest: str
    epoch: int | None
    manifest_digest: str

    @classmethod
    def read(cls, data: object) -> RankSaid:
        """From the JSON that an engine's `describe` gives; fields that are not needed here are not looked at."""
        f = Fields(data, "describe", LoadReportError)
        try:
            shape = ModelShape(
                f.text("model", most=256),
                *(f.integer(name, high=2**40) for name in ("layers", "experts", "top_k", "bundle_bytes")),
            )
        except TopologyError as error:
            raise f.wrong("model", str(error)) from error
        return cls(
            f.hexes("world", WORLD_DIGITS),
            f.text("group", most=128),
            f.integer("rank", high=2**16),
            f.text("node", most=128),
            f.texts("node_of_rank"),
            shape,
            f.integer("slots", low=1, high=2**16),
            f.integer("cells", low=1, high=2**31),
            Capabilities.read(f.within("capabilities")),
            f.hexes("digest", DIGEST_DIGITS),
            f.maybe("epoch", f.integer),
            f.text("manifest_digest", most=128),
        )

    def common(self) -> tuple[object, ...]:
        """What all ranks of a world must say alike."""
        return self.group, self.node_of_rank, self.shape, self.slots, self.manifest_digest


@dataclass(frozen=True, slots=True)
class RankLive:
    """What a rank served when it was asked last, and when this controller heard of it (monotonic seconds). `waits`: why
    cells of a wave that ended early are not free there."""

    world: str
    rank: int
    digest: str
    epoch: int | None
    step: int
    heard_at: float
    waits: str | None = None

    @classmethod
    def read(cls, data: object, now: float) -> RankLive:
        f = Fields(data, "status", LoadReportError)
        live = f.within("live")
        return cls(
            f.hexes("world", WORLD_DIGITS),
            f.integer("rank", high=2**16),
            live.hexes("digest", DIGEST_DIGITS),
            live.maybe("epoch", live.integer),
            f.integer("step", low=-1),
            now,
            f.maybe("waits", f.text),
        )


@dataclass(frozen=True, slots=True)
class Heard:
    """One description, and when it was heard (monotonic seconds)."""

    said: RankSaid
    at: float


class Roster:
    """The latest word of every rank. A world that a rank no longer lives in is forgotten with the rank's next word."""

    def __init__(self) -> None:
        self._said: dict[int, Heard] = {}
        self._live: dict[int, RankLive] = {}
        self._tables: dict[str, Placement] = {}

    def describe(self, said: RankSaid, now: float) -> None:
        self._said[said.rank] = Heard(said, now)

    def status(self, live: RankLive) -> None:
        self._live[live.rank] = live

    def table(self, data: object, said: RankSaid) -> None:
        """Take the table that ranks serve. Raises LoadReportError unless it is one, and of the digest it names."""
        fields = Fields(data, "placement", LoadReportError)
        digest = fields.hexes("digest", DIGEST_DIGITS)
        if digest in self._tables:
            return
        try:
            table = np.array(fields.items("p2l"))
            if table.ndim != 2 or table.dtype.kind != "i":
                raise fields.wrong("p2l", "is not a table of whole numbers")
            placement = Placement(table.astype(np.int32), len(said.node_of_rank), said.shape.experts)
        except (ValueError, OverflowError, PlacementError) as error:
            raise fields.wrong("p2l", str(error)) from error
        if placement.digest != digest:
            raise fields.wrong("digest", f"is {digest}, the table is {placement.digest}")
        while len(self._tables) >= KNOWN_TABLES:
            self._tables.pop(next(iter(self._tables)))
        self._tables[digest] = placement

    def table_named(self, digest: str) -> Placement | None:
        return self._tables.get(digest)

    def ranks(self) -> Mapping[int, Heard]:
        return self._said

    def live(self, world: str) -> dict[int, RankLive]:
        return {rank: live for rank, live in self._live.items() if live.world == world}

    def knows(self, world: str, node: str) -> bool:
        """Whether every rank that `world` places on `node` has described itself."""
        mine = [h.said for h in self._said.values() if h.said.world == world and h.said.node == node]
        if not mine:
            return False
        expected = {r for r, n in enumerate(mine[0].node_of_rank) if n == node}
        return expected == {said.rank for said in mine}

    def forget(self) -> None:
        """A new leader begins with what it hears itself."""
        for kept in (self._said, self._live, self._tables):
            kept.clear()


def world_of(said: list[RankSaid]) -> World:
    """The world that its ranks (all of them, agreeing) describe; what not every rank can do, the world can not."""
    first = said[0]
    can = first.capabilities
    for other in said[1:]:
        can = can.common(other.capabilities)
    cells = min(s.cells for s in said)
    return World(first.group, first.world, first.node_of_rank, first.shape, first.slots, cells, can)
