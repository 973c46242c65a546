"""What can be set: once per process (`ControllerSettings`), and per group while it runs (`GroupSettings`, in the store)."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from controller.costs import PRESETS
from controller.solver import policies
from eplane.errors import Invalid, RecordError, SettingsError
from eplane.keys import check_name

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """One controller process. `url` is what agents and other controllers reach it by; it stands in the leader key.

    lease_ttl_s: a leader that does not renew loses the seat after this; tick_s: the driver looks at least this often;
    progress_limit_s: a driver that makes no round for this long gets no more renewals; solver_children: 0 solves in
    this process (simulations only).
    """

    url: str
    groups: tuple[str, ...]
    controller_id: str = field(default_factory=lambda: secrets.token_hex(8))
    lease_ttl_s: float = 3.0
    tick_s: float = 0.5
    progress_limit_s: float = 10.0
    housekeeping_s: float = 30.0
    history_kept: int = 512
    snapshot_every: int = 32

    def __post_init__(self) -> None:
        if not self.groups:
            raise SettingsError("groups", "name at least one group")
        for group in self.groups:
            check_name("group", group)
        if len(set(self.groups)) != len(self.groups):
            raise SettingsError("groups", "a group is named twice")
        for name in ("lease_ttl_s", "tick_s", "progress_limit_s", "housekeeping_s"):
            if not getattr(self, name) > 0:
                raise SettingsError(name, "must be above 0")
        if self.tick_s >= self.progress_limit_s:
            raise SettingsError("progress_limit_s", f"must be above tick_s ({self.tick_s:g})")
        if self.history_kept < 2 * self.snapshot_every or self.snapshot_every < 1:
            raise SettingsError("history_kept", "must be at least twice snapshot_every, and that at least 1")


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How a group is balanced; every field can be changed while it runs. Times in seconds unless the name says more.

    policy, hardware          which solver, which cost model ("demo": each rank taken as a device of its own)
    interval_s                between two decisions
    window                    newest sub-windows that make the load window; history: how many are kept
    min_window_tokens         tokens a layer needs in the window before anything is judged
    horizon_s                 how long a gain is counted; it must exceed the cost in that time
    min_gain                  hysteresis: least part of the predicted step time that must be saved
    confirm                   a target must also gain on traffic that came after it was found
    cooldown_s                after a migration nothing is started for so long
    interference              part of serving that is lost while bundles travel, for the cost of a move
    bytes_per_s               most bytes a rank receives a second, or null; moves_per_hour, bytes_per_hour: or null
    max_moves_per_wave, spare_min (cells kept free a rank), max_moves_per_layer (of a plan, or null)
    solver_budget_ms, solver_timeout_s (the solver's process is ended after it)
    shares                    re-split tokens over replicas between migrations
    stall_s                   a wave that shows no progress for so long is called STALLED
    stage_timeout_s           a wave not verified by then is aborted
    drained (nodes), pinned ((layer, expert, rank)), min_replicas, spread: hard goals
    """

    policy: str = "eplane"
    hardware: str = "demo"
    interval_s: float = 3.0
    window: int = 8
    history: int = 128
    min_window_tokens: int = 256
    horizon_s: float = 60.0
    min_gain: float = 0.05
    confirm: bool = True
    cooldown_s: float = 5.0
    interference: float = 0.1
    bytes_per_s: float | None = None
    moves_per_hour: int | None = None
    bytes_per_hour: int | None = None
    max_moves_per_wave: int = 256
    max_moves_per_layer: int | None = None
    spare_min: int = 0
    solver_budget_ms: float = 500.0
    solver_timeout_s: float = 20.0
    shares: bool = True
    stall_s: float = 15.0
    stage_timeout_s: float = 300.0
    drained: tuple[str, ...] = ()
    pinned: tuple[tuple[int, int, int], ...] = ()
    min_replicas: int = 1
    spread: int = 1

    def __post_init__(self) -> None:
        _check_names(self)
        _check_numbers(self)
        if self.history < max(64, self.window):
            raise SettingsError("history", f"must be at least 64 and not less than window ({self.window})")

    def patched(self, patch: Mapping[str, object]) -> GroupSettings:
        """With the named fields changed. Raises Invalid that names the first field that can not be."""
        changed: dict[str, Any] = {}
        for name, value in patch.items():
            if name not in _READ:
                raise Invalid(name, f"is no setting; known are {', '.join(sorted(_READ))}")
            changed[name] = _READ[name](name, value)
        try:
            return replace(self, **changed)
        except SettingsError as error:
            raise Invalid(error.field, error.reason) from error

    def to_json(self) -> dict[str, Any]:
        return json_ready(asdict(self))

    def encode(self) -> bytes:
        return json.dumps({"v": 1, **self.to_json()}, sort_keys=True).encode()

    @classmethod
    def decode(cls, raw: bytes) -> GroupSettings:
        """Settings as stored. Fields that a newer version wrote are refused: acting on half of them would be worse."""
        try:
            data = json.loads(raw)
            if not isinstance(data, dict) or data.pop("v", None) != 1:
                raise RecordError("settings", "is not a settings record of version 1")
            return cls().patched(data)
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise RecordError("settings", f"is not JSON ({error})") from error
        except Invalid as error:
            raise RecordError("settings", str(error)) from error


def json_ready(value: Any) -> Any:
    """Tuples as lists, through dicts and lists."""
    if isinstance(value, dict):
        return {key: json_ready(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return value


def _check_names(s: GroupSettings) -> None:
    known = sorted(policies())
    if s.policy not in known:
        raise SettingsError("policy", f"is {s.policy!r}, must be one of {', '.join(known)}")
    if s.hardware not in PRESETS:
        raise SettingsError("hardware", f"is {s.hardware!r}, must be one of {', '.join(PRESETS)}")
    for node in s.drained:
        check_name("drained", node)


# Lowest and highest value of each number; None is allowed where the default is None or `| None` stands in its type.
_RANGES: dict[str, tuple[float, float]] = {
    "interval_s": (0.05, 86400),
    "window": (1, 4096),
    "history": (64, 4096),
    "min_window_tokens": (0, 2**53),
    "horizon_s": (0.1, 86400 * 30),
    "min_gain": (0, 1),
    "cooldown_s": (0, 86400),
    "interference": (0, 1),
    "bytes_per_s": (1, 1e15),
    "moves_per_hour": (0, 2**53),
    "bytes_per_hour": (0, 2**62),
    "max_moves_per_wave": (1, 10**9),
    "max_moves_per_layer": (0, 10**9),
    "spare_min": (0, 10**6),
    "solver_budget_ms": (1, 3_600_000),
    "solver_timeout_s": (0.1, 3600),
    "stall_s": (0.1, 86400),
    "stage_timeout_s": (0.1, 86400),
    "min_replicas": (1, 4096),
    "spread": (1, 4096),
}


def _check_numbers(s: GroupSettings) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(s, name)
        if value is not None and not low <= value <= high:
            raise SettingsError(name, f"is {value:g}, must be from {low:g} to {high:g}")
    if s.solver_budget_ms / 1000 >= s.solver_timeout_s:
        raise SettingsError("solver_timeout_s", f"must exceed solver_budget_ms ({s.solver_budget_ms:g} ms)")


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Invalid(name, f"must be a number, got {value!r:.40}")
    return float(value)


def _whole(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise Invalid(name, f"must be a whole number, got {value!r:.40}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise Invalid(name, f"must be true or false, got {value!r:.40}")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise Invalid(name, f"must be a text, got {value!r:.40}")
    return value


def _texts(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise Invalid(name, f"must be a list of names, got {value!r:.40}")
    return tuple(_text(name, item) for item in value)


def _pins(name: str, value: object) -> tuple[tuple[int, int, int], ...]:
    if not isinstance(value, list | tuple):
        raise Invalid(name, "must be a list of [layer, expert, rank]")
    pins: list[tuple[int, int, int]] = []
    for item in value:
        if not isinstance(item, list | tuple) or len(item) != 3:
            raise Invalid(name, "must be a list of [layer, expert, rank]")
        layer, expert, rank = (_whole(name, part) for part in item)
        if min(layer, expert, rank) < 0:
            raise Invalid(name, f"[{layer}, {expert}, {rank}] has a negative entry")
        pins.append((layer, expert, rank))
    return tuple(pins)


def _reader(declared: str) -> Any:
    kinds = {"str": _text, "float": _number, "int": _whole, "bool": _flag, "tuple[str, ...]": _texts}
    base = declared.removesuffix(" | None")
    read = kinds.get(base, _pins)
    if base == declared:
        return read
    return lambda name, value: None if value is None else read(name, value)


_READ: dict[str, Any] = {f.name: _reader(str(f.type)) for f in fields(GroupSettings)}
