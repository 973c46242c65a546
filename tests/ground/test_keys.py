"""Keys: where everything lies, read back to what it was made of; names that would escape are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import NameRefused
from eplane.keys import ROOT, AckKey, AckKind, GroupKeys, check_name, group_of

KEYS = GroupKeys("decode")
names = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,20}[A-Za-z0-9])?", fullmatch=True).filter(str.isascii)


def test_where_everything_lies() -> None:
    assert KEYS.prefix == "/eplane/v1/groups/decode/"
    tails = {
        "leader": KEYS.leader,
        "mode": KEYS.mode,
        "pause": KEYS.pause,
        "settings": KEYS.settings,
        "world": KEYS.world,
        "epoch": KEYS.epoch,
        "active": KEYS.active,
        "placements/abc/0003": KEYS.placement_part("abc", 3),
        "history/0000000012": KEYS.history(12),
        "plans/p1": KEYS.plan("p1"),
        "plan-parts/p1/0002": KEYS.plan_part("p1", 2),
        "migrations/m1": KEYS.migration("m1"),
        "migrations/m1/waves/0001": KEYS.wave("m1", 1),
        "acks/m1/0001/CLEAN/n0": KEYS.ack("m1", 1, AckKind.CLEAN, "n0"),
        "agents/n0": KEYS.agent("n0"),
        "moves-log/m1/0001": KEYS.moves("m1", 1),
    }
    for tail, key in tails.items():
        assert key == KEYS.prefix + tail
        assert group_of(key) == "decode"
    assert len(set(tails.values())) == len(tails)


@settings(deadline=None, max_examples=50)
@given(names, names, names, st.integers(0, 9999), st.sampled_from(AckKind), st.integers(0, 10**10 - 1))
def test_keys_are_read_back(group: str, migration: str, node: str, wave: int, kind: AckKind, epoch: int) -> None:
    keys = GroupKeys(group)
    assert keys.read_ack(keys.ack(migration, wave, kind, node)) == AckKey(migration, wave, kind, node)
    assert keys.read_wave(keys.wave(migration, wave)) == (migration, wave)
    assert keys.read_history(keys.history(epoch)) == epoch
    assert keys.ack(migration, wave, kind, node).startswith(keys.wave_acks(migration, wave))
    assert keys.wave_acks(migration, wave).startswith(keys.acks(migration))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**10 - 1), st.integers(0, 10**10 - 1))
def test_history_sorts_by_epoch(a: int, b: int) -> None:
    assert (KEYS.history(a) < KEYS.history(b)) == (a < b)


BAD_NAMES = ["", "a/b", "..", ".", "-a", "a-", "a b", "a\n", "é", "a" * 129, "/", "a\0", "a%2f"]


@pytest.mark.parametrize("name", BAD_NAMES)
@pytest.mark.parametrize(
    "use",
    [
        lambda name: GroupKeys(name),
        KEYS.agent,
        KEYS.plan,
        KEYS.migration,
        KEYS.placement,
        KEYS.acks,
        lambda name: KEYS.ack("m1", 1, AckKind.CLEAN, name),
        lambda name: check_name("x", name),
    ],
)
def test_a_name_that_would_escape_its_place_is_refused(name: str, use: Callable[[str], object]) -> None:
    with pytest.raises(NameRefused):
        use(name)


@pytest.mark.parametrize("number", [-1, 10000])
def test_a_number_without_a_place_is_refused(number: int) -> None:
    with pytest.raises(NameRefused):
        KEYS.wave("m1", number)
    with pytest.raises(NameRefused):
        KEYS.history(number * 10**7)


@pytest.mark.parametrize("key", ["", "/x", ROOT, ROOT + "decode/acks/m1/0001/CLEAN", ROOT + "decode/agents/n0"])
@pytest.mark.parametrize("read", [KEYS.read_ack, KEYS.read_wave, KEYS.read_history])
def test_other_keys_are_not_read_as_these(key: str, read: Callable[[str], object]) -> None:
    with pytest.raises(NameRefused):
        read(key)


@pytest.mark.parametrize(
    "tail",
    [
        "acks/m1/1/CLEAN/n0",
        "acks/m1/0001/clean/n0",
        "acks/m1/0001/CLEAN/",
        "acks/m1/0001/CLEAN/a/b",
        "acks/m1/٠٠٠١/CLEAN/n0",
    ],
)
def test_a_crooked_ack_key_is_refused(tail: str) -> None:
    with pytest.raises(NameRefused):
        KEYS.read_ack(KEYS.prefix + tail)


def test_a_key_of_someone_else_has_no_group() -> None:
    with pytest.raises(NameRefused):
        group_of("/registry/pods")
