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

import numpy as np

from eplane.errors import MessageError
from eplane.fields import Fields
from eplane.placement import Change, FloatTable, IntTable
from eplane.plan import Identity, LeaderEpoch, Load
from eplane.topology import Capabilities
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
        raise MessageError("frame", f"of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes) -> Json:
    """The object in one frame's body."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise MessageError("frame", "is not valid JSON") from None
    if not isinstance(value, dict):
        raise MessageError("frame", "must hold a JSON object")
    return value


def identity_hash(identity: Identity) -> int:
    """Signed 64-bit name of an identity for the headers of the counts exchange; never 0."""
    text = json.dumps([identity.world, identity.migration, identity.wave, identity.epoch, identity.digest])
    value = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    return value or 1


def read_table(fields: Fields, name: str) -> FloatTable:
    """A table of finite numbers with two dimensions."""
    rows = fields.items(name)
    try:
        table = np.array(rows)
    except (ValueError, OverflowError):
        raise fields.wrong(name, "has rows of different lengths") from None
    if table.ndim != 2 or table.size == 0 or table.dtype.kind not in "if" or not np.isfinite(table).all():
        raise fields.wrong(name, "must be a table of finite numbers with two dimensions")
    return table.astype(np.float64)


def read_int_table(fields: Fields, name: str) -> IntTable:
    table = read_table(fields, name)
    if (table != np.rint(table)).any() or np.abs(table).max() >= 2**31:
        raise fields.wrong(name, "must be a table of whole numbers")
    return table.astype(np.int32)


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
                "routing_sample": self.capabilities.routing_sample,
            },
            "digest": self.digest,
            "epoch": self.epoch,
            "manifest_digest": self.manifest_digest,
            "transfer_address": self.transfer_address,
            "step": self.step,
        }

    @staticmethod
    def from_json(value: object) -> Describe:
        fields = Fields(value, "describe", MessageError)
        return Describe(
            world=fields.hexes("world", 16),
            group=fields.text("group"),
            rank=fields.integer("rank"),
            node=fields.text("node"),
            node_of_rank=fields.texts("node_of_rank"),
            model=fields.text("model"),
            layers=fields.integer("layers", low=1),
            experts=fields.integer("experts", low=1),
            top_k=fields.integer("top_k", low=1),
            slots=fields.integer("slots", low=1),
            cells=fields.integer("cells", low=1),
            cells_free=fields.integer("cells_free"),
            bundle_bytes=fields.integer("bundle_bytes", low=1),
            capabilities=Capabilities.read(fields.within("capabilities")),
            digest=fields.hexes("digest", 16),
            epoch=fields.maybe("epoch", fields.integer),
            manifest_digest=fields.hexes("manifest_digest", 16),
            transfer_address=fields.text("transfer_address"),
            step=fields.integer("step", low=-1),
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
        fields = Fields(value, "manifest", MessageError)
        specs = tuple(
            TensorSpec(spec.text("name"), spec.text("dtype"), spec.integers("shape", low=1, most=8))
            for spec in fields.objects("tensors")
        )
        rows = fields.items("digests")
        digests = tuple(Fields({"row": row}, "manifest.digests", MessageError).texts("row") for row in rows)
        return ManifestReply(BundleManifest(specs), digests)


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
        fields = Fields(value, "placement", MessageError)
        return PlacementReply(
            fields.hexes("digest", 16),
            fields.maybe("epoch", fields.integer),
            read_int_table(fields, "p2l"),
            read_table(fields, "shares"),
        )


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
            "identity": self.identity.to_json(),
            "leader_epoch": self.leader_epoch.to_json(),
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
    def read(fields: Fields) -> StageCommand:
        loads = []
        for load in fields.objects("loads"):
            numbers = (load.integer(name, high=2**31 - 1) for name in ("layer", "slot", "expert", "source_rank"))
            loads.append(Load(*numbers))
        changes = []
        for row in fields.items("changes"):
            entry = Fields({"row": row}, "stage.changes", MessageError).integers("row", low=-1, high=2**31 - 1)
            if len(entry) != 3:
                raise fields.wrong("changes", f"needs [layer, slot, expert], got {list(entry)}")
            changes.append(Change(*entry))
        peers: dict[int, str] = {}
        addresses = fields.value("peers")
        for name, address in addresses.items() if isinstance(addresses, dict) else [("", addresses)]:
            if not (isinstance(name, str) and name.isdecimal() and isinstance(address, str)):
                raise fields.wrong("peers", f"must map ranks to addresses, got {name!r}: {address!r}")
            peers[int(name)] = address
        return StageCommand(
            identity=Identity.read(fields.within("identity")),
            leader_epoch=LeaderEpoch.read(fields.within("leader_epoch")),
            base_digest=fields.hexes("base_digest", 16),
            changes=tuple(changes),
            shares=fields.maybe("shares", lambda name: read_table(fields, name)),
            loads=tuple(loads),
            peers=peers,
            bytes_per_s=fields.maybe("bytes_per_s", lambda name: fields.number(name, low=1.0)),
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
            "identity": self.identity.to_json(),
            "state": self.state.value,
            "done": self.done,
            "total": self.total,
            "bytes": self.bytes,
            "reason": self.reason,
        }

    @staticmethod
    def from_json(fields: Fields) -> Staged:
        return Staged(
            Identity.read(fields.within("identity")),
            fields.choice("state", StagedState),
            fields.integer("done"),
            fields.integer("total"),
            fields.integer("bytes"),
            fields.maybe("reason", fields.text),
        )


@dataclass(frozen=True, slots=True)
class RankStatus:
    """Where a rank stands. `clean`: nothing is staged or armed, and no retired cell waits to be free.

    `last_step_under_old`: the last step that was served before the switch to `last_switched`. `waits`: why cells of a wave
    that failed or was given up are not free yet, one sentence.
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
    waits: str | None = None

    def to_json(self) -> Json:
        return {
            "world": self.world,
            "rank": self.rank,
            "step": self.step,
            "live": {"epoch": self.live.epoch, "digest": self.live.digest},
            "leader_epoch": None if self.leader_epoch is None else self.leader_epoch.to_json(),
            "armed": None if self.armed is None else self.armed.to_json(),
            "staged": None if self.staged is None else self.staged.to_json(),
            "last_switched": None if self.last_switched is None else self.last_switched.to_json(),
            "last_step_under_old": self.last_step_under_old,
            "clean": self.clean,
            "cells_free": self.cells_free,
            "cells_retired": self.cells_retired,
            "waits": self.waits,
        }

    @staticmethod
    def from_json(value: object) -> RankStatus:
        fields = Fields(value, "status", MessageError)
        live = fields.within("live")
        return RankStatus(
            world=fields.hexes("world", 16),
            rank=fields.integer("rank"),
            step=fields.integer("step", low=-1),
            live=Live(live.maybe("epoch", live.integer), live.hexes("digest", 16)),
            leader_epoch=fields.maybe("leader_epoch", lambda name: LeaderEpoch.read(fields.within(name))),
            armed=fields.maybe("armed", lambda name: Identity.read(fields.within(name))),
            staged=fields.maybe("staged", lambda name: Staged.from_json(fields.within(name))),
            last_switched=fields.maybe("last_switched", lambda name: Identity.read(fields.within(name))),
            last_step_under_old=fields.maybe("last_step_under_old", lambda name: fields.integer(name, low=-1)),
            clean=fields.flag("clean"),
            cells_free=fields.integer("cells_free"),
            cells_retired=fields.integer("cells_retired"),
            waits=fields.maybe("waits", fields.text),
        )
