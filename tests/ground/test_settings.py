"""Settings: every refusal names the field; secrets stay hidden; changes are judged as a whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from eplane.errors import SettingsError
from eplane.settings import MASK, Secret, Settings, setting


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Sample(Settings):
    group: str
    ttl_s: float = setting(3.0, low=1, high=60)
    tick_s: float = setting(0.5, low=0, above=True)
    ranks: int = setting(4, low=1)
    loud: bool = False
    colour: Colour = Colour.RED
    folder: Path = Path("/tmp")
    token: Secret | None = None
    limit: float | None = None
    hosts: tuple[str, ...] = ()
    numbers: tuple[int, ...] = ()

    def rules(self) -> Iterator[tuple[str, str]]:
        if self.tick_s >= self.ttl_s:
            yield "tick_s", f"must be below ttl_s ({self.ttl_s:g})"


def test_texts_of_the_environment() -> None:
    found = Sample.from_env(
        {
            "EPLANE_GROUP": "g",
            "EPLANE_TTL_S": "5",
            "EPLANE_RANKS": "8",
            "EPLANE_LOUD": "Yes",
            "EPLANE_COLOUR": "blue",
            "EPLANE_FOLDER": "/var",
            "EPLANE_TOKEN": "hush",
            "EPLANE_LIMIT": "none",
            "EPLANE_HOSTS": "a:1, b:2,",
            "EPLANE_NUMBERS": "1,2",
            "EPLANE_CRASH": "something else's",
        },
        ranks=2,
        limit=None,
    )
    assert found == Sample(
        "g", 5.0, 0.5, 2, True, Colour.BLUE, Path("/var"), Secret("hush"), None, ("a:1", "b:2"), (1, 2)
    )


def test_plain_json() -> None:
    values: dict[str, object] = {"group": "g", "ttl_s": 2, "limit": 1.5, "hosts": ["a"], "token": None, "colour": "red"}
    found = Sample.from_mapping(values)
    assert (found.ttl_s, found.limit, found.hosts, found.colour) == (2.0, 1.5, ("a",), Colour.RED)
    assert isinstance(found.ttl_s, float)
    shown = json.loads(json.dumps(found.shown()))
    assert Sample.from_mapping(shown) == found


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("group", None, "not empty"),
        ("group", "", "not empty"),
        ("group", 3, "text"),
        ("ttl_s", 0.5, "at least 1 and at most 60"),
        ("ttl_s", 61, "at most 60"),
        ("ttl_s", "soon", "number"),
        ("ttl_s", "nan", "must be"),
        ("ttl_s", float("inf"), "must be"),
        ("ttl_s", True, "number"),
        ("ttl_s", 10**400, "too large"),
        ("tick_s", 0, "above 0"),
        ("ranks", 2.0, "whole number"),
        ("ranks", "2.5", "whole number"),
        ("ranks", 0, "at least 1"),
        ("loud", "maybe", "true or false"),
        ("loud", 1, "true or false"),
        ("colour", "green", "one of red, blue"),
        ("limit", "x", "number"),
        ("limit", float("nan"), "finite"),
        ("hosts", 3, "list"),
        ("numbers", [1, "x"], "whole number"),
        ("token", 3, "text"),
        ("ttls", 3, "not a setting; did you mean ttl_s"),
        ("zzz", 3, "not a setting"),
    ],
)
def test_a_refusal_names_the_field(name: str, value: Any, says: str) -> None:
    with pytest.raises(SettingsError, match=says) as caught:
        Sample.from_mapping({"group": "g", name: value})
    assert caught.value.field == name


def test_a_refusal_names_the_source_and_the_variable() -> None:
    with pytest.raises(SettingsError, match=r"^eplane.yaml: ranks: "):
        Sample.from_mapping({"group": "g", "ranks": "x"}, "eplane.yaml")
    with pytest.raises(SettingsError, match=r"^EPLANE_RANKS: "):
        Sample.from_env({"EPLANE_RANKS": "x"}, group="g")
    with pytest.raises(SettingsError, match=r"^group: is missing"):
        Sample.from_env({})


def test_rules_between_fields() -> None:
    with pytest.raises(SettingsError, match=r"tick_s: must be below ttl_s \(1\)"):
        Sample("g", ttl_s=1.0, tick_s=2.0)


def test_a_change_is_judged_as_a_whole_and_leaves_the_old() -> None:
    old = Sample("g", token=Secret("hush"))
    assert old.patched({"ttl_s": 5}) == Sample("g", 5.0, token=Secret("hush"))
    for changes in ({"tick_s": 3.0}, {"ttl_s": 0.5}, {"group": None}, {"nothing": 1}):
        with pytest.raises(SettingsError):
            old.patched(changes)
    assert old.ttl_s == 3.0


def test_secrets_are_never_shown() -> None:
    one = Sample("g", token=Secret("hush"))
    assert one.shown()["token"] == MASK
    for text in (repr(one), str(one.token), f"{one.token}", json.dumps(one.shown()), repr([one.token])):
        assert "hush" not in text
    assert one.token is not None
    assert one.token.reveal() == "hush"
    assert {Secret("a"), Secret("a")} == {Secret("a")}
    assert Secret("a") != "a"


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Sample("g").ranks = 3  # type: ignore[misc]
