"""What can be set: once per process (`ControllerSettings`), and per group while it runs (`GroupSettings`, in the store)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field

from controller.costs import PRESETS
from controller.solver import policies
from eplane.errors import NameRefused
from eplane.keys import check_name
from eplane.records import Mode
from eplane.settings import Settings, setting


@dataclass(frozen=True, slots=True)
class ControllerSettings(Settings):
    """One controller process. `url` is what agents and other controllers reach it by; it stands in the leader key.

    lease_ttl_s: a leader that does not renew loses the seat after this; tick_s: the driver looks at least this often;
    progress_limit_s: a driver that makes no round for this long gets no more renewals; history_kept: epochs, plans and
    migrations that are kept a group; default_mode: of a group for which nobody set one.
    """

    url: str
    groups: tuple[str, ...]
    controller_id: str = field(default_factory=lambda: secrets.token_hex(8))
    lease_ttl_s: float = setting(3.0, low=1)
    tick_s: float = setting(0.5, low=0, above=True)
    progress_limit_s: float = setting(10.0, low=0, above=True)
    housekeeping_s: float = setting(30.0, low=0, above=True)
    history_kept: int = setting(512, low=64)
    default_mode: Mode = Mode.PROPOSE

    def rules(self) -> Iterator[tuple[str, str]]:
        if not self.groups:
            yield "groups", "name at least one group"
        if len(set(self.groups)) != len(self.groups):
            yield "groups", "a group is named twice"
        for group in self.groups:
            yield from _bad_name("groups", group)
        if self.tick_s >= self.progress_limit_s:
            yield "progress_limit_s", f"must be above tick_s ({self.tick_s:g})"


@dataclass(frozen=True, slots=True)
class GroupSettings(Settings):
    """How a group is balanced; every field can be changed while it runs. Times in seconds unless the name says more."""

    policy: str = setting("eplane", help="which solver decides where experts live")
    hardware: str = setting("demo", help="cost model; demo: each rank taken as a device of its own")
    interval_s: float = setting(3.0, low=0.05, high=86400, help="between two decisions")
    window: int = setting(16, low=1, high=4096, help="newest sub-windows that make the load window")
    history: int = setting(128, low=64, high=4096, help="sub-windows that are kept")
    min_window_tokens: int = setting(256, low=0, help="tokens a layer needs in the window before anything is judged")
    horizon_s: float = setting(60.0, low=0.1, help="how long a gain counts; in that time it must exceed the cost")
    min_gain: float = setting(0.05, low=0, high=1, help="hysteresis: least part of the predicted step time to be saved")
    confirm: bool = setting(True, help="a target must also gain on traffic that came after it was found")
    cooldown_s: float = setting(5.0, low=0, help="after a migration nothing is started for so long")
    interference: float = setting(0.1, low=0, high=1, help="part of serving that travelling bundles disturb")
    bytes_per_s: float | None = setting(None, low=1, help="most bytes a rank receives a second, or null")
    moves_per_hour: int | None = setting(None, low=0, help="most bundles moved an hour, or null")
    bytes_per_hour: int | None = setting(None, low=0, help="most bytes moved an hour, or null")
    move_weight: float | None = setting(
        None, low=0, help="price of a move in units of a layer's max / mean load; null: from the hardware"
    )
    cross_node_weight: float | None = setting(
        None,
        low=0,
        help="price of one more node that each token touches, in units of a layer's max / mean load; null: from the "
        "hardware; 0: nodes do not count",
    )
    node_slack: float = setting(
        0.05, low=0, high=1, help="how much slower the predicted slowest rank may be for fewer nodes touched"
    )
    max_moves_per_wave: int = setting(256, low=1, help="bundles of one wave over all ranks")
    max_moves_per_layer: int | None = setting(None, low=0, help="bundles of one plan in one layer, or null")
    spare_min: int = setting(0, low=0, help="cells that stay free on every rank in every epoch")
    solver_budget_ms: float = setting(300.0, low=1, help="time the solver may take to search")
    solver_timeout_s: float = setting(30.0, low=0.1, help="after this the solver's process is ended")
    shares: bool = setting(True, help="re-split tokens over replicas between migrations; no bytes move")
    stall_s: float = setting(
        15.0, low=0.1, help="a wave past its cutover without progress for so long is called stalled"
    )
    stage_timeout_s: float = setting(300.0, low=0.1, help="a wave not cut over by then is aborted")
    drained: tuple[str, ...] = setting((), help="nodes that are to hold nothing")
    pinned: tuple[tuple[int, int, int], ...] = setting(
        (), help="[layer, expert, rank]: that rank must hold that expert"
    )
    min_replicas: int = setting(1, low=1, high=4096, help="least replicas of every expert")
    spread: int = setting(1, low=1, high=4096, help="replicas of an expert lie on at least so many nodes")

    def rules(self) -> Iterator[tuple[str, str]]:
        known = sorted(policies())
        if self.policy not in known:
            yield "policy", f"is {self.policy!r:.60}, must be one of {', '.join(known)}"
        if self.hardware not in PRESETS:
            yield "hardware", f"is {self.hardware!r:.60}, must be one of {', '.join(PRESETS)}"
        if self.window > self.history:
            yield "history", f"must not be less than window ({self.window})"
        if self.solver_budget_ms / 1000 >= self.solver_timeout_s:
            yield "solver_timeout_s", f"must exceed solver_budget_ms ({self.solver_budget_ms:g} ms)"
        for node in self.drained:
            yield from _bad_name("drained", node)
        for pin in self.pinned:
            if len(pin) != 3 or min(pin) < 0:
                yield "pinned", f"{list(pin)} is not [layer, expert, rank]"


def _bad_name(field_name: str, name: str) -> Iterator[tuple[str, str]]:
    try:
        check_name(field_name, name)
    except NameRefused as error:
        yield field_name, error.reason
