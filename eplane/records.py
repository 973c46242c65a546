"""Everything that lies in the store, as versioned JSON: one small frozen dataclass a record, read strictly.

A value is `{"v": 1, "record": <kind>, ...}` and at most 256 KiB. What does not fit (tables, long plans) goes into parts that
are written before the record that names them; see `eplane.parts`. Times (`at`) are seconds since 1970 and are shown, not
decided by. Each record that several writers could write carries a `nonce`, by which a writer knows its own write again.
Where `migration` stands in an optional field, None means that no migration did it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import ClassVar

from eplane.envelope import (
    NONCE_DIGITS,
    VERSION,
    Record,
    decode,
    encode,
    new_nonce,
    open_record,
    read_at,
    read_nonce,
    read_signed,
    signed,
    to_bytes,
)
from eplane.fields import Fields
from eplane.history import FULL_EVERY, EpochPointer, HistoryKind, HistoryRecord, rebuild_placement
from eplane.keys import AckKind
from eplane.plan import DIGEST_DIGITS, WORLD_DIGITS, Identity
from eplane.topology import Capabilities, ModelShape, World

__all__ = [
    "FULL_EVERY",
    "NONCE_DIGITS",
    "VERSION",
    "AckRecord",
    "ActiveRecord",
    "EpochPointer",
    "HistoryKind",
    "HistoryRecord",
    "LeaderRecord",
    "Mode",
    "ModeRecord",
    "MovesRecord",
    "PauseRecord",
    "PresenceRecord",
    "Record",
    "SettingsRecord",
    "WorldRecord",
    "decode",
    "encode",
    "new_nonce",
    "open_record",
    "rebuild_placement",
    "to_bytes",
]


@dataclass(frozen=True, slots=True)
class LeaderRecord:
    """Value of the leader key: who leads, and where agents and other controllers reach it."""

    KIND: ClassVar[str] = "leader"
    id: str
    url: str

    def body(self) -> dict[str, object]:
        return {"id": self.id, "url": self.url}

    @classmethod
    def read(cls, fields: Fields) -> LeaderRecord:
        return cls(fields.text("id", most=128), fields.text("url"))


class Mode(Enum):
    """How much the controller may do by itself in a group."""

    OFF = "off"
    OBSERVE = "observe"
    PROPOSE = "propose"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ModeRecord:
    KIND: ClassVar[str] = "mode"
    mode: Mode
    actor: str
    reason: str
    at: float
    nonce: str

    def body(self) -> dict[str, object]:
        return {"mode": self.mode.value, **signed(self.actor, self.reason, self.at, self.nonce)}

    @classmethod
    def read(cls, fields: Fields) -> ModeRecord:
        return cls(fields.choice("mode", Mode), *read_signed(fields))


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """While it exists, nothing is cut over."""

    KIND: ClassVar[str] = "pause"
    actor: str
    reason: str
    at: float
    nonce: str

    def body(self) -> dict[str, object]:
        return signed(self.actor, self.reason, self.at, self.nonce)

    @classmethod
    def read(cls, fields: Fields) -> PauseRecord:
        return cls(*read_signed(fields))


@dataclass(frozen=True, slots=True)
class SettingsRecord:
    """Settings of the group that people changed. `values`: plain JSON, judged by whoever owns the settings."""

    KIND: ClassVar[str] = "settings"
    values: Mapping[str, object]
    actor: str
    reason: str
    at: float
    nonce: str

    def body(self) -> dict[str, object]:
        return {"values": dict(self.values), **signed(self.actor, self.reason, self.at, self.nonce)}

    @classmethod
    def read(cls, fields: Fields) -> SettingsRecord:
        values = fields.value("values")
        if not isinstance(values, dict):
            raise fields.wrong("values", f"must be an object, got {type(values).__name__}")
        return cls(MappingProxyType(values), *read_signed(fields))


@dataclass(frozen=True, slots=True)
class WorldRecord:
    """The life of the group's processes that was adopted last."""

    KIND: ClassVar[str] = "world"
    world: World
    manifest_digest: str
    at: float
    nonce: str

    def body(self) -> dict[str, object]:
        shape, caps = self.world.shape, self.world.capabilities
        return {
            "group": self.world.group,
            "world": self.world.world,
            "node_of_rank": list(self.world.node_of_rank),
            "shape": {
                "model": shape.model,
                "layers": shape.layers,
                "experts": shape.experts,
                "top_k": shape.top_k,
                "bundle_bytes": shape.bundle_bytes,
            },
            "slots": self.world.slots,
            "cells": self.world.cells,
            "capabilities": {
                "weighted_shares": caps.weighted_shares,
                "free_slot_order": caps.free_slot_order,
                "live_apply": caps.live_apply,
                "phases_known": caps.phases_known,
                # Only where it holds: a controller that does not know the word goes on reading all other worlds.
                **({"routing_sample": True} if caps.routing_sample else {}),
            },
            "manifest_digest": self.manifest_digest,
            "at": self.at,
            "nonce": self.nonce,
        }

    @classmethod
    def read(cls, fields: Fields) -> WorldRecord:
        shape, caps = fields.within("shape"), fields.within("capabilities")
        world = World(
            fields.text("group", most=128),
            fields.hexes("world", WORLD_DIGITS),
            fields.texts("node_of_rank"),
            ModelShape(
                shape.text("model", most=256),
                *(shape.integer(n) for n in ("layers", "experts", "top_k", "bundle_bytes")),
            ),
            fields.integer("slots"),
            fields.integer("cells"),
            Capabilities.read(caps),
        )
        shape.done()
        caps.done()
        return cls(world, fields.text("manifest_digest", most=128), read_at(fields), read_nonce(fields))


@dataclass(frozen=True, slots=True)
class ActiveRecord:
    """The one migration of the group that is past PLANNED."""

    KIND: ClassVar[str] = "active"
    migration: str
    nonce: str

    def body(self) -> dict[str, object]:
        return {"migration": self.migration, "nonce": self.nonce}

    @classmethod
    def read(cls, fields: Fields) -> ActiveRecord:
        return cls(fields.text("migration", most=128), read_nonce(fields))


@dataclass(frozen=True, slots=True)
class AckRecord:
    """What a node says of a wave, after its engine confirmed it for all ranks of the node.

    `last_step`: with SWITCHED, the last step that any of the ranks ran under the old epoch; else None.
    """

    KIND: ClassVar[str] = "ack"
    ack: AckKind
    identity: Identity
    node: str
    incarnation: str
    at: float
    nonce: str
    reason: str = ""
    last_step: int | None = None

    def body(self) -> dict[str, object]:
        return {
            "ack": self.ack.value,
            "identity": self.identity.to_json(),
            "node": self.node,
            "incarnation": self.incarnation,
            "at": self.at,
            "nonce": self.nonce,
            "reason": self.reason,
            "last_step": self.last_step,
        }

    @classmethod
    def read(cls, fields: Fields) -> AckRecord:
        return cls(
            fields.choice("ack", AckKind),
            Identity.read(fields.within("identity")),
            fields.text("node", most=128),
            fields.hexes("incarnation", WORLD_DIGITS),
            read_at(fields),
            read_nonce(fields),
            fields.text("reason", empty=True),
            fields.maybe("last_step", lambda name: fields.integer(name, low=-1)),
        )


@dataclass(frozen=True, slots=True)
class PresenceRecord:
    """An agent that is there, under its lease. `world`, `digest`, `epoch`: of its engine, None where there is none."""

    KIND: ClassVar[str] = "presence"
    node: str
    incarnation: str
    world: str | None = None
    ranks: tuple[int, ...] = ()
    digest: str | None = None
    epoch: int | None = None

    def body(self) -> dict[str, object]:
        return {
            "node": self.node,
            "incarnation": self.incarnation,
            "world": self.world,
            "ranks": list(self.ranks),
            "digest": self.digest,
            "epoch": self.epoch,
        }

    @classmethod
    def read(cls, fields: Fields) -> PresenceRecord:
        return cls(
            fields.text("node", most=128),
            fields.hexes("incarnation", WORLD_DIGITS),
            fields.maybe("world", lambda name: fields.hexes(name, WORLD_DIGITS)),
            fields.integers("ranks", most=1 << 16),
            fields.maybe("digest", lambda name: fields.hexes(name, DIGEST_DIGITS)),
            fields.maybe("epoch", fields.integer),
        )


@dataclass(frozen=True, slots=True)
class MovesRecord:
    """What one wave moved, for limits that hold across leaders: bundles and bytes that each node received."""

    KIND: ClassVar[str] = "moves"
    migration: str
    wave: int
    at: float
    moves: Mapping[str, int]
    bytes: Mapping[str, int]

    def body(self) -> dict[str, object]:
        return {
            "migration": self.migration,
            "wave": self.wave,
            "at": self.at,
            "moves": dict(self.moves),
            "bytes": dict(self.bytes),
        }

    @classmethod
    def read(cls, fields: Fields) -> MovesRecord:
        return cls(
            fields.text("migration", most=128),
            fields.integer("wave", low=1),
            read_at(fields),
            fields.counts("moves"),
            fields.counts("bytes"),
        )
