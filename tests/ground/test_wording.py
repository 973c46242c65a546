"""One thing is told as one."""

from __future__ import annotations

from eplane.wording import counted


def test_one_and_many() -> None:
    assert [counted(n, "move") for n in (0, 1, 2)] == ["0 moves", "1 move", "2 moves"]
    assert [counted(n, "entry", "entries") for n in (1, 3)] == ["1 entry", "3 entries"]
