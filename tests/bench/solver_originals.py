"""What the original programs reached, as published in a comparison of them, beside our re-statements of their methods.

There: 58, 94, 61 or 48 layers, other random numbers, default settings; next-window balancedness is the mean over all decisions,
the first included, moves leave it out. Here: the same shapes and families as the loads module describes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Reached(NamedTuple):
    """Balancedness on the window that was seen and on the next, experts moved a layer and decision."""

    fit: float
    next: float
    moves: float


SCENARIOS: dict[tuple[str, str], tuple[tuple[float, float], str, tuple[float, float], tuple[float, float]]] = {
    ("c1", "zipf"): ((0.904, 271), "TensorRT-LLM", (0.904, 271), (0.918, 23)),
    ("c1", "lognormal"): ((0.903, 274), "Ascend default", (0.905, 262), (0.916, 24)),
    ("c1", "corr_drift"): ((0.837, 277), "FlashLB", (0.860, 183), (0.866, 27)),
    ("c2", "zipf"): ((0.553, 273), "SGLang vec", (0.555, 272), (0.547, 4)),
    ("c2", "lognormal"): ((0.636, 272), "FlashLB", (0.641, 137), (0.627, 5)),
    ("c2", "corr_drift"): ((0.619, 281), "FlashLB", (0.635, 141), (0.626, 24)),
    ("c3", "zipf"): ((0.408, 54), "FlashLB", (0.410, 4), (0.409, 3)),
    ("c3", "lognormal"): ((0.416, 58), "FlashLB", (0.419, 6), (0.426, 5)),
    ("c3", "corr_drift"): ((0.366, 61), "SGLang vec", (0.375, 61), (0.400, 15)),
    ("c4", "zipf"): ((0.932, 139), "FlashLB", (0.935, 72), (0.943, 14)),
    ("c4", "lognormal"): ((0.928, 143), "FlashLB", (0.931, 80), (0.940, 14)),
    ("c4", "corr_drift"): ((0.863, 145), "FlashLB", (0.893, 118), (0.890, 20)),
    ("c5", "zipf"): ((0.881, 428), "Ascend default", (0.882, 397), (0.890, 25)),
    ("c5", "lognormal"): ((0.881, 436), "Ascend default", (0.881, 409), (0.888, 25)),
    ("c5", "corr_drift"): ((0.768, 438), "FlashLB", (0.816, 359), (0.797, 29)),
    ("c6", "zipf"): ((0.948, 62), "GEPA", (0.949, 62), (0.959, 9)),
    ("c6", "lognormal"): ((0.947, 63), "SGLang", (0.947, 63), (0.955, 9)),
    ("c6", "corr_drift"): ((0.892, 65), "FlashLB", (0.915, 41), (0.918, 13)),
    ("c6b", "zipf"): ((0.907, 69), "Ascend default", (0.910, 62), (0.922, 16)),
    ("c6b", "lognormal"): ((0.906, 70), "FlashLB", (0.907, 39), (0.918, 17)),
    ("c6b", "corr_drift"): ((0.821, 72), "FlashLB", (0.851, 53), (0.858, 22)),
    ("oss", "recorded"): ((0.842, 32), "FlashLB", (0.872, 23), (0.906, 9)),
}
"""(shape, family): next-window balancedness / moves a layer of DeepSeek EPLB; name and figures of the best of 14 deployed
solvers; figures of the prototype of that comparison."""

MANY_SLOTS, FEW_SLOTS = ("c1", "c4", "c5", "c6", "c6b"), ("c2", "c3")
PUBLISHED = ("zipf", "lognormal", "corr_drift")
SWIFT_IN_ORDER = "swift, from experts in order"
"""SwiftBalance moves so little that its start decides. There it was experts 0, 1, 2, ... over all slots, the first ones
again at the end; ours spreads the further copies, which is better from the first window on."""
MEANS: dict[str, dict[str, tuple[float, float, float]]] = {
    "eplb": {"many": (0.993, 0.888, 89.6), "few": (0.625, 0.500, 56.8)},
    "omni": {"many": (0.975, 0.878, 61.6)},
    "swift": {"many": (0.792, 0.754, 7.4), "few": (0.408, 0.357, 7.7)},
    SWIFT_IN_ORDER: {"many": (0.792, 0.754, 7.4), "few": (0.408, 0.357, 7.7)},
    "flash": {"many": (0.975, 0.896, 49.1), "few": (0.617, 0.506, 25.3)},
}
"""Policy: fit, next, part of the slots that move (%), over the scenarios with many and with few slots a rank."""

Row = Mapping[str, Reached]


def scenario_table(rows: Mapping[tuple[str, str], Row]) -> list[str]:
    """Lines of the table of scenarios, those that are in `rows`."""
    ours = ("eplb", "flash", "omni", "swift", "eplane")
    head = ["shape, family", "DeepSeek EPLB", "best of 14 deployed", "prototype", *(f"ours: `{p}`" for p in ours)]
    out = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for key, (eplb, name, best, prototype) in SCENARIOS.items():
        if key in rows:
            there = [f"{a:.3f} / {b}" for a, b in (eplb, best, prototype)]
            there[1] += f" ({name})"
            here = [f"{rows[key][p].next:.3f} / {rows[key][p].moves:.1f}" for p in ours]
            out.append("| " + " | ".join([", ".join(key), *there, *here]) + " |")
    return out


def means_table(rows: Mapping[tuple[str, str], Row], slots: Mapping[str, int]) -> list[str]:
    """Lines of the table of means: fit, next, part of the slots moved, of the originals and of ours."""
    out = [
        "| method | original: fit | next | moves | ours: fit | next | moves |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind, shapes in (("many", MANY_SLOTS), ("few", FEW_SLOTS)):
        keys = [(s, f) for s in shapes for f in PUBLISHED]
        if not all(key in rows for key in keys):
            continue
        for policy, means in MEANS.items():
            if kind not in means:
                continue
            mine = np.mean([rows[k][policy] for k in keys], axis=0)
            part = 100 * np.mean([rows[k][policy].moves / slots[k[0]] for k in keys])
            fit, after, moves = means[kind]
            where = "5 to 10" if kind == "many" else "1 or 2"
            out.append(
                f"| {policy}, {where} slots a rank | {fit:.3f} | {after:.3f} | {moves:.1f} % "
                f"| {mine[0]:.3f} | {mine[1]:.3f} | {part:.1f} % |"
            )
    return out
