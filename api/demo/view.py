"""The live view in the terminal: load of each rank in each layer, balance over time, the migration in progress."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from api.demo.chaos import Kill
from api.demo.ledger import Timed
from api.demo.script import Phase
from api.demo.watch import Seen

_BARS = " ▁▂▃▄▅▆▇█"
_WIDTH = 60


@dataclass(frozen=True, slots=True)
class Frame:
    """All that one picture of the view shows."""

    seconds: float
    total_s: float
    phase: Phase
    seen: Seen
    timed: Sequence[Timed]
    answered: int
    failed: int
    tokens: int
    kills: Sequence[Kill]


def render(frame: Frame) -> RenderableType:
    return Panel(
        Group(_head(frame), Text(), _ranks(frame), Text(), _balance(frame), _moving(frame), _verdict(frame)),
        title="EPlane demo: tokens a rank gets, not time (all ranks share this machine's cores)",
    )


def _head(frame: Frame) -> Text:
    status = frame.seen.status
    epoch = status.get("epoch", "-")
    return Text(
        f"{frame.seconds:5.0f} of {frame.total_s:.0f} s   traffic: {frame.phase.domain}   epoch {epoch}   "
        f"requests {frame.answered} ok, {frame.failed} failed   tokens {frame.tokens}",
        style="bold",
    )


def _ranks(frame: Frame) -> RenderableType:
    if not frame.timed:
        return Text("no load window yet")
    load = frame.timed[-1].window.rank_load
    table = Table(
        box=None, padding=(0, 2), title="load of each rank in the last window, 1.00 = the mean", title_justify="left"
    )
    table.add_column("layer")
    for rank in range(load.shape[1]):
        table.add_column(f"rank {rank}")
    mean = np.maximum(load.mean(axis=1, keepdims=True), 1e-9)
    for layer, row in enumerate(load / mean):
        table.add_row(str(layer), *(_bar(float(value)) for value in row))
    return table


def _bar(relative: float) -> Text:
    style = "red" if relative > 1.25 else "yellow" if relative > 1.1 else "green"
    return Text(f"{'█' * min(12, round(relative * 6)):<12} {relative:4.2f}", style=style)


def _balance(frame: Frame) -> Text:
    values = [t.window.balancedness for t in frame.timed][-_WIDTH:]
    if not values:
        return Text("balancedness -")
    line = "".join(_BARS[max(0, min(8, round((value - 0.4) / 0.6 * 8)))] for value in values)
    return Text(f"balancedness {values[-1]:.3f}   0.4 |{line}| 1.0", style="cyan")


def _moving(frame: Frame) -> Text:
    active = frame.seen.active()
    done = sum(m["state"] == "DONE" for m in frame.seen.migrations.values())
    kills = f"   killed so far: {len(frame.kills)}" if frame.kills else ""
    if active is None:
        return Text(f"no migration in progress, {done} done{kills}")
    waves = active.get("waves", [])
    states = " ".join(str(wave.get("state", "?")) for wave in waves) if isinstance(waves, list) else str(waves)
    return Text(f"migration {active['id']}: {active['state']}, waves: {states}{kills}", style="magenta")


def _verdict(frame: Frame) -> Text:
    verdict = frame.seen.status.get("verdict") or {}
    return Text(f"EPlane says: {verdict.get('sentence', '-')}", style="dim")


def line(frame: Frame) -> str:
    """The same in one line, for a terminal that cannot be redrawn or a log."""
    level = f"{frame.timed[-1].window.balancedness:.3f}" if frame.timed else "-"
    active = frame.seen.active()
    moving = f", migration {active['id']} {active['state']}" if active else ""
    return (
        f"{frame.seconds:5.0f} s  {frame.phase.domain:<8} balancedness {level}  epoch {frame.seen.status.get('epoch', '-')}  "
        f"requests {frame.answered} ok {frame.failed} failed  tokens {frame.tokens}{moving}"
    )
