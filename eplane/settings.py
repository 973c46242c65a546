"""Settings: one frozen dataclass for each program, filled from a mapping or the environment, judged as a whole.

A program writes its settings as a frozen dataclass that derives from `Settings`, with units in its field names
(`lease_ttl_s`), bounds beside each default (`setting`) and rules between fields in `rules`. Values arrive as text
(environment, command line) or plain JSON (file, API); either way every refusal is a SettingsError that names the field.
A `Secret` never shows its value in a repr, a log or an answer.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypeVar, Union, get_args, get_origin, get_type_hints

from eplane.errors import SettingsError

MASK = "********"
PREFIX = "EPLANE_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})

Value = TypeVar("Value")


class Secret:
    """A text that is never shown. `reveal` is the only way to it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return MASK

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._text == self._text

    def __hash__(self) -> int:
        return hash(self._text)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a number may be. `above`: the least value itself is not allowed."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def refusal(self, value: float) -> str | None:
        if math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low):
            return None
        least = "" if self.low == -math.inf else f" {'above' if self.above else 'at least'} {self.low:g}"
        most = "" if self.high == math.inf else f"{' and' if least else ''} at most {self.high:g}"
        return f"is {value:g}, must be{least}{most}" if least or most else f"is {value}, must be finite"


def setting(
    default: Value, *, low: float = -math.inf, high: float = math.inf, above: bool = False, help: str = ""
) -> Value:
    """A field with its default, what a number may be, and one line for people. Used like `dataclasses.field`."""
    made: Any = field(default=default, metadata={"bounds": Bounds(low, high, above), "help": help})
    return made  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Settings:
    """Base of all settings. Whoever derives from it decorates the class with `@dataclass(frozen=True, slots=True)`."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                refusal = item.metadata.get("bounds", Bounds()).refusal(value)
                if refusal is not None:
                    raise SettingsError(item.name, refusal)
        for name, reason in self.rules():
            raise SettingsError(name, reason)

    def rules(self) -> Iterator[tuple[str, str]]:
        """Rules between fields: `(field, reason)` for each one broken. Override it; the first is raised."""
        yield from ()

    @classmethod
    def from_mapping(cls, values: Mapping[str, object], source: str = "") -> Self:
        """Settings of plain JSON or texts by field name. `source` (a file, ...) stands in front of refusals."""
        return cls(**_converted(cls, values, lambda name: f"{source}: {name}" if source else name))

    @classmethod
    def from_env(cls, environ: Mapping[str, str], prefix: str = PREFIX, **given: object) -> Self:
        """Settings of the variables `{prefix}{FIELD}`; `given` (command line) goes before them where not None.

        Variables with the prefix that name no field are left alone: other programs of the product read them.
        """
        names = {item.name for item in fields(cls)}
        found: dict[str, object] = {}
        for name in names:
            text = environ.get(prefix + name.upper())
            if text is not None and given.get(name) is None:
                found[name] = text
        from_env = set(found)
        found.update({name: value for name, value in given.items() if value is not None})
        return cls(**_converted(cls, found, lambda name: prefix + name.upper() if name in from_env else name))

    def patched(self, changes: Mapping[str, object]) -> Self:
        """These settings with `changes`; judged as a whole, so a change that contradicts another field is refused."""
        kept = {item.name: getattr(self, item.name) for item in fields(self)}
        return type(self)(**{**kept, **_converted(type(self), changes, str, partial=True)})

    def shown(self) -> dict[str, object]:
        """Plain JSON for people and the API; secrets masked, unset ones null."""
        return {item.name: _plain(getattr(self, item.name)) for item in fields(self)}


def _converted(
    cls: type[Settings], values: Mapping[str, object], label: Any, *, partial: bool = False
) -> dict[str, Any]:
    hints = get_type_hints(cls)
    known = {item.name: item for item in fields(cls)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise SettingsError(label(name), f"is not a setting{f'; did you mean {near[0]}?' if near else ''}")
    if not partial:
        for name, item in known.items():
            if name not in values and _required(item):
                raise SettingsError(label(name), "is missing")
    result: dict[str, Any] = {}
    for name, value in values.items():
        try:
            result[name] = _convert(hints[name], value)
        except ValueError as error:
            raise SettingsError(label(name), str(error)) from None
    return result


def _required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def _convert(hint: Any, value: object) -> object:
    """`value` as `hint` says; ValueError with the reason where it is something else. Never cuts or guesses."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_optional(hint, value)
    if origin is tuple:
        items = [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise ValueError(f"must be a list, got {type(value).__name__}")
        return tuple(_convert(get_args(hint)[0], item) for item in items)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _choice(hint, value)
    if hint is bool:
        return _flag(value)
    if hint is int or hint is float:
        return _number(hint, value)
    if hint in (str, Path, Secret):
        if hint is not str and isinstance(value, hint):
            return value
        if not isinstance(value, str) or not value:
            raise ValueError("must be a text that is not empty")
        return hint(value)
    if isinstance(hint, type) and isinstance(value, hint):
        return value
    raise ValueError(f"must be {getattr(hint, '__name__', hint)}, got {type(value).__name__}")


def _convert_optional(hint: Any, value: object) -> object:
    kinds = [kind for kind in get_args(hint) if kind is not types.NoneType]
    if value is None or (
        isinstance(value, str) and value.lower() in ("none", "null") and len(kinds) < len(get_args(hint))
    ):
        if len(kinds) == len(get_args(hint)):
            raise ValueError("must not be null")
        return None
    refusals: list[str] = []
    for kind in kinds:
        try:
            return _convert(kind, value)
        except ValueError as error:
            refusals.append(str(error))
    raise ValueError("; or ".join(refusals))


def _choice(hint: type[Enum], value: object) -> Enum:
    for member in hint:
        if value is member or value == member.value:
            return member
    raise ValueError(f"is {value!r:.40}, must be one of {', '.join(str(member.value) for member in hint)}")


def _flag(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError(f"must be true or false, got {value!r:.40}")


def _number(hint: type[int] | type[float], value: object) -> int | float:
    if isinstance(value, str):
        try:
            return hint(value)
        except ValueError:
            raise ValueError(f"must be a {'whole ' if hint is int else ''}number, got {value!r:.40}") from None
    if isinstance(value, bool) or not isinstance(value, int if hint is int else int | float):
        raise ValueError(f"must be a {'whole ' if hint is int else ''}number, got {value!r:.40}")
    try:
        return hint(value)
    except OverflowError:
        raise ValueError("is too large a number") from None


def _plain(value: object) -> object:
    if isinstance(value, Secret):
        return MASK
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
