"""Records: each comes back as it was; unknown versions, corrupt bytes and wrong fields are refused by name; sizes hold."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import FieldError, RecordError
from eplane.keys import AckKind
from eplane.migration import AbortAsked, CutoverDone, NodeVerified, OfWave, Start, advance_migration, resume
from eplane.parts import PART_BYTES, decode_placement, encode_placement
from eplane.placement import Change, Placement, check_shares, linear
from eplane.plan import Identity, Plan, WavePlan
from eplane.records import (
    FULL_EVERY,
    AckRecord,
    EpochPointer,
    HistoryKind,
    HistoryRecord,
    ModeRecord,
    Record,
    SettingsRecord,
    WorldRecord,
    decode,
    encode,
    new_nonce,
    rebuild_placement,
    to_bytes,
)
from eplane.store.base import MAX_VALUE_BYTES
from eplane.topology import Capabilities
from eplane.work import WaveRecord, assemble, decode_plan, encode_plan, seen_acks
from tests.ground.samples import (
    ADOPTION,
    BASE,
    LEADER,
    MIGRATION,
    NODES,
    NONCE,
    PLAN,
    RECORDS,
    WORLD,
    migration_record,
    plans,
    rotated,
    wave_history,
    wave_record,
)
from tests.ground.tables import placements, shares_for

FAST = settings(deadline=None, max_examples=50)
EVERY = [pytest.param(record, id=f"{at}-{record.KIND}") for at, record in enumerate((*RECORDS, wave_record()))]


def same(a: Record, b: Record) -> bool:
    return type(a) is type(b) and encode(a) == encode(b)


@pytest.mark.parametrize("record", EVERY)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    found = decode(type(record), encode(record))
    assert same(found, record)
    if not isinstance(record, WaveRecord):
        assert found == record


@pytest.mark.parametrize("record", EVERY)
def test_unknown_versions_and_kinds_are_refused(record: Record) -> None:
    for name, value in (("v", 2), ("v", "1"), ("v", True), ("v", None), ("record", "other"), ("record", 1)):
        data = json.loads(encode(record))
        data[name] = value
        with pytest.raises(RecordError, match=rf"{record.KIND}\.{name}"):
            decode(type(record), json.dumps(data).encode())


@pytest.mark.parametrize("record", EVERY)
def test_a_missing_an_extra_and_a_wrong_field_are_named(record: Record) -> None:
    optional = {
        "world",
        "digest",
        "epoch",
        "last_step",
        "plan",
        "migration",
        "wave",
        "base_digest",
        "changes",
        "shares",
    }
    optional |= {"predicted_gain_s", "measured_gain_s", "ended_at", "bytes_per_s"}
    good = json.loads(encode(record))
    for name in good:
        data = {k: v for k, v in good.items() if k != name}
        if name not in optional:
            with pytest.raises(RecordError, match=name):
                decode(type(record), json.dumps(data).encode())
        wrongs: list[Any] = [[[]], {"x": {}}, -2, float("nan"), 10**400]
        for wrong in wrongs:
            text = json.dumps({**good, name: wrong})
            if (name == "values" and wrong == {"x": {}}) or (name.endswith("_gain_s") and wrong == -2):
                continue
            with pytest.raises(RecordError):
                decode(type(record), text.encode())
    with pytest.raises(RecordError, match="surplus"):
        decode(type(record), json.dumps({**good, "surplus": 1}).encode())


@FAST
@given(st.sampled_from([*RECORDS, wave_record()]), st.integers(0, 2**32), st.integers(1, 4))
def test_corrupt_bytes_are_refused_or_mean_what_they_say(record: Record, seed: int, flips: int) -> None:
    """Flipped bytes never raise anything but a RecordError, and what is read can be written and read again."""
    rng = random.Random(seed)
    raw = bytearray(encode(record))
    for _ in range(flips):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    try:
        found = decode(type(record), bytes(raw))
    except RecordError:
        return
    assert same(decode(type(record), encode(found)), found)


@FAST
@given(st.sampled_from(RECORDS), st.integers(0, 400))
def test_half_a_record_is_refused(record: Record, kept: int) -> None:
    raw = encode(record)
    with pytest.raises(RecordError):
        decode(type(record), raw[: min(kept, len(raw) - 1)])


@pytest.mark.parametrize("raw", [b"", b"\xff", b"[]", b"null", b"{", b"[" * 100_000, b'{"v":1,"v":1}', b"1" * 10_000])
def test_what_is_no_record_is_refused(raw: bytes) -> None:
    with pytest.raises(RecordError):
        decode(ModeRecord, raw)


def test_a_field_that_stands_twice_is_refused() -> None:
    raw = encode(RECORDS[1]).replace(b'"actor":"op"', b'"actor":"op","actor":"eve"')
    with pytest.raises(RecordError, match="actor: stands there twice"):
        decode(ModeRecord, raw)


def test_sizes_are_bounded_both_ways() -> None:
    fat = SettingsRecord({"x": "y" * MAX_VALUE_BYTES}, "op", "", 1.0, NONCE)
    with pytest.raises(RecordError, match="bytes"):
        encode(fat)
    with pytest.raises(RecordError, match="bytes"):
        decode(SettingsRecord, b" " * MAX_VALUE_BYTES + b"{}")


def test_what_json_has_no_word_for_is_not_written() -> None:
    for value in (float("nan"), float("inf"), object()):
        with pytest.raises(RecordError):
            to_bytes("settings", {"values": value})


def test_an_impossible_world_is_refused() -> None:
    data = json.loads(encode(RECORDS[3]))
    data["slots"] = 1
    with pytest.raises(RecordError, match=r"contradicts itself.*slots"):
        decode(WorldRecord, json.dumps(data).encode())


def test_a_world_says_that_it_samples_only_where_it_does() -> None:
    plain = RECORDS[3]
    assert isinstance(plain, WorldRecord)
    assert b"routing_sample" not in encode(plain), "a controller that does not know the word could not read it"
    sampling = replace(plain, world=replace(plain.world, capabilities=Capabilities(routing_sample=True)))
    assert decode(WorldRecord, encode(sampling)) == sampling


def test_a_wave_in_an_impossible_state_is_refused() -> None:
    data = json.loads(encode(wave_record()))
    data["state"] = "SWITCHING"
    with pytest.raises(RecordError, match="contradicts itself"):
        decode(WaveRecord, json.dumps(data).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"changes": None},
        {"changes": ()},
        {"plan": None},
        {"migration": None},
        {"wave": None},
        {"base_digest": None},
        {"made_by": HistoryKind.ADOPTION},
    ],
)
def test_history_says_all_of_how_an_epoch_came_to_be(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordError):
        replace(wave_history(), **changes)
    with pytest.raises(RecordError):
        replace(ADOPTION, full=False)


def test_a_full_placement_every_so_many_epochs() -> None:
    pointer = EpochPointer(7, BASE.digest, WORLD, 7, NONCE)
    assert not pointer.needs_full()
    assert not replace(pointer, epoch=7 + FULL_EVERY - 2).needs_full()
    assert replace(pointer, epoch=7 + FULL_EVERY - 1).needs_full()
    with pytest.raises(RecordError, match="full_epoch"):
        decode(EpochPointer, encode(replace(pointer, full_epoch=8)))


@FAST
@given(placements())
def test_a_placement_comes_back_from_its_parts(table: Placement) -> None:
    parts = encode_placement(table)
    found = decode_placement(parts, table.digest)
    assert (found.digest, found.ranks, found.experts) == (table.digest, table.ranks, table.experts)


def large(layers: int) -> Placement:
    """1024 ranks x 8 slots of 512 experts, scattered: as hard to compress as a placement gets."""
    rng = np.random.default_rng(0)
    rows = [np.concatenate([rng.permutation(512) for _ in range(16)]) for _ in range(layers)]
    return Placement(np.array(rows, dtype=np.int32), 1024, 512)


def large_plan() -> Plan:
    """Two waves that change every slot of a large placement."""
    tables = [rotated(large(6), by) for by in range(3)]
    waves = tuple(
        WavePlan(n, a.delta(b), (), a.digest, b.digest, 0) for n, (a, b) in enumerate(pairwise(tables), start=1)
    )
    return replace(PLAN, waves=waves, base_digest=tables[0].digest, target_digest=tables[-1].digest)


def test_a_large_placement_goes_into_parts_that_fit() -> None:
    table = large(61)
    parts = encode_placement(table)
    assert len(parts) > 1
    assert max(len(part) for part in parts) <= MAX_VALUE_BYTES
    assert decode_placement(parts, table.digest).digest == table.digest
    for wrong in (parts[1:], parts[:-1], parts[::-1], (*parts, parts[-1]), ()):
        with pytest.raises(RecordError):
            decode_placement(wrong, table.digest)
    with pytest.raises(RecordError, match="digest"):
        decode_placement(parts, "f" * 16)
    assert PART_BYTES < MAX_VALUE_BYTES


@FAST
@given(placements(), st.integers(0, 2**32))
def test_a_corrupt_placement_is_never_believed(table: Placement, seed: int) -> None:
    rng = random.Random(seed)
    raw = bytearray(encode_placement(table)[0])
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    try:
        found = decode_placement([bytes(raw)], table.digest)
    except RecordError:
        return
    assert found.digest == table.digest


def test_a_placement_of_too_many_experts_is_refused() -> None:
    with pytest.raises(RecordError, match="too large"):
        encode_placement(linear(1, 2**15 + 1, 1, 2**15 + 1))


def history() -> dict[int, HistoryRecord]:
    return {7: ADOPTION, 8: wave_history(8), 9: wave_history(9)}


def test_the_placement_is_rebuilt_from_deltas() -> None:
    assert rebuild_placement(BASE, history(), 7, 7).digest == BASE.digest
    assert rebuild_placement(BASE, history(), 7, 9).digest == rotated(BASE, 2).digest


@pytest.mark.parametrize(
    "broken",
    [
        {7: ADOPTION, 9: wave_history(9)},
        {8: wave_history(9), 9: wave_history(9)},
        {8: replace(wave_history(8), epoch=9), 9: wave_history(9)},
        {8: replace(wave_history(8), digest="f" * 16), 9: wave_history(9)},
        {8: replace(wave_history(8), base_digest="f" * 16), 9: wave_history(9)},
        {8: replace(wave_history(8), changes=(Change(9, 9, 9),)), 9: wave_history(9)},
        {8: ADOPTION, 9: wave_history(9)},
    ],
)
def test_a_broken_chain_is_not_rebuilt(broken: dict[int, HistoryRecord]) -> None:
    with pytest.raises(RecordError, match="history"):
        rebuild_placement(BASE, broken, 7, 9)


@FAST
@given(plans())
def test_a_stored_plan_comes_back(made: tuple[Plan, Placement]) -> None:
    stored = encode_plan(made[0], new_nonce())
    assert stored.parts == ()
    assert decode_plan(stored.main) == made[0]


def test_a_large_plan_goes_into_parts_that_fit() -> None:
    plan = large_plan()
    stored = encode_plan(plan, NONCE)
    assert len(stored.parts) > 1
    assert max(len(raw) for raw in (stored.main, *stored.parts)) <= MAX_VALUE_BYTES
    assert decode_plan(stored.main, stored.parts) == plan
    for wrong in ((), stored.parts[1:], stored.parts[::-1], (*stored.parts, b"")):
        with pytest.raises(RecordError, match=r"plan\.parts\.digest"):
            decode_plan(stored.main, wrong)


def test_a_wave_too_large_for_one_value_is_refused() -> None:
    shares = np.random.default_rng(0).random((61, 2048))
    with pytest.raises(RecordError, match="bytes"):
        encode(replace(wave_record(), shares=shares))


def test_a_bad_plan_value_is_named() -> None:
    data = json.loads(encode_plan(PLAN, NONCE).main)
    for name, value in (("nonce", "x"), ("parts", {}), ("parts", 3), ("world", ""), ("waves", [])):
        with pytest.raises(RecordError, match=rf"plan\.{name}"):
            decode_plan(json.dumps({**data, name: value}).encode())


@FAST
@given(st.data())
def test_shares_come_back_close_enough_to_be_shares(data: st.DataObject) -> None:
    table = data.draw(placements().filter(lambda p: p.ranks > 1))
    shares = data.draw(shares_for(table))
    found = decode(WaveRecord, encode(replace(wave_record(), shares=shares))).shares
    assert found is not None
    assert np.abs(found - shares).max() <= 2**-31
    check_shares(table, found)


def test_shares_outside_zero_to_one_are_refused() -> None:
    for bad in (-0.5, 1.5):
        raw = encode(replace(wave_record(), shares=np.full((1, 2), bad)))
        with pytest.raises(RecordError, match="share"):
            decode(WaveRecord, raw)


def test_a_wave_record_knows_whose_bundles_are_whose() -> None:
    record = wave_record()
    mine, theirs = record.loads_of((0, 1), 3), record.loads_of((2, 3), 3)
    assert sorted((*mine, *theirs), key=str) == sorted(record.work.loads, key=str)
    assert all(load.slot < 6 for load in mine)
    assert record.identity == MIGRATION.identity(1)


def test_since_moves_only_with_the_state() -> None:
    migration, _ = advance_migration(MIGRATION, Start())
    staging = wave_record().at(migration.waves[0], now=7.0, leader=LEADER, nonce=NONCE)
    assert staging.since == 7.0
    one = advance_migration(migration, OfWave(1, NodeVerified("n0")))[0].waves[0]
    assert staging.at(one, now=9.0, leader=LEADER, nonce=NONCE).since == 7.0


def test_work_of_another_wave_is_refused() -> None:
    with pytest.raises(RecordError, match="work"):
        replace(wave_record(), work=PLAN.waves[1])


def ack(kind: AckKind, node: str, identity: Identity) -> AckRecord:
    return AckRecord(kind, identity, node, "e" * 16, 1.0, NONCE)


def test_a_new_leader_puts_a_migration_together_and_goes_on() -> None:
    running, _ = advance_migration(MIGRATION, Start())
    stored_waves = {1: decode(WaveRecord, encode(wave_record(running.waves[0])))}
    at = assemble(migration_record(running), decode_plan(encode_plan(PLAN, NONCE).main), stored_waves)
    assert at == running
    here, elsewhere = running.identity(1), Identity("b" * 16, "m1", 1, 8, BASE.digest)
    acks = [ack(AckKind.VERIFIED, node, here) for node in NODES]
    acks += [ack(AckKind.SWITCHED, "n0", elsewhere), ack(AckKind.CLEAN, "n9", here)]
    resumed, _ = resume(at, seen_acks(at, acks))
    expected = running
    for node in NODES:
        expected, _ = advance_migration(expected, OfWave(1, NodeVerified(node)))
    assert resumed == expected
    cut, _ = advance_migration(resumed, OfWave(1, CutoverDone(8)))
    stored_waves = {1: wave_record(cut.waves[0]), 2: wave_record(cut.waves[1])}
    assert assemble(migration_record(cut), PLAN, stored_waves) == cut
    stopping, _ = advance_migration(cut, AbortAsked("op", "x"))
    assert (
        assemble(migration_record(stopping), PLAN, {n + 1: wave_record(w) for n, w in enumerate(stopping.waves)})
        == stopping
    )


def test_records_that_do_not_belong_together_are_refused() -> None:
    record = migration_record()
    for other in (
        replace(record, plan="p2"),
        replace(record, world="b" * 16),
        replace(record, base_epoch=8),
        replace(record, waves=3),
    ):
        with pytest.raises(FieldError):
            assemble(other, PLAN, {})
    with pytest.raises(RecordError):
        assemble(replace(record, id="m2"), PLAN, {1: wave_record()})
