"""Stored work: the records of plans, migrations and waves, and how a migration is put together from them.

A plan is one value, or a value and parts where its waves are too large for one. A migration's record says where it
stands as a whole; each opened wave has a record of its own, which carries all that agents need to act on it. The wave's
record is the key that cutover and abort compare, so that one of the two wins.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from eplane.errors import RecordError
from eplane.fields import Fields, pack
from eplane.migration import FINAL, Migration, MigrationState, SeenAck, Wave, WaveState, check_wave, planned
from eplane.placement import FloatTable
from eplane.plan import WORLD_DIGITS, Identity, LeaderEpoch, Load, Plan, WavePlan
from eplane.records import NONCE_DIGITS, AckRecord, open_record, to_bytes
from eplane.store.base import MAX_VALUE_BYTES

PART_BYTES = 192 * 1024
MAX_PARTS = 512
# Shares are stored in units of 2**-30: off by at most 2**-31 each, far inside what `check_shares` allows.
_SHARE_UNIT = 2**30


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan as values: `parts` (often none) are written first, then `main`, which names their digest."""

    main: bytes
    parts: tuple[bytes, ...]


def encode_plan(plan: Plan, nonce: str) -> StoredPlan:
    """Raises RecordError if the plan is too large even for parts."""
    body = {**plan.to_json(), "nonce": nonce}
    waves = json.dumps(body["waves"], separators=(",", ":"), allow_nan=False).encode()
    if len(waves) <= PART_BYTES:
        return StoredPlan(to_bytes("plan", {**body, "parts": None}), ())
    chunks = tuple(waves[at : at + PART_BYTES] for at in range(0, len(waves), PART_BYTES))
    if len(chunks) > MAX_PARTS:
        raise RecordError("plan.waves", f"would take {len(chunks)} parts, {MAX_PARTS} are allowed")
    named = {"count": len(chunks), "digest": _digest(waves)}
    return StoredPlan(to_bytes("plan", {**body, "waves": [], "parts": named}), chunks)


def decode_plan(main: bytes, parts: Sequence[bytes] = ()) -> Plan:
    """The plan of a value and its parts in order. Raises RecordError, also when parts are missing or altered."""
    fields = open_record("plan", main)
    fields.hexes("nonce", NONCE_DIGITS)
    named = fields.maybe("parts", fields.within)
    if named is None:
        return Plan.read(fields)
    count, digest = named.integer("count", low=1, high=MAX_PARTS), named.hexes("digest", 32)
    named.done()
    whole = b"".join(parts)
    if len(parts) != count or any(len(part) > MAX_VALUE_BYTES for part in parts) or _digest(whole) != digest:
        raise named.wrong("digest", f"{len(parts)} of {count} parts are there, or they are not the ones named")
    try:
        waves = json.loads(whole)
    except ValueError as error:
        raise fields.wrong("waves", f"is not JSON: {error}") from None
    return Plan.read(fields.replaced("waves", waves))


@dataclass(frozen=True, slots=True)
class MigrationRecord:
    """Where a migration stands as a whole. `nodes`: all nodes of the world; `waves`: how many the plan has."""

    KIND: ClassVar[str] = "migration"
    id: str
    plan: str
    group: str
    world: str
    base_epoch: int
    nodes: tuple[str, ...]
    waves: int
    state: MigrationState
    reason: str
    actor: str
    created_at: float
    ended_at: float | None
    leader: LeaderEpoch
    nonce: str

    def body(self) -> dict[str, object]:
        return {
            "id": self.id,
            "plan": self.plan,
            "group": self.group,
            "world": self.world,
            "base_epoch": self.base_epoch,
            "nodes": list(self.nodes),
            "waves": self.waves,
            "state": self.state.value,
            "reason": self.reason,
            "actor": self.actor,
            "created_at": self.created_at,
            "ended_at": self.ended_at,
            "leader": self.leader.to_json(),
            "nonce": self.nonce,
        }

    @classmethod
    def read(cls, fields: Fields) -> MigrationRecord:
        return cls(
            fields.text("id", most=128),
            fields.text("plan", most=128),
            fields.text("group", most=128),
            fields.hexes("world", WORLD_DIGITS),
            fields.integer("base_epoch"),
            fields.texts("nodes"),
            fields.integer("waves", low=1, high=9999),
            fields.choice("state", MigrationState),
            fields.text("reason", empty=True),
            fields.text("actor"),
            fields.number("created_at", low=0),
            fields.maybe("ended_at", lambda name: fields.number(name, low=0)),
            LeaderEpoch.read(fields.within("leader")),
            fields.hexes("nonce", NONCE_DIGITS),
        )

    @classmethod
    def of(
        cls, migration: Migration, *, actor: str, created_at: float, now: float, leader: LeaderEpoch, nonce: str
    ) -> MigrationRecord:
        """The record of `migration` as it stands `now`."""
        ended = now if migration.state in FINAL else None
        return cls(
            migration.id,
            migration.plan,
            migration.group,
            migration.world,
            migration.base_epoch,
            migration.nodes,
            len(migration.waves),
            migration.state,
            migration.reason,
            actor,
            created_at,
            ended,
            leader,
            nonce,
        )


@dataclass(frozen=True, slots=True, eq=False)
class WaveRecord:
    """An opened wave: where it stands (`wave`), what it does (`work`), and how it is to be done.

    `shares [L, P]`: how tokens are split over replicas from the switch on, None: evenly. `bytes_per_s`: most bytes a
    rank may receive a second, None: no limit. `since`: when the present state began. `leader`: of the last writer.
    """

    KIND: ClassVar[str] = "wave"
    world: str
    migration: str
    wave: Wave
    work: WavePlan
    shares: FloatTable | None
    bytes_per_s: float | None
    since: float
    leader: LeaderEpoch
    nonce: str

    def __post_init__(self) -> None:
        mine = self.wave.number, self.wave.base_digest, self.wave.target_digest
        if mine != (self.work.number, self.work.base_digest, self.work.target_digest):
            raise RecordError("wave.work", "the work is not that of the wave")

    @property
    def identity(self) -> Identity:
        return Identity(self.world, self.migration, self.wave.number, self.wave.epoch, self.wave.target_digest)

    def loads_of(self, ranks: Iterable[int], slots: int) -> tuple[Load, ...]:
        """The bundles that `ranks` must receive, with `slots` slots (K) a rank and layer."""
        mine = frozenset(ranks)
        return tuple(load for load in self.work.loads if load.slot // slots in mine)

    def at(self, wave: Wave, *, now: float, leader: LeaderEpoch, nonce: str) -> WaveRecord:
        """The record after the wave went on to `wave`."""
        since = self.since if wave.state is self.wave.state else now
        return replace(self, wave=wave, since=since, leader=leader, nonce=nonce)

    def body(self) -> dict[str, object]:
        wave = self.wave
        return {
            "world": self.world,
            "migration": self.migration,
            "epoch": wave.epoch,
            "nodes": list(wave.nodes),
            "state": wave.state.value,
            "verified": sorted(wave.verified),
            "switched": sorted(wave.switched),
            "clean": sorted(wave.clean),
            "cut": wave.cut,
            "lost": wave.lost,
            "stalled": wave.stalled,
            "reason": wave.reason,
            "work": self.work.to_json(),
            "shares": None if self.shares is None else pack(np.rint(self.shares * _SHARE_UNIT).astype(np.int32)),
            "bytes_per_s": self.bytes_per_s,
            "since": self.since,
            "leader": self.leader.to_json(),
            "nonce": self.nonce,
        }

    @classmethod
    def read(cls, fields: Fields) -> WaveRecord:
        work = WavePlan.read(fields.within("work"))
        wave = Wave(
            work.number,
            fields.integer("epoch", low=1),
            work.base_digest,
            work.target_digest,
            fields.texts("nodes"),
            work.overlaps,
            fields.choice("state", WaveState),
            frozenset(fields.texts("verified")),
            frozenset(fields.texts("switched")),
            frozenset(fields.texts("clean")),
            fields.flag("cut"),
            fields.flag("lost"),
            fields.flag("stalled"),
            fields.text("reason", empty=True),
        )
        check_wave(wave)
        return cls(
            fields.hexes("world", WORLD_DIGITS),
            fields.text("migration", most=128),
            wave,
            work,
            fields.maybe("shares", lambda name: _shares(fields, name)),
            fields.maybe("bytes_per_s", lambda name: fields.number(name, low=1)),
            fields.number("since", low=0),
            LeaderEpoch.read(fields.within("leader")),
            fields.hexes("nonce", NONCE_DIGITS),
        )


def assemble(record: MigrationRecord, plan: Plan, waves: Mapping[int, WaveRecord]) -> Migration:
    """The migration as its records say; waves without a record have not begun. Feed it to `migration.resume`.

    Raises RecordError where the records do not belong together.
    """
    if (record.plan, record.world, record.base_epoch) != (plan.id, plan.world, plan.base_epoch):
        raise RecordError("migration.plan", f"{record.plan} in world {record.world} is not plan {plan.id}")
    fresh = planned(plan, record.id, record.nodes)
    if record.waves != len(fresh.waves):
        raise RecordError("migration.waves", f"is {record.waves}, the plan has {len(fresh.waves)}")
    merged: list[Wave] = []
    for at in fresh.waves:
        stored = waves.get(at.number)
        if stored is not None and stored.identity != fresh.identity(at.number):
            raise RecordError("wave.migration", f"wave {at.number} stored is that of {stored.identity}")
        merged.append(at if stored is None else stored.wave)
    return replace(fresh, waves=tuple(merged), state=record.state, reason=record.reason)


def seen_acks(migration: Migration, acks: Iterable[AckRecord]) -> tuple[SeenAck, ...]:
    """The acks that speak of `migration`, for `migration.resume`. Acks of another world or target are left out."""
    known = {migration.identity(wave.number): wave for wave in migration.waves}
    return tuple(
        SeenAck(ack.identity.wave, ack.ack, ack.node, ack.reason)
        for ack in acks
        if ack.identity in known and ack.node in migration.nodes
    )


def _shares(fields: Fields, name: str) -> FloatTable:
    table = fields.packed(name, (-1, -1))
    if table.size and (int(table.min()) < 0 or int(table.max()) > _SHARE_UNIT):
        raise fields.wrong(name, "a share is outside 0 to 1")
    shares = table.astype(np.float64) / _SHARE_UNIT
    shares.setflags(write=False)
    return shares


def _digest(raw: bytes) -> str:
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
