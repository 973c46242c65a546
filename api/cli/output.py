"""What commands print: JSON, YAML, or plain columns that a person reads and `awk` can too."""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer

_EIGHTHS = " ▏▎▍▌▋▊▉█"


class Output(enum.StrEnum):
    """The formats. JSON is what scripts should read: its fields are those of the REST API."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


def render(value: Any, output: Output, table: Callable[[Any], str]) -> str:
    """`value` in the format asked for; `table` makes the human form."""
    if output is Output.JSON:
        return json.dumps(value, indent=2, ensure_ascii=False)
    if output is Output.YAML:
        import yaml

        return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True)).rstrip("\n")
    return table(value)


def emit(value: Any, output: Output, table: Callable[[Any], str]) -> None:
    typer.echo(render(value, output, table))


def columns(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Left-aligned columns under a head; numbers to the right."""
    cells = [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(h), *(len(row[i]) for row in cells)) if cells else len(h) for i, h in enumerate(head)]
    numeric = [bool(cells) and all(_is_number(row[i]) for row in cells) for i in range(len(head))]
    lines = [_line(head, widths, numeric), *(_line(row, widths, numeric) for row in cells)]
    return "\n".join(lines)


def facts(pairs: Iterable[tuple[str, object]]) -> str:
    """`name  value` lines; a pair whose value is None is left out."""
    shown = [(name, _text(value)) for name, value in pairs if value is not None]
    width = max((len(name) for name, _ in shown), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown)


def bar(part: float, width: int = 24) -> str:
    """A bar of `width` characters filled to `part` (0 to 1)."""
    eighths = round(max(0.0, min(1.0, part)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(width)


def number(value: object, digits: int = 3) -> str:
    """A float with `digits` decimals, '-' for None."""
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def size(count: object) -> str:
    """Bytes as a person reads them."""
    if not isinstance(count, (int, float)):
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return "-"


def moment(at: object) -> str:
    """Seconds since 1970 as local time."""
    import datetime

    if not isinstance(at, (int, float)):
        return "-"
    return datetime.datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M:%S")


def _text(cell: object) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    return number(cell) if isinstance(cell, float) else str(cell)


def _is_number(text: str) -> bool:
    return text == "-" or text.replace(".", "", 1).replace("-", "", 1).isdigit()


def _line(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    padded = (t.rjust(w) if n else t.ljust(w) for t, w, n in zip(row, widths, numeric, strict=True))
    return "  ".join(padded).rstrip()
