"""What a benchmark prints, kept for a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Report:
    """Lines to the terminal and, at the end, to a file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, *lines: str) -> None:
        for line in lines or ("",):
            print(line, flush=True)
            self.lines.append(line)

    def table(self, title: str, head: Sequence[str]) -> None:
        self.say("", f"### {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head))

    def row(self, *cells: Any) -> None:
        self.say("| " + " | ".join(f"{c:.3f}" if isinstance(c, float) else str(c) for c in cells) + " |")
