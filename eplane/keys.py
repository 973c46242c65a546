"""Where everything lies in the store. One group of keys an EP group, all under `/eplane/v1/groups/{group}/`.

    leader            who leads; under the leader's lease         mode, pause, settings    what people have set
    world             the life of the group's processes           epoch                    pointer to the live placement
    placements/{digest}/{part:04d}                                history/{epoch:010d}     how each epoch came to be
    plans/{id}, plan-parts/{id}/{part:04d}                        active                   the migration past PLANNED
    migrations/{id}, migrations/{id}/waves/{wave:04d}             agents/{node}            presence, under its lease
    acks/{migration}/{wave:04d}/{VERIFIED|SWITCHED|CLEAN|FAILED}/{node}
    moves-log/{migration}/{wave:04d}                              what was moved, for the limits

Names become parts of keys, so they are checked here and nowhere else: letters, digits, and . _ - inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from eplane.errors import NameRefused

ROOT = "/eplane/v1/groups/"
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?", re.ASCII)
_NUMBERED = re.compile(r"[0-9]{4}", re.ASCII)
_EPOCH = re.compile(r"[0-9]{10}", re.ASCII)


class AckKind(Enum):
    """What a node says of a wave. One record a node and kind; written only after the engine confirmed it."""

    VERIFIED = "VERIFIED"
    SWITCHED = "SWITCHED"
    CLEAN = "CLEAN"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class AckKey:
    """A key under `acks/`, taken apart."""

    migration: str
    wave: int
    kind: AckKind
    node: str


def check_name(field: str, name: str) -> str:
    """`name`, if it can be a part of a key; raises NameRefused otherwise."""
    if _NAME.fullmatch(name) is None:
        raise NameRefused(field, f"{name!r:.80} is no name: 1 to 128 letters, digits, and . _ - inside")
    return name


@dataclass(frozen=True, slots=True)
class GroupKeys:
    """The keys of one group."""

    group: str

    def __post_init__(self) -> None:
        check_name("group", self.group)

    @property
    def prefix(self) -> str:
        return f"{ROOT}{self.group}/"

    @property
    def leader(self) -> str:
        return f"{self.prefix}leader"

    @property
    def mode(self) -> str:
        return f"{self.prefix}mode"

    @property
    def pause(self) -> str:
        return f"{self.prefix}pause"

    @property
    def settings(self) -> str:
        return f"{self.prefix}settings"

    @property
    def world(self) -> str:
        return f"{self.prefix}world"

    @property
    def epoch(self) -> str:
        return f"{self.prefix}epoch"

    @property
    def active(self) -> str:
        return f"{self.prefix}active"

    @property
    def placements(self) -> str:
        return f"{self.prefix}placements/"

    def placement(self, digest: str) -> str:
        """Prefix of the parts of one placement."""
        return f"{self.placements}{check_name('digest', digest)}/"

    def placement_part(self, digest: str, part: int) -> str:
        return f"{self.placement(digest)}{_number('part', part, 4)}"

    @property
    def histories(self) -> str:
        return f"{self.prefix}history/"

    def history(self, epoch: int) -> str:
        return f"{self.histories}{_number('epoch', epoch, 10)}"

    @property
    def plans(self) -> str:
        return f"{self.prefix}plans/"

    def plan(self, plan: str) -> str:
        return f"{self.plans}{check_name('plan', plan)}"

    def plan_parts(self, plan: str) -> str:
        return f"{self.prefix}plan-parts/{check_name('plan', plan)}/"

    def plan_part(self, plan: str, part: int) -> str:
        return f"{self.plan_parts(plan)}{_number('part', part, 4)}"

    @property
    def migrations(self) -> str:
        return f"{self.prefix}migrations/"

    def migration(self, migration: str) -> str:
        return f"{self.migrations}{check_name('migration', migration)}"

    def waves(self, migration: str) -> str:
        return f"{self.migration(migration)}/waves/"

    def wave(self, migration: str, wave: int) -> str:
        return f"{self.waves(migration)}{_number('wave', wave, 4)}"

    @property
    def all_acks(self) -> str:
        return f"{self.prefix}acks/"

    def acks(self, migration: str) -> str:
        return f"{self.all_acks}{check_name('migration', migration)}/"

    def wave_acks(self, migration: str, wave: int) -> str:
        return f"{self.acks(migration)}{_number('wave', wave, 4)}/"

    def ack(self, migration: str, wave: int, kind: AckKind, node: str) -> str:
        return f"{self.wave_acks(migration, wave)}{kind.value}/{check_name('node', node)}"

    @property
    def agents(self) -> str:
        return f"{self.prefix}agents/"

    def agent(self, node: str) -> str:
        return f"{self.agents}{check_name('node', node)}"

    @property
    def moves_log(self) -> str:
        return f"{self.prefix}moves-log/"

    def moves(self, migration: str, wave: int) -> str:
        return f"{self.moves_log}{check_name('migration', migration)}/{_number('wave', wave, 4)}"

    def read_ack(self, key: str) -> AckKey:
        """The parts of a key that `ack` made; raises NameRefused for any other key."""
        parts = key.removeprefix(self.all_acks).split("/") if key.startswith(self.all_acks) else []
        kinds = {kind.value: kind for kind in AckKind}
        if len(parts) != 4 or _NUMBERED.fullmatch(parts[1]) is None or parts[2] not in kinds:
            raise NameRefused("key", f"{key!r:.200} is not the key of an ack of group {self.group}")
        migration, wave, kind, node = parts
        return AckKey(check_name("migration", migration), int(wave), kinds[kind], check_name("node", node))

    def read_wave(self, key: str) -> tuple[str, int]:
        """Migration and wave number of a key that `wave` made; raises NameRefused for any other key."""
        parts = key.removeprefix(self.migrations).split("/") if key.startswith(self.migrations) else []
        if len(parts) != 3 or parts[1] != "waves" or _NUMBERED.fullmatch(parts[2]) is None:
            raise NameRefused("key", f"{key!r:.200} is not the key of a wave of group {self.group}")
        return check_name("migration", parts[0]), int(parts[2])

    def read_history(self, key: str) -> int:
        """The epoch of a key that `history` made; raises NameRefused for any other key."""
        tail = key.removeprefix(self.histories) if key.startswith(self.histories) else ""
        if _EPOCH.fullmatch(tail) is None:
            raise NameRefused("key", f"{key!r:.200} is not the key of a history record of group {self.group}")
        return int(tail)


def group_of(key: str) -> str:
    """The group that a key belongs to; raises NameRefused if it lies elsewhere."""
    if not key.startswith(ROOT):
        raise NameRefused("key", f"{key!r:.200} is not a key of EPlane")
    return check_name("group", key.removeprefix(ROOT).split("/", 1)[0])


def _number(field: str, value: int, digits: int) -> str:
    if not 0 <= value < 10**digits:
        raise NameRefused(field, f"{value} has no place in a key of {digits} digits")
    return f"{value:0{digits}d}"
