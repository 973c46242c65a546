"""The engine link's messages: what an agent and an engine say to each other, with their JSON forms.

A frame is a 4-byte big-endian length and UTF-8 JSON of at most 16 MiB. A request is `{"id", "call", "args"}`; the
reply is `{"id", "ok"}` or `{"id", "error": {"code", "message"}}`. Each message has `to_json` and a `from_json` that
raises MessageError and names the field.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum

from eplane.errors import MessageError
from eplane.placement import Change, FloatTable, IntTable
from eplane.plan import Identity, LeaderEpoch, Load
from eplane.topology import Capabilities
from runtime.link.fields import Fields, as_integer, as_integers
from runtime.link.manifest import BundleManifest, TensorSpec

__all__ = [
    "Describe",
    "ErrorCode",
    "Identity",
    "LeaderEpoch",
    "Live",
    "Load",
    "ManifestReply",
    "PlacementReply",
    "RankStatus",
    "StageCommand",
    "Staged",
    "StagedState",
    "decode",
    "encode",
    "identity_hash",
]

MAX_FRAME = 16 * 1024 * 1024
Json = dict[str, object]


class ErrorCode(StrEnum):
    """Why an engine refuses a call. A closed set."""

    STALE_LEADER = "stale_leader"
    UNKNOWN_WORLD = "unknown_world"
    UNKNOWN_IDENTITY = "unknown_identity"
    WRONG_BASE = "wrong_base"
    DIGEST_MISMATCH = "digest_mismatch"
    NOT_VERIFIED = "not_verified"
    ALREADY_ARMED = "already_armed"
    BUSY = "busy"
    CAPACITY = "capacity"
    BAD_REQUEST = "bad_request"
    SUPERSEDED = "superseded"
    SOURCE_UNAVAILABLE = "source_unavailable"


class StagedState(StrEnum):
    STAGING = "STAGING"
    VERIFIED = "VERIFIED"
    FAILED = "FAILED"


def encode(message: Json) -> bytes:
    """One frame. Raises MessageError when it would be over the limit."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME:
        raise MessageError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes) -> Json:
    """The object in one frame's body."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise MessageError("a frame is not valid JSON") from None
    if not isinstance(value, dict):
        raise MessageError("a frame must hold a JSON object")
    return value


def identity_hash(identity: Identity) -> int:
    """Signed 64-bit name of an identity for the headers of the counts exchange; never 0."""
    text = json.dumps([identity.world, identity.migration, identity.wave, identity.epoch, identity.digest])
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return value or 1


def identity_to_json(identity: Identity) -> Json:
    return {
        "world": identity.world,
        "migration": identity.migration,
        "wave": identity.wave,
        "epoch": identity.epoch,
        "digest": identity.digest,
    }


def identity_from_json(fields: Fields) -> Identity:
    return Identity(
        fields.text("world"),
        fields.text("migration"),
        fields.integer("wave"),
        fields.integer("epoch"),
        fields.text("digest"),
    )


def leader_epoch_to_json(epoch: LeaderEpoch) -> Json:
    return {"cluster": epoch.cluster, "revision": epoch.revision}


def leader_epoch_from_json(fields: Fields) -> LeaderEpoch:
    return LeaderEpoch(fields.integer("cluster", 0, 2**64 - 1), fields.integer("revision"))


@dataclass(frozen=True, slots=True)
class Describe:
    """What an engine is: its world, the model's shape, its memory, its capabilities, what is live.

    `cells`, `cells_free`: of this rank over all layers. `step`: the last step begun, -1 before the first.
    """

    world: str
    group: str
    rank: int
    node: str
    node_of_rank: tuple[str, ...]
    model: str
    layers: int
    experts: int
    top_k: int
    slots: int
    cells: int
    cells_free: int
    bundle_bytes: int
    capabilities: Capabilities
    digest: str
    epoch: int | None
    manifest_digest: str
    transfer_address: str
    step: int

    def to_json(self) -> Json:
        return {
            "world": self.world,
            "group": self.group,
            "rank": self.rank,
            "node": self.node,
            "node_of_rank": list(self.node_of_rank),
            "model": self.model,
            "layers": self.layers,
            "experts": self.experts,
            "top_k": self.top_k,
            "slots": self.slots,
            "cells": self.cells,
            "cells_free": self.cells_free,
            "bundle_bytes": self.bundle_bytes,
            "capabilities": {
                "weighted_shares": self.capabilities.weighted_shares,
                "free_slot_order": self.capabilities.free_slot_order,
                "live_apply": self.capabilities.live_apply,
                "phases_known": self.capabilities.phases_known,
            },
            "digest": self.digest,
            "epoch": self.epoch,
            "manifest_digest": self.manifest_digest,
            "transfer_address": self.transfer_address,
            "step": self.step,
        }

    @staticmethod
    def from_json(value: object) -> Describe:
        fields = Fields(value, "describe")
        can = fields.nested("capabilities")
        return Describe(
            world=fields.text("world"),
            group=fields.text("group"),
            rank=fields.integer("rank"),
            node=fields.text("node"),
            node_of_rank=fields.texts("node_of_rank"),
            model=fields.text("model"),
            layers=fields.integer("layers", 1),
            experts=fields.integer("experts", 1),
            top_k=fields.integer("top_k", 1),
            slots=fields.integer("slots", 1),
            cells=fields.integer("cells", 1),
            cells_free=fields.integer("cells_free"),
            bundle_bytes=fields.integer("bundle_bytes", 1),
            capabilities=Capabilities(
                can.flag("weighted_shares"),
                can.flag("free_slot_order"),
                can.flag("live_apply"),
                can.flag("phases_known"),
            ),
            digest=fields.text("digest"),
            epoch=fields.integer_or_none("epoch"),
            manifest_digest=fields.text("manifest_digest"),
            transfer_address=fields.text("transfer_address"),
            step=fields.integer("step", -1),
        )


@dataclass(frozen=True, slots=True)
class ManifestReply:
    """The bundle manifest and `digests [L][E]`, the digest of every bundle in its resident form."""

    manifest: BundleManifest
    digests: tuple[tuple[str, ...], ...]

    def to_json(self) -> Json:
        tensors = [{"name": s.name, "dtype": s.dtype, "shape": list(s.shape)} for s in self.manifest.tensors]
        return {"tensors": tensors, "digests": [list(row) for row in self.digests]}

    @staticmethod
    def from_json(value: object) -> ManifestReply:
        fields = Fields(value, "manifest")
        specs = []
        for item in fields.items("tensors"):
            spec = Fields(item, "manifest.tensors")
            shape = tuple(as_integer(size, "manifest.tensors.shape", 1) for size in spec.items("shape"))
            specs.append(TensorSpec(spec.text("name"), spec.text("dtype"), shape))
        rows = [Fields({"row": row}, "manifest.digests").texts("row") for row in fields.items("digests")]
        return ManifestReply(BundleManifest(tuple(specs)), tuple(rows))


@dataclass(frozen=True, slots=True, eq=False)
class PlacementReply:
    """The live placement: `p2l [L, P]`, `shares [L, P]`."""

    digest: str
    epoch: int | None
    p2l: IntTable
    shares: FloatTable

    def to_json(self) -> Json:
        return {
            "digest": self.digest,
            "epoch": self.epoch,
            "p2l": self.p2l.tolist(),
            "shares": self.shares.tolist(),
        }

    @staticmethod
    def from_json(value: object) -> PlacementReply:
        fields = Fields(value, "placement")
        shares = fields.numbers_2d_or_none("shares")
        if shares is None:
            raise MessageError("placement.shares must be a table")
        return PlacementReply(fields.text("digest"), fields.integer_or_none("epoch"), fields.integers_2d("p2l"), shares)


@dataclass(frozen=True, slots=True, eq=False)
class StageCommand:
    """Have the bundles of one wave brought into free cells of this rank, and verified.

    `changes`: the whole delta from `base_digest` to the identity's digest, of all ranks. `loads`: what THIS rank must
    receive. `peers`: transfer address of each rank. `bytes_per_s`: the rate limit of this rank, None = none.
    """

    identity: Identity
    leader_epoch: LeaderEpoch
    base_digest: str
    changes: tuple[Change, ...]
    shares: FloatTable | None
    loads: tuple[Load, ...]
    peers: dict[int, str]
    bytes_per_s: float | None

    def to_json(self) -> Json:
        return {
            "identity": identity_to_json(self.identity),
            "leader_epoch": leader_epoch_to_json(self.leader_epoch),
            "base_digest": self.base_digest,
            "changes": [[c.layer, c.slot, c.expert] for c in self.changes],
            "shares": None if self.shares is None else self.shares.tolist(),
            "loads": [
                {"layer": m.layer, "slot": m.slot, "expert": m.expert, "source_rank": m.source_rank} for m in self.loads
            ],
            "peers": {str(rank): address for rank, address in self.peers.items()},
            "bytes_per_s": self.bytes_per_s,
        }

    @staticmethod
    def from_json(value: object) -> StageCommand:
        fields = Fields(value, "stage")
        loads = []
        for item in fields.items("loads"):
            load = Fields(item, "stage.loads")
            numbers = (load.integer(key, 0, 2**31) for key in ("layer", "slot", "expert", "source_rank"))
            loads.append(Load(*numbers))
        peers: dict[int, str] = {}
        for name, address in fields.pairs("peers"):
            if not name.isdecimal() or not isinstance(address, str):
                raise MessageError(f"stage.peers maps ranks to addresses, got {name!r}: {address!r}")
            peers[int(name)] = address
        return StageCommand(
            identity=identity_from_json(fields.nested("identity")),
            leader_epoch=leader_epoch_from_json(fields.nested("leader_epoch")),
            base_digest=fields.text("base_digest"),
            changes=tuple(Change(*as_integers(row, 3, "stage.changes", -1)) for row in fields.items("changes")),
            shares=fields.numbers_2d_or_none("shares"),
            loads=tuple(loads),
            peers=peers,
            bytes_per_s=fields.number_or_none("bytes_per_s"),
        )


@dataclass(frozen=True, slots=True)
class Live:
    """What a rank serves: the placement's digest, and its epoch once that is known."""

    epoch: int | None
    digest: str


@dataclass(frozen=True, slots=True)
class Staged:
    """How far staging is: `done` of `total` bundles, `bytes` received. `reason`: one sentence when FAILED."""

    identity: Identity
    state: StagedState
    done: int
    total: int
    bytes: int
    reason: str | None

    def to_json(self) -> Json:
        return {
            "identity": identity_to_json(self.identity),
            "state": self.state.value,
            "done": self.done,
            "total": self.total,
            "bytes": self.bytes,
            "reason": self.reason,
        }

    @staticmethod
    def from_json(fields: Fields) -> Staged:
        return Staged(
            identity_from_json(fields.nested("identity")),
            fields.choice("state", StagedState),
            fields.integer("done"),
            fields.integer("total"),
            fields.integer("bytes"),
            fields.text_or_none("reason"),
        )


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank stands. `clean`: nothing is staged or armed, and no retired cell waits to be free.

    `last_step_under_old`: the last step that was served before the switch to `last_switched`.
    """

    world: str
    rank: int
    step: int
    live: Live
    leader_epoch: LeaderEpoch | None
    armed: Identity | None
    staged: Staged | None
    last_switched: Identity | None
    last_step_under_old: int | None
    clean: bool
    cells_free: int
    cells_retired: int

    def to_json(self) -> Json:
        return {
            "world": self.world,
            "rank": self.rank,
            "step": self.step,
            "live": {"epoch": self.live.epoch, "digest": self.live.digest},
            "leader_epoch": None if self.leader_epoch is None else leader_epoch_to_json(self.leader_epoch),
            "armed": None if self.armed is None else identity_to_json(self.armed),
            "staged": None if self.staged is None else self.staged.to_json(),
            "last_switched": None if self.last_switched is None else identity_to_json(self.last_switched),
            "last_step_under_old": self.last_step_under_old,
            "clean": self.clean,
            "cells_free": self.cells_free,
            "cells_retired": self.cells_retired,
        }

    @staticmethod
    def from_json(value: object) -> RankStatus:
        fields = Fields(value, "status")
        live = fields.nested("live")
        leader = fields.nested_or_none("leader_epoch")
        armed = fields.nested_or_none("armed")
        staged = fields.nested_or_none("staged")
        last = fields.nested_or_none("last_switched")
        return RankStatus(
            world=fields.text("world"),
            rank=fields.integer("rank"),
            step=fields.integer("step", -1),
            live=Live(live.integer_or_none("epoch"), live.text("digest")),
            leader_epoch=None if leader is None else leader_epoch_from_json(leader),
            armed=None if armed is None else identity_from_json(armed),
            staged=None if staged is None else Staged.from_json(staged),
            last_switched=None if last is None else identity_from_json(last),
            last_step_under_old=fields.integer_or_none("last_step_under_old", -1),
            clean=fields.flag("clean"),
            cells_free=fields.integer("cells_free"),
            cells_retired=fields.integer("cells_retired"),
        )
