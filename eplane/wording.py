"""Words of sentences."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """`1 move`, `2 moves`."""
    return f"{number} {one if number == 1 else many or one + 's'}"
