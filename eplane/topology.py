"""Topology: the ranks of one expert-parallel group, the nodes they run on, the shape of the model they serve."""

from __future__ import annotations

from dataclasses import dataclass

from eplane.errors import TopologyError
from eplane.fields import Fields


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the planner must know of a model: `layers` MoE layers of `experts` logical experts, `top_k` a token.

    `bundle_bytes`: bytes of one expert's bundle (weights, scales, zero points, biases), the unit that moves.
    """

    model: str
    layers: int
    experts: int
    top_k: int
    bundle_bytes: int

    def __post_init__(self) -> None:
        if min(self.layers, self.experts, self.top_k, self.bundle_bytes) < 1 or self.top_k > self.experts:
            raise TopologyError(f"impossible model shape: {self}")


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; the controller plans only what is legal for all ranks of a group.

    routing_sample: it keeps a few routed tuples of each window. An engine that does not say so does not.
    """

    weighted_shares: bool = True
    free_slot_order: bool = True
    live_apply: bool = True
    phases_known: bool = True
    routing_sample: bool = False

    @classmethod
    def read(cls, fields: Fields) -> Capabilities:
        """From JSON. Whoever is older than `routing_sample` does not say it, and does not do it."""
        return cls(
            fields.flag("weighted_shares"),
            fields.flag("free_slot_order"),
            fields.flag("live_apply"),
            fields.flag("phases_known"),
            fields.maybe("routing_sample", fields.flag) or False,
        )

    def common(self, other: Capabilities) -> Capabilities:
        return Capabilities(
            self.weighted_shares and other.weighted_shares,
            self.free_slot_order and other.free_slot_order,
            self.live_apply and other.live_apply,
            self.phases_known and other.phases_known,
            self.routing_sample and other.routing_sample,
        )


@dataclass(frozen=True, slots=True)
class World:
    """One life of a group's processes. `node_of_rank[r]` names the node of rank r; `slots` is K;

    `cells` are the cells of one rank over all its layers, so `cells - layers * slots` are spare.
    """

    group: str
    world: str
    node_of_rank: tuple[str, ...]
    shape: ModelShape
    slots: int
    cells: int
    capabilities: Capabilities = Capabilities()

    def __post_init__(self) -> None:
        if not self.node_of_rank or self.slots < 1:
            raise TopologyError(f"a world needs at least one rank and one slot a rank: {self}")
        if self.ranks * self.slots < self.shape.experts:
            raise TopologyError(
                f"{self.shape.experts} experts do not fit {self.ranks} ranks x {self.slots} slots; "
                f"give at least {-(-self.shape.experts // self.ranks)} slots a rank"
            )
        if self.cells < self.shape.layers * self.slots:
            raise TopologyError(
                f"{self.cells} cells a rank are fewer than {self.shape.layers} layers x {self.slots} slots"
            )

    @property
    def ranks(self) -> int:
        return len(self.node_of_rank)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes in order of their first rank."""
        return tuple(dict.fromkeys(self.node_of_rank))

    @property
    def spare_cells(self) -> int:
        """Cells of a rank that no slot needs: the room a wave can stage into."""
        return self.cells - self.shape.layers * self.slots

    def ranks_of(self, node: str) -> tuple[int, ...]:
        return tuple(r for r, n in enumerate(self.node_of_rank) if n == node)
