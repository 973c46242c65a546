"""Plans: frozen, ordered work that leads from a base placement to a target one, wave by wave.

A plan is dry: it commands nothing. Wave `n` of a plan (numbered from 1) makes epoch `base_epoch + n`. Each wave leads
from one valid placement to the next, so a plan that stops half-way leaves a valid placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from eplane.errors import PlacementError, PlanError
from eplane.fields import MAX_INT, Fields, Refuse, pack
from eplane.placement import EMPTY, Change, Placement

WORLD_DIGITS = 16
DIGEST_DIGITS = 16
MAX_WAVES = 9999


@dataclass(frozen=True, slots=True)
class LeaderEpoch:
    """The fencing token: id of the etcd cluster, and the revision at which the leader key was created there."""

    cluster: int
    revision: int

    def to_json(self) -> dict[str, object]:
        return {"cluster": self.cluster, "revision": self.revision}

    @classmethod
    def read(cls, fields: Fields) -> LeaderEpoch:
        result = cls(fields.integer("cluster", high=2**64 - 1), fields.integer("revision", low=1))
        fields.done()
        return result

    @classmethod
    def from_json(cls, data: object, path: str = "leader_epoch", refuse: Refuse = PlanError) -> LeaderEpoch:
        return cls.read(Fields(data, path, refuse))


@dataclass(frozen=True, slots=True)
class Identity:
    """Names one wave beyond doubt, on every call, ack and record.

    `epoch` is the epoch that the wave makes, `digest` the digest of its target placement.
    """

    world: str
    migration: str
    wave: int
    epoch: int
    digest: str

    def to_json(self) -> dict[str, object]:
        return {
            "world": self.world,
            "migration": self.migration,
            "wave": self.wave,
            "epoch": self.epoch,
            "digest": self.digest,
        }

    @classmethod
    def read(cls, fields: Fields) -> Identity:
        result = cls(
            fields.hexes("world", WORLD_DIGITS),
            fields.text("migration", most=128),
            fields.integer("wave", low=1, high=MAX_WAVES),
            fields.integer("epoch", low=1),
            fields.hexes("digest", DIGEST_DIGITS),
        )
        fields.done()
        return result

    @classmethod
    def from_json(cls, data: object, path: str = "identity", refuse: Refuse = PlanError) -> Identity:
        return cls.read(Fields(data, path, refuse))


@dataclass(frozen=True, slots=True)
class Load:
    """One bundle that must travel: `expert` of `layer` into `slot`, pulled from `source_rank`."""

    layer: int
    slot: int
    expert: int
    source_rank: int


@dataclass(frozen=True, slots=True)
class WavePlan:
    """One wave: the delta of the whole table, the bundles that travel for it, and what they weigh in bytes.

    `overlaps`: the wave may stage while the wave before it is still switching, because the free cells of every rank
    hold the incoming bundles of both (see `fits_beside`). Without it, it stages when the wave before is clean.
    """

    number: int
    changes: tuple[Change, ...]
    loads: tuple[Load, ...]
    base_digest: str
    target_digest: str
    bytes: int
    overlaps: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.number <= MAX_WAVES:
            raise PlanError("number", f"waves are numbered from 1 to {MAX_WAVES}, got {self.number}")
        if not self.changes:
            raise PlanError("changes", "a wave without a change makes no epoch")
        if self.base_digest == self.target_digest:
            raise PlanError("target_digest", "the wave leads to the placement it started from")
        if self.bytes < 0:
            raise PlanError("bytes", f"must not be negative, got {self.bytes}")
        named = {(c.layer, c.slot): c.expert for c in self.changes}
        if len(named) != len(self.changes):
            raise PlanError("changes", "the same slot of a layer is named twice")
        for load in self.loads:
            if named.get((load.layer, load.slot), EMPTY) != load.expert or load.expert == EMPTY:
                raise PlanError(
                    "loads", f"layer {load.layer}, slot {load.slot}: no change puts expert {load.expert} there"
                )
        if len({(load.layer, load.slot) for load in self.loads}) != len(self.loads):
            raise PlanError("loads", "two bundles for the same slot of a layer")

    def incoming(self, slots: int) -> Counter[int]:
        """Bundles that each rank receives, with `slots` slots (K) a rank and layer."""
        return Counter(load.slot // slots for load in self.loads)

    def fits_beside(self, before: WavePlan | None, slots: int, spare_cells: Sequence[int]) -> bool:
        """Whether every rank can stage this wave while `before` still holds the cells that it frees."""
        need = self.incoming(slots)
        if before is not None:
            need += before.incoming(slots)
        return all(need[rank] <= spare_cells[rank] for rank in need)

    def applied_to(self, base: Placement) -> Placement:
        """The wave's target. Raises PlanError unless digests, deltas and sources are those of `base`."""
        if base.digest != self.base_digest:
            raise PlanError("base_digest", f"is {self.base_digest}, the placement is {base.digest}")
        try:
            target = base.apply(self.changes)
        except PlacementError as error:
            raise PlanError("changes", str(error)) from error
        if target.digest != self.target_digest:
            raise PlanError("target_digest", f"is {self.target_digest}, the changes lead to {target.digest}")
        travel = {(load.layer, load.expert, base.rank_of(load.slot)) for load in self.loads}
        missing = set(base.moves(target)) - travel
        if missing:
            layer, expert, rank = min(missing)
            raise PlanError("loads", f"layer {layer}: expert {expert} must travel to rank {rank}, no bundle does")
        for load in self.loads:
            if not 0 <= load.source_rank < base.ranks:
                raise PlanError("loads", f"source rank {load.source_rank} is outside 0..{base.ranks - 1}")
            if load.expert not in base.by_rank()[load.layer, load.source_rank]:
                raise PlanError(
                    "loads", f"layer {load.layer}: rank {load.source_rank} holds no replica of expert {load.expert}"
                )
        return target

    def to_json(self) -> dict[str, object]:
        changes = [(c.layer, c.slot, c.expert) for c in self.changes]
        loads = [(x.layer, x.slot, x.expert, x.source_rank) for x in self.loads]
        return {
            "number": self.number,
            "changes": pack(np.array(changes, dtype=np.int32).reshape(-1, 3)),
            "loads": pack(np.array(loads, dtype=np.int32).reshape(-1, 4)),
            "base_digest": self.base_digest,
            "target_digest": self.target_digest,
            "bytes": self.bytes,
            "overlaps": self.overlaps,
        }

    @classmethod
    def read(cls, fields: Fields) -> WavePlan:
        changes, loads = fields.packed("changes", (-1, 3)), fields.packed("loads", (-1, 4))
        if changes.size and (int(changes[:, :2].min()) < 0 or int(changes[:, 2].min()) < EMPTY):
            raise fields.wrong("changes", "names a negative layer, slot or expert")
        if loads.size and int(loads.min()) < 0:
            raise fields.wrong("loads", "names a negative layer, slot, expert or rank")
        parts = (
            fields.integer("number", low=1, high=MAX_WAVES),
            tuple(Change(*row) for row in changes.tolist()),
            tuple(Load(*row) for row in loads.tolist()),
            fields.hexes("base_digest", DIGEST_DIGITS),
            fields.hexes("target_digest", DIGEST_DIGITS),
            fields.integer("bytes"),
            fields.flag("overlaps"),
        )
        fields.done()
        try:
            return cls(*parts)
        except PlanError as error:
            raise fields.wrong(error.field, error.reason) from error

    @classmethod
    def from_json(cls, data: object, path: str = "wave", refuse: Refuse = PlanError) -> WavePlan:
        return cls.read(Fields(data, path, refuse))


class PlanState(Enum):
    PROPOSED = "PROPOSED"
    EXECUTING = "EXECUTING"
    DONE = "DONE"
    DISCARDED = "DISCARDED"
    REFUSED = "REFUSED"
    STALE = "STALE"


class PlanKind(Enum):
    REBALANCE = "rebalance"
    ROLLBACK = "rollback"
    DRAIN = "drain"


class Ruling(Enum):
    """What a goal says of a plan."""

    YES = "YES"
    THROTTLE = "THROTTLE"
    NO = "NO"


@dataclass(frozen=True, slots=True)
class Decision:
    """A goal's ruling with its one sentence."""

    goal: str
    ruling: Ruling
    sentence: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is expected to bring and to cost. Gain and cost in seconds over the horizon it was judged for."""

    balancedness_before: float
    balancedness_after: float
    gain_s: float
    cost_s: float
    bytes: int
    moves: int

    def to_json(self) -> dict[str, object]:
        return {
            "balancedness_before": self.balancedness_before,
            "balancedness_after": self.balancedness_after,
            "gain_s": self.gain_s,
            "cost_s": self.cost_s,
            "bytes": self.bytes,
            "moves": self.moves,
        }

    @classmethod
    def read(cls, fields: Fields) -> Prediction:
        result = cls(
            fields.number("balancedness_before", low=0, high=1),
            fields.number("balancedness_after", low=0, high=1),
            fields.number("gain_s"),
            fields.number("cost_s", low=0),
            fields.integer("bytes"),
            fields.integer("moves"),
        )
        fields.done()
        return result


@dataclass(frozen=True, slots=True)
class Plan:
    """Frozen, ordered work. `created_at` in seconds since 1970. Raises PlanError if the waves do not form a chain."""

    id: str
    group: str
    world: str
    base_epoch: int
    base_digest: str
    target_digest: str
    waves: tuple[WavePlan, ...]
    created_at: float
    reason: str
    actor: str
    policy: str
    predicted: Prediction
    decisions: tuple[Decision, ...] = ()
    state: PlanState = PlanState.PROPOSED
    kind: PlanKind = PlanKind.REBALANCE

    def __post_init__(self) -> None:
        if not self.waves:
            raise PlanError("waves", "a plan without a wave is no plan")
        if not 0 <= self.base_epoch <= MAX_INT - len(self.waves):
            raise PlanError("base_epoch", f"{self.base_epoch} is no epoch")
        at = self.base_digest
        for place, wave in enumerate(self.waves, start=1):
            if wave.number != place:
                raise PlanError("waves", f"wave {place} carries the number {wave.number}")
            if wave.base_digest != at:
                raise PlanError("waves", f"wave {place} starts from {wave.base_digest}, the one before leads to {at}")
            at = wave.target_digest
        if at != self.target_digest:
            raise PlanError("target_digest", f"is {self.target_digest}, the last wave leads to {at}")

    @property
    def bytes(self) -> int:
        return sum(wave.bytes for wave in self.waves)

    @property
    def moves(self) -> int:
        """Bundles that travel."""
        return sum(len(wave.loads) for wave in self.waves)

    def identity(self, wave: int, migration: str) -> Identity:
        return Identity(self.world, migration, wave, self.base_epoch + wave, self.waves[wave - 1].target_digest)

    def applied_to(self, base: Placement) -> tuple[Placement, ...]:
        """The placement after each wave. Raises PlanError where a wave does not fit what the one before leads to."""
        result: list[Placement] = []
        for wave in self.waves:
            result.append(wave.applied_to(result[-1] if result else base))
        return tuple(result)

    def to_json(self) -> dict[str, object]:
        """Everything but the waves, and the waves; `eplane.records` splits it where it is too large for one value."""
        return {
            "id": self.id,
            "group": self.group,
            "world": self.world,
            "base_epoch": self.base_epoch,
            "base_digest": self.base_digest,
            "target_digest": self.target_digest,
            "created_at": self.created_at,
            "reason": self.reason,
            "actor": self.actor,
            "policy": self.policy,
            "predicted": self.predicted.to_json(),
            "decisions": [[d.goal, d.ruling.value, d.sentence] for d in self.decisions],
            "state": self.state.value,
            "kind": self.kind.value,
            "waves": [wave.to_json() for wave in self.waves],
        }

    @classmethod
    def read(cls, fields: Fields) -> Plan:
        waves = tuple(WavePlan.read(item) for item in fields.objects("waves", most=MAX_WAVES))
        parts = (
            fields.text("id", most=128),
            fields.text("group", most=128),
            fields.hexes("world", WORLD_DIGITS),
            fields.integer("base_epoch"),
            fields.hexes("base_digest", DIGEST_DIGITS),
            fields.hexes("target_digest", DIGEST_DIGITS),
            waves,
            fields.number("created_at", low=0),
            fields.text("reason", empty=True),
            fields.text("actor"),
            fields.text("policy", most=128),
            Prediction.read(fields.within("predicted")),
            tuple(_decisions(fields, fields.items("decisions", most=4096))),
            fields.choice("state", PlanState),
            fields.choice("kind", PlanKind),
        )
        fields.done()
        try:
            return cls(*parts)
        except PlanError as error:
            raise fields.wrong(error.field, error.reason) from error

    @classmethod
    def from_json(cls, data: object, path: str = "plan", refuse: Refuse = PlanError) -> Plan:
        return cls.read(Fields(data, path, refuse))


def _decisions(fields: Fields, items: Iterable[object]) -> Iterable[Decision]:
    rulings = {ruling.value: ruling for ruling in Ruling}
    for at, item in enumerate(items):
        if not isinstance(item, list | tuple) or len(item) != 3 or not all(isinstance(x, str) for x in item):
            raise fields.wrong(f"decisions[{at}]", "must be [goal, ruling, sentence]")
        if item[1] not in rulings:
            raise fields.wrong(f"decisions[{at}]", f"ruling {item[1]!r:.40} is not one of {', '.join(rulings)}")
        yield Decision(item[0], rulings[item[1]], item[2])
