"""The chain of epochs: the pointer to the live one, and how each came to be. Epochs grow by one; nothing is left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import numpy as np

from eplane.envelope import read_nonce, read_signed, signed
from eplane.errors import PlacementError, RecordError
from eplane.fields import Fields, pack
from eplane.placement import EMPTY, Change, Placement
from eplane.plan import DIGEST_DIGITS, WORLD_DIGITS

# A full placement at least every so many epochs, so that a rebuild reads a bounded number of deltas.
FULL_EVERY = 32


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
            read_nonce(fields),
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
            **signed(self.actor, self.reason, self.at, self.nonce),
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
            *read_signed(fields),
            fields.maybe("plan", lambda name: fields.text(name, most=128)),
            fields.maybe("migration", lambda name: fields.text(name, most=128)),
            fields.maybe("wave", lambda name: fields.integer(name, low=1)),
            fields.integer("moves"),
            fields.integer("bytes"),
            fields.maybe("predicted_gain_s", fields.number),
            fields.maybe("measured_gain_s", fields.number),
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
