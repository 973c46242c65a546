"""A simulation as a picture: balancedness, moves and, with a cost model, the predicted time of a step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from controller.simulate import SimulationResult
from eplane.errors import BadInput

PICTURES = (".png", ".svg", ".pdf")


def check_picture(path: Path) -> None:
    """Raises BadInput where `draw` could not work, before the long part begins."""
    from importlib.util import find_spec

    if path.suffix.lower() not in PICTURES:
        raise BadInput(f"--picture {path}: the name must end with {', '.join(PICTURES)}")
    if not path.parent.is_dir():
        raise BadInput(f"--picture {path}: there is no folder {path.parent}")
    if find_spec("matplotlib") is None:
        raise BadInput("--picture needs matplotlib, which is not installed: pip install 'eplane[demo]'")


def draw(path: Path, results: Sequence[SimulationResult], title: str) -> None:
    """Over the entries of the trace, one line a policy; a dot where something began to move."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = any(w.step_s is not None for result in results for w in result.windows)
    figure, axes = pyplot.subplots(
        3 if timed else 2, 1, figsize=(11, 10 if timed else 7), sharex=True, layout="constrained"
    )
    for result in results:
        _lines(axes, result, timed)
    axes[0].set_title(title, fontsize=10)
    axes[0].set_ylabel("balancedness until the next decision")
    axes[0].legend(loc="lower right", fontsize=9, title="mean; a dot where a rebalance began", title_fontsize=8)
    axes[1].set_ylabel("moves so far, without the first fill")
    axes[1].legend(loc="upper left", fontsize=9)
    if timed:
        axes[2].set_ylabel("predicted MoE time of a step, us")
        axes[2].legend(loc="upper right", fontsize=9)
    axes[-1].set_xlabel("entry of the trace")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise BadInput(f"{path} can not be written: {error.strerror}") from None
    finally:
        pyplot.close(figure)


def _lines(axes: Any, result: SimulationResult, timed: bool) -> None:
    summary, name = result.summary(), result.policy
    at = np.array([w.entry for w in result.windows])
    level = np.array([w.next_mean for w in result.windows])
    counted = set(result.warm)
    began = np.array([w.acted and w in counted for w in result.windows], dtype=bool)
    line = axes[0].plot(at, level, linewidth=1.3, label=f"{name} {summary['next']:.3f}")
    color = line[0].get_color()
    axes[0].plot(at[began], level[began], "o", markersize=3.5, color=color)
    moves = np.cumsum([w.moves if w in counted else 0 for w in result.windows])
    axes[1].plot(at, moves, color=color, linewidth=1.3, label=f"{name} {summary['moves']:,}")
    if timed:
        steps = [np.nan if w.step_s is None else w.step_s * 1e6 for w in result.windows]
        speed = "" if summary["steps_a_second"] is None else f" {summary['steps_a_second']:.1f} steps/s"
        axes[2].plot(at, steps, color=color, linewidth=1.3, label=f"{name}{speed}")
