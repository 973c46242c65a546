"""How large a problem may be: refused before its arrays are made, with the field, its size and the limit.

The limits follow from the largest arrays of a solve. For each layer, rank and expert: one byte that says who holds what,
and eight while copies are counted by node (1.1 GiB at the limit). For each slot: about ten numbers of eight bytes. For
each layer and expert: sixteen scenarios of four bytes and a few numbers of eight. For each pair of ranks: a few bytes. Beside that a layer takes its time, however small it is, and so does a long row of slots.
94 layers of 512 experts on 2,048 ranks are within all of them, and took 1.1 GiB.
"""

from __future__ import annotations

from eplane.errors import ProblemError
from eplane.wording import counted

MAX_RANKS = 8192
MAX_LAYERS = 1 << 14
MAX_EXPERTS = MAX_PLACES = 1 << 16
MAX_LOADS = 1 << 22
MAX_HELD = 1 << 27
MAX_SLOTS = 1 << 24


def check_loads(field: str, layers: int, experts: int) -> None:
    """Raise ProblemError where the load of one window is too large."""
    for name, size, limit in (("layers", layers, MAX_LAYERS), ("experts", experts, MAX_EXPERTS)):
        if size > limit:
            raise ProblemError(field, f"has {size} {name}; at most {limit} can be solved")
    _check(field, f"{counted(layers, 'layer')} x {counted(experts, 'expert')}", layers * experts, MAX_LOADS)


def check_held(layers: int, ranks: int, experts: int) -> None:
    """Raise ProblemError where it would take too much to say which rank holds which expert."""
    what = f"{counted(layers, 'layer')} x {counted(ranks, 'rank')} x {counted(experts, 'expert')}"
    _check("ranks", what, layers * ranks * experts, MAX_HELD)


def check_slots(layers: int, ranks: int, per_rank: float) -> None:
    """Raise ProblemError where the table of a placement is too large."""
    if per_rank > MAX_PLACES:
        raise ProblemError(
            "slots_per_rank", f"has {per_rank:.15g} slots for a rank; at most {MAX_PLACES} can be solved"
        )
    what = f"{counted(layers, 'layer')} x {counted(ranks, 'rank')} x {per_rank:.15g} slots"
    _check("slots_per_rank", what, layers * ranks * per_rank, MAX_SLOTS)


def _check(field: str, what: str, size: float, limit: int) -> None:
    if size > limit:
        raise ProblemError(field, f"makes {what}, {size:.15g} in all; at most {limit} can be solved")
