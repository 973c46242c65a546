"""Everything that lies in the store, as versioned JSON: one small frozen dataclass a record, read strictly.

A value is `{"v": 1, "record": <kind>, ...}` and at most 256 KiB. What does not fit (tables, long plans) goes into parts that
are written before the record that names them; see `eplane.parts`. Times (`at`) are seconds since 1970 and are shown, not
decided by. Each record that several writers could write carries a `nonce`, by which a writer knows its own write again.
Where `migration` stands in an optional field, None means that no migration did it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import ClassVar, Protocol, Self, TypeVar

import numpy as np

from eplane.errors import InvariantBroken, PlacementError, PlanError, RecordError, TopologyError
from eplane.fields import Fields, pack
from eplane.keys import AckKind
from eplane.placement import EMPTY, Change, Placement
from eplane.plan import DIGEST_DIGITS, WORLD_DIGITS, Identity
from eplane.store.base import MAX_VALUE_BYTES
from eplane.topology import Capabilities, ModelShape, World

NONCE_DIGITS = 16
VERSION = 1
# A full placement at least every so many epochs, so that a rebuild reads a bounded number of deltas.
FULL_EVERY = 32


class Record(Protocol):
    """What `encode` and `decode` need of a record."""

    KIND: ClassVar[str]

    def body(self) -> dict[str, object]: ...

    @classmethod
    def read(cls, fields: Fields) -> Self: ...


SomeRecord = TypeVar("SomeRecord", bound=Record)


def new_nonce() -> str:
    return secrets.token_hex(NONCE_DIGITS // 2)


def encode(record: Record) -> bytes:
    """The stored form. Raises RecordError if it would be over 256 KiB or holds what JSON has no word for."""
    return to_bytes(record.KIND, record.body())


def decode(kind: type[SomeRecord], raw: bytes) -> SomeRecord:
    """The record in `raw`. Raises RecordError, naming the field, for anything but a whole record of this kind."""
    fields = open_record(kind.KIND, raw)
    try:
        result = kind.read(fields)
    except (TopologyError, PlacementError, PlanError, InvariantBroken) as error:
        raise RecordError(kind.KIND, f"contradicts itself: {error}") from error
    fields.done()
    return result


def to_bytes(kind: str, body: Mapping[str, object]) -> bytes:
    try:
        text = json.dumps({**body, "v": VERSION, "record": kind}, separators=(",", ":"), allow_nan=False)
        raw = text.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise RecordError(kind, f"can not be written as JSON: {error}") from None
    if len(raw) > MAX_VALUE_BYTES:
        raise RecordError(kind, f"would be {len(raw)} bytes, {MAX_VALUE_BYTES} are allowed")
    return raw


def open_record(kind: str, raw: bytes) -> Fields:
    """The fields of a stored value, version and kind checked."""
    if len(raw) > MAX_VALUE_BYTES:
        raise RecordError(kind, f"is {len(raw)} bytes, {MAX_VALUE_BYTES} are allowed")
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_twins)
    except RecordError as error:
        raise RecordError(f"{kind}.{error.field}", error.reason) from None
    except (ValueError, RecursionError) as error:
        raise RecordError(kind, f"is not JSON: {error}") from None
    fields = Fields(data, kind)
    fields.version(VERSION)
    found = fields.text("record", most=40)
    if found != kind:
        raise fields.wrong("record", f"is {found!r}")
    return fields


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
        return {"mode": self.mode.value, **_signed(self.actor, self.reason, self.at, self.nonce)}

    @classmethod
    def read(cls, fields: Fields) -> ModeRecord:
        return cls(fields.choice("mode", Mode), *_read_signed(fields))


@dataclass(frozen=True, slots=True)
class PauseRecord:
    """While it exists, nothing is cut over."""

    KIND: ClassVar[str] = "pause"
    actor: str
    reason: str
    at: float
    nonce: str

    def body(self) -> dict[str, object]:
        return _signed(self.actor, self.reason, self.at, self.nonce)

    @classmethod
    def read(cls, fields: Fields) -> PauseRecord:
        return cls(*_read_signed(fields))


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
        return {"values": dict(self.values), **_signed(self.actor, self.reason, self.at, self.nonce)}

    @classmethod
    def read(cls, fields: Fields) -> SettingsRecord:
        values = fields.value("values")
        if not isinstance(values, dict):
            raise fields.wrong("values", f"must be an object, got {type(values).__name__}")
        return cls(MappingProxyType(values), *_read_signed(fields))


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
            Capabilities(
                *(caps.flag(n) for n in ("weighted_shares", "free_slot_order", "live_apply", "phases_known")),
            ),
        )
        shape.done()
        caps.done()
        return cls(world, fields.text("manifest_digest", most=128), _at(fields), _nonce(fields))


@dataclass(frozen=True, slots=True)
class EpochPointer:
    """The truth: which placement is live. Its mod-revision is that of the history record written with it.

    `full_epoch`: the newest epoch whose whole placement is stored; the deltas after it lead to this one.
    """

    KIND: ClassVar[str] = "epoch"
    epoch: int
    digest: str
    world: str
    full_epoch: int
    nonce: str

    def body(self) -> dict[str, object]:
        return {
            "epoch": self.epoch,
            "digest": self.digest,
            "world": self.world,
            "full_epoch": self.full_epoch,
            "nonce": self.nonce,
        }

    @classmethod
    def read(cls, fields: Fields) -> EpochPointer:
        epoch = fields.integer("epoch", low=1)
        return cls(
            epoch,
            fields.hexes("digest", DIGEST_DIGITS),
            fields.hexes("world", WORLD_DIGITS),
            fields.integer("full_epoch", low=1, high=epoch),
            _nonce(fields),
        )

    def needs_full(self) -> bool:
        """Whether the epoch after this one must be stored whole."""
        return self.epoch + 1 - self.full_epoch >= FULL_EVERY


class HistoryKind(Enum):
    WAVE = "wave"
    ADOPTION = "adoption"


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """How epoch `epoch` came to be: by one wave, or by adopting what a world serves.

    `changes`: the delta from the epoch before, None for an adoption. `full`: the whole placement is stored under its
    digest; always so for an adoption. Gains in seconds over the horizon; measured ones are filled in later.
    """

    KIND: ClassVar[str] = "history"
    epoch: int
    made_by: HistoryKind
    world: str
    digest: str
    base_digest: str | None
    changes: tuple[Change, ...] | None
    full: bool
    actor: str
    reason: str
    at: float
    nonce: str
    plan: str | None = None
    migration: str | None = None
    wave: int | None = None
    moves: int = 0
    bytes: int = 0
    predicted_gain_s: float | None = None
    measured_gain_s: float | None = None

    def __post_init__(self) -> None:
        if self.made_by is HistoryKind.WAVE:
            named = None not in (self.base_digest, self.plan, self.migration, self.wave)
            if not named or not self.changes:
                raise RecordError(
                    "history.changes", "an epoch made by a wave names plan, migration, wave, base and delta"
                )
        elif not self.full or self.changes is not None:
            raise RecordError("history.full", "an adopted epoch is stored whole, without a delta")

    def body(self) -> dict[str, object]:
        return {
            "epoch": self.epoch,
            "made_by": self.made_by.value,
            "world": self.world,
            "digest": self.digest,
            "base_digest": self.base_digest,
            "changes": None if self.changes is None else pack_changes(self.changes),
            "full": self.full,
            **_signed(self.actor, self.reason, self.at, self.nonce),
            "plan": self.plan,
            "migration": self.migration,
            "wave": self.wave,
            "moves": self.moves,
            "bytes": self.bytes,
            "predicted_gain_s": self.predicted_gain_s,
            "measured_gain_s": self.measured_gain_s,
        }

    @classmethod
    def read(cls, fields: Fields) -> HistoryRecord:
        return cls(
            fields.integer("epoch", low=1),
            fields.choice("made_by", HistoryKind),
            fields.hexes("world", WORLD_DIGITS),
            fields.hexes("digest", DIGEST_DIGITS),
            fields.maybe("base_digest", lambda name: fields.hexes(name, DIGEST_DIGITS)),
            fields.maybe("changes", lambda name: read_changes(fields, name)),
            fields.flag("full"),
            *_read_signed(fields),
            fields.maybe("plan", lambda name: fields.text(name, most=128)),
            fields.maybe("migration", lambda name: fields.text(name, most=128)),
            fields.maybe("wave", lambda name: fields.integer(name, low=1)),
            fields.integer("moves"),
            fields.integer("bytes"),
            fields.maybe("predicted_gain_s", fields.number),
            fields.maybe("measured_gain_s", fields.number),
        )


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
        return cls(fields.text("migration", most=128), _nonce(fields))


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
            _at(fields),
            _nonce(fields),
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
            _at(fields),
            fields.counts("moves"),
            fields.counts("bytes"),
        )


def rebuild_placement(full: Placement, history: Mapping[int, HistoryRecord], full_epoch: int, epoch: int) -> Placement:
    """The placement of `epoch`: `full`, of `full_epoch`, with the deltas of `history` (by epoch) after it applied.

    Raises RecordError where an epoch is missing or its digests do not form a chain.
    """
    at = full
    for number in range(full_epoch + 1, epoch + 1):
        record = history.get(number)
        if record is None or record.epoch != number:
            raise RecordError(f"history.{number}", "is missing")
        if record.changes is None or record.base_digest != at.digest:
            raise RecordError(
                f"history.{number}.base_digest", f"is {record.base_digest}, the epoch before is {at.digest}"
            )
        try:
            at = at.apply(record.changes)
        except PlacementError as error:
            raise RecordError(f"history.{number}.changes", str(error)) from error
        if at.digest != record.digest:
            raise RecordError(f"history.{number}.digest", f"is {record.digest}, the delta leads to {at.digest}")
    return at


def pack_changes(changes: tuple[Change, ...]) -> dict[str, object]:
    return pack(np.array([(c.layer, c.slot, c.expert) for c in changes], dtype=np.int32).reshape(-1, 3))


def read_changes(fields: Fields, name: str) -> tuple[Change, ...]:
    table = fields.packed(name, (-1, 3))
    if table.size and (int(table[:, :2].min()) < 0 or int(table[:, 2].min()) < EMPTY):
        raise fields.wrong(name, "names a negative layer, slot or expert")
    return tuple(Change(*row) for row in table.tolist())


def _signed(actor: str, reason: str, at: float, nonce: str) -> dict[str, object]:
    return {"actor": actor, "reason": reason, "at": at, "nonce": nonce}


def _read_signed(fields: Fields) -> tuple[str, str, float, str]:
    return fields.text("actor"), fields.text("reason", empty=True), _at(fields), _nonce(fields)


def _at(fields: Fields) -> float:
    return fields.number("at", low=0)


def _nonce(fields: Fields) -> str:
    return fields.hexes("nonce", NONCE_DIGITS)


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twin = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise RecordError(twin[:60], "stands there twice")
    return result
