"""The picture of a demo: balancedness over time, shifts of domain, migrations and kills marked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from api.demo.chaos import Kill
from api.demo.ledger import PhaseBalance, Timed, balancedness
from eplane.placement import Placement

_COLOURS = ("#e8eef7", "#f7efe8", "#eaf5ec", "#f3eaf5")


def draw(
    path: Path,
    timed: Sequence[Timed],
    start: Placement | None,
    phases: Sequence[PhaseBalance],
    retired_at: Sequence[float],
    kills: Sequence[Kill],
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.8), layout="constrained")
    for number, phase in enumerate(phases):
        axes.axvspan(phase.start_s, phase.end_s, color=_COLOURS[number % len(_COLOURS)], zorder=0)
        middle = (phase.start_s + phase.end_s) / 2
        axes.text(middle, 1.015, phase.domain, ha="center", fontsize=10)
        if phase.after is not None:
            label = f"{phase.static:.2f} → {phase.after:.2f}" if phase.static is not None else f"{phase.after:.2f}"
            axes.text(middle, 0.02, label, ha="center", fontsize=9, transform=axes.get_xaxis_transform())
    at = [t.at_s for t in timed]
    axes.plot(at, [t.window.balancedness for t in timed], color="#1f5fa8", linewidth=1.6, label="with EPlane")
    if start is not None:
        still = [balancedness(start.rank_load(t.window.expert_load)) for t in timed]
        axes.plot(at, still, color="#999999", linewidth=1.2, linestyle="--", label="start placement, same load")
    for number, moment in enumerate(retired_at):
        axes.axvline(moment, color="#2a9d4a", linewidth=1.0, alpha=0.7, label="wave retired" if number == 0 else None)
    for number, kill in enumerate(kills):
        mark = {
            "color": "#c0392b",
            "marker": "x",
            "linestyle": "none",
            "label": "process killed" if not number else None,
        }
        axes.plot([kill.t], [0.985], **mark)
    axes.set_xlabel("seconds")
    axes.set_ylabel("balancedness (mean / max tokens of a rank)")
    axes.set_ylim(None, 1.0)
    axes.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
