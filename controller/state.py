"""A group as its records in the store say, typed. Read from a mirror: a consistent picture at one revision, a little behind.

Whoever decides by it writes with the mod-revisions found here as compares, so acting on an old picture changes nothing.
Any method raises RecordError where the store holds what can not be read: then nothing is done with the group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from controller.limits import Spending, Spent, spent
from controller.settings import GroupSettings
from eplane.errors import NameRefused, NotFound, RecordError, SettingsError
from eplane.keys import GroupKeys
from eplane.migration import Migration
from eplane.parts import decode_placement
from eplane.placement import Placement
from eplane.plan import Plan
from eplane.records import (
    AckRecord,
    ActiveRecord,
    EpochPointer,
    HistoryRecord,
    LeaderRecord,
    Mode,
    ModeRecord,
    MovesRecord,
    PauseRecord,
    PresenceRecord,
    Record,
    SettingsRecord,
    WorldRecord,
    decode,
    rebuild_placement,
)
from eplane.store.base import KeyValue, ModRevision
from eplane.store.mirror import Mirror
from eplane.work import MigrationRecord, WaveRecord, assemble, decode_plan, seen_acks

log = logging.getLogger(__name__)
Some = TypeVar("Some")
SomeRecord = TypeVar("SomeRecord", bound=Record)


@dataclass(frozen=True, slots=True)
class Journey:
    """A migration with everything that belongs to it. `stored`: as the records say, before the acks are looked at."""

    record: MigrationRecord
    plan: Plan
    waves: Mapping[int, WaveRecord]
    stored: Migration
    acks: tuple[AckRecord, ...]


class GroupState:
    """Typed reads of one group. Decoded values are kept by mod-revision, so asking again is cheap."""

    def __init__(self, mirror: Mirror, keys: GroupKeys, default_mode: Mode = Mode.PROPOSE) -> None:
        self.mirror = mirror
        self.keys = keys
        self._default_mode = default_mode
        self._complained: dict[str, int] = {}
        self._decoded: dict[str, tuple[int, object]] = {}
        self._placements: dict[int, tuple[int, Placement]] = {}

    # --- compares ---

    def unchanged(self, key: str) -> ModRevision:
        """Holds while `key` is as it was read here; for a missing key, while it is missing."""
        found = self.mirror.get(key)
        return ModRevision(key, found.mod_revision if found else 0)

    # --- what people set ---

    def mode(self) -> Mode:
        record = self._one(self.keys.mode, ModeRecord)
        return record.mode if record else self._default_mode

    def pause(self) -> PauseRecord | None:
        return self._one(self.keys.pause, PauseRecord)

    def settings(self) -> GroupSettings:
        record = self._one(self.keys.settings, SettingsRecord)
        if record is None:
            return GroupSettings()
        try:
            return GroupSettings().patched(record.values)
        except SettingsError as error:
            raise RecordError("settings", str(error)) from error

    # --- what is ---

    def leader(self) -> tuple[LeaderRecord, int] | None:
        """The leader and the create-revision of its key."""
        found = self.mirror.get(self.keys.leader)
        return (decode(LeaderRecord, found.value), found.create_revision) if found else None

    def world(self) -> WorldRecord | None:
        return self._one(self.keys.world, WorldRecord)

    def epoch(self) -> EpochPointer | None:
        return self._one(self.keys.epoch, EpochPointer)

    def agents(self) -> tuple[PresenceRecord, ...]:
        return self._readable(self.keys.agents, PresenceRecord)

    def absent(self) -> tuple[str, ...]:
        """Nodes of the adopted world without an agent that sees that world."""
        world = self.world()
        if world is None:
            return ()
        there = {a.node for a in self.agents() if a.world == world.world.world}
        return tuple(node for node in world.world.nodes if node not in there)

    def histories(self) -> dict[int, HistoryRecord]:
        return {h.epoch: h for h in self._all(self.keys.histories, HistoryRecord)}

    def spent(self, now: float) -> Spent:
        log = [Spending(m.at, sum(m.moves.values()), sum(m.bytes.values())) for m in self.moves()]
        ends = [m.ended_at for m in self.migrations() if m.ended_at is not None]
        return spent(log, max(ends, default=None), now)

    def moves(self) -> tuple[MovesRecord, ...]:
        return self._all(self.keys.moves_log, MovesRecord)

    # --- placements ---

    def placement(self, epoch: int | None = None) -> Placement:
        """The placement of `epoch` (default: the live one). NotFound where it is not, or no longer, known."""
        pointer = self.epoch()
        if pointer is None:
            raise NotFound("no placement was adopted yet")
        wanted = pointer.epoch if epoch is None else epoch
        histories = self.histories()
        record = histories.get(wanted)
        if record is None:
            raise NotFound(f"epoch {wanted} is not known; the newest is {pointer.epoch}")
        kept = self._placements.get(wanted)
        if kept is not None and kept[1].digest == record.digest:
            return kept[1]
        full = max((e for e, h in histories.items() if e <= wanted and h.full), default=None)
        if full is None:
            raise NotFound(f"the placement of epoch {wanted} is no longer kept")
        found = rebuild_placement(self._whole(histories[full].digest), histories, full, wanted)
        if len(self._placements) > 64:
            self._placements.clear()
        self._placements[wanted] = (pointer.epoch, found)
        return found

    def placement_named(self, digest: str) -> Placement | None:
        """A placement of this digest, if any epoch that is still kept had it."""
        for epoch, record in sorted(self.histories().items(), reverse=True):
            if record.digest == digest:
                return self.placement(epoch)
        return None

    def _whole(self, digest: str) -> Placement:
        parts = [kv.value for kv in self.mirror.items(self.keys.placement(digest))]
        return decode_placement(parts, digest)

    # --- plans and migrations ---

    def plan(self, plan_id: str) -> Plan:
        key = self._named(self.keys.plan, "plan", plan_id)
        found = self.mirror.get(key)
        if found is None:
            raise NotFound(f"no plan {plan_id} is known")
        return self._cached(found, lambda kv: decode_plan(kv.value, self._parts(plan_id)))

    def plans(self) -> tuple[Plan, ...]:
        """Oldest first."""
        ids = [kv.key.removeprefix(self.keys.plans) for kv in self.mirror.items(self.keys.plans)]
        return tuple(sorted((self.plan(i) for i in ids), key=lambda p: (p.created_at, p.id)))

    def _parts(self, plan_id: str) -> list[bytes]:
        return [kv.value for kv in self.mirror.items(self.keys.plan_parts(plan_id))]

    def active(self) -> ActiveRecord | None:
        return self._one(self.keys.active, ActiveRecord)

    def migrations(self) -> tuple[MigrationRecord, ...]:
        """Oldest first."""
        found = [
            self._read(kv, MigrationRecord) for kv in self.mirror.items(self.keys.migrations) if "/waves/" not in kv.key
        ]
        return tuple(sorted(found, key=lambda m: (m.created_at, m.id)))

    def journey(self, migration: str) -> Journey:
        """A migration with its plan, its opened waves and their acks. NotFound where there is none."""
        key = self._named(self.keys.migration, "migration", migration)
        found = self.mirror.get(key)
        if found is None:
            raise NotFound(f"no migration {migration} is known")
        record = self._read(found, MigrationRecord)
        plan = self.plan(record.plan)
        waves = {w.wave.number: w for w in self._all(self.keys.waves(migration), WaveRecord)}
        acks = self._readable(self.keys.acks(migration), AckRecord)
        stored = assemble(record, plan, waves)
        mine = {(s.wave, s.kind, s.node) for s in seen_acks(stored, acks)}
        kept = tuple(a for a in acks if (a.identity.wave, a.ack, a.node) in mine)
        return Journey(record, plan, waves, stored, kept)

    # --- reading ---

    def _named(self, make: Callable[[str], str], what: str, name: str) -> str:
        try:
            return make(name)
        except NameRefused as error:
            raise NotFound(f"no {what} {name!r:.80} is known") from error

    def _one(self, key: str, kind: type[SomeRecord]) -> SomeRecord | None:
        found = self.mirror.get(key)
        return None if found is None else self._read(found, kind)

    def _all(self, prefix: str, kind: type[SomeRecord]) -> tuple[SomeRecord, ...]:
        return tuple(self._read(kv, kind) for kv in self.mirror.items(prefix))

    def _readable(self, prefix: str, kind: type[SomeRecord]) -> tuple[SomeRecord, ...]:
        """Records that agents write: one that can not be read is as good as none, and must not stop the group."""
        result: list[SomeRecord] = []
        for kv in self.mirror.items(prefix):
            try:
                result.append(self._read(kv, kind))
            except RecordError as error:
                if self._complained.get(kv.key) != kv.mod_revision:
                    self._complained[kv.key] = kv.mod_revision
                    log.error("%s is not looked at: %s", kv.key, error)
        return tuple(result)

    def _read(self, kv: KeyValue, kind: type[SomeRecord]) -> SomeRecord:
        return self._cached(kv, lambda found: decode(kind, found.value))

    def _cached(self, kv: KeyValue, read: Callable[[KeyValue], Some]) -> Some:
        kept = self._decoded.get(kv.key)
        if kept is not None and kept[0] == kv.mod_revision:
            return kept[1]  # type: ignore[return-value]
        value = read(kv)
        if len(self._decoded) > 20_000:
            self._decoded.clear()
        self._decoded[kv.key] = (kv.mod_revision, value)
        return value
