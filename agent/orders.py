"""What the store says that an agent must do: who leads, what was adopted, which waves of the active migration are open.

Read from the mirror as it stands; a record that cannot be read is an order that is not carried out, and is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from agent.links import Adoption
from agent.reporter import Leader
from eplane.errors import FieldError
from eplane.keys import AckKind, GroupKeys
from eplane.plan import Identity, LeaderEpoch
from eplane.records import ActiveRecord, EpochPointer, LeaderRecord, Record, decode
from eplane.store.base import KeyValue
from eplane.store.mirror import Mirror
from eplane.wave import WaveState
from eplane.work import WaveRecord

log = logging.getLogger("eplane.agent")
SomeRecord = TypeVar("SomeRecord", bound=Record)


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """One open wave, and what this node has acknowledged of it already."""

    record: WaveRecord
    acked: frozenset[AckKind]

    @property
    def identity(self) -> Identity:
        return self.record.identity

    @property
    def state(self) -> WaveState:
        return self.record.wave.state

    @property
    def cut(self) -> bool:
        return self.record.wave.cut


class Orders:
    """Reads the orders of one node. Decoded waves are kept by revision: they are read every pass, and written rarely."""

    def __init__(self, mirror: Mirror, keys: GroupKeys, node: str, cluster: int) -> None:
        self._mirror = mirror
        self._keys = keys
        self._node = node
        self._cluster = cluster
        self._waves: dict[tuple[str, int], WaveRecord] = {}

    def leader(self) -> Leader | None:
        found = self._mirror.get(self._keys.leader)
        record = _read(LeaderRecord, found)
        return None if record is None or found is None else Leader(record.url, found.create_revision)

    def leader_epoch(self) -> LeaderEpoch | None:
        leader = self.leader()
        return None if leader is None else LeaderEpoch(self._cluster, leader.revision)

    def adoption(self) -> Adoption | None:
        """The epoch pointer, with the leader epoch under which it is told to the ranks."""
        pointer, epoch = _read(EpochPointer, self._mirror.get(self._keys.epoch)), self.leader_epoch()
        if pointer is None or epoch is None:
            return None
        return Adoption(pointer.world, pointer.epoch, pointer.digest, epoch)

    def waves(self) -> Sequence[Order]:
        """The waves of the active migration that have a record, in order."""
        active = _read(ActiveRecord, self._mirror.get(self._keys.active))
        if active is None:
            self._waves.clear()
            return ()
        current: dict[tuple[str, int], WaveRecord] = {}
        for found in self._mirror.items(self._keys.waves(active.migration)):
            at = (found.key, found.mod_revision)
            record = self._waves.get(at) or _read(WaveRecord, found)
            if record is not None:
                current[at] = record
        self._waves = current
        return [Order(record, self._acked(record.identity)) for record in current.values()]

    def _acked(self, identity: Identity) -> frozenset[AckKind]:
        found = (
            kind
            for kind in AckKind
            if self._mirror.get(self._keys.ack(identity.migration, identity.wave, kind, self._node)) is not None
        )
        return frozenset(found)


def _read(kind: type[SomeRecord], found: KeyValue | None) -> SomeRecord | None:
    if found is None:
        return None
    try:
        return decode(kind, found.value)
    except FieldError as error:
        log.error("%s is not acted on: %s", found.key, error)
        return None
