"""Plans: the waves form a chain of valid placements, and whatever contradicts itself is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import PlanError
from eplane.placement import Change, Placement, linear
from eplane.plan import Identity, LeaderEpoch, Load, Plan, WavePlan
from tests.ground.samples import BASE, PLAN, WORLD, plan_of, plans, rotated, wave_plan

FAST = settings(deadline=None, max_examples=50)


@FAST
@given(plans())
def test_a_plan_leads_from_valid_to_valid_placement_and_comes_back_as_it_was(made: tuple[Plan, Placement]) -> None:
    plan, base = made
    tables = plan.applied_to(base)
    assert [t.digest for t in tables] == [w.target_digest for w in plan.waves]
    assert plan.moves == sum(len(w.loads) for w in plan.waves)
    assert plan.bytes == 1000 * plan.moves
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_identity_names_the_wave() -> None:
    assert PLAN.identity(2, "m1") == Identity(WORLD, "m1", 2, 9, PLAN.waves[1].target_digest)


@FAST
@given(st.integers(0, 2**64 - 1), st.integers(1, 2**63 - 1), st.integers(1, 9999))
def test_identities_and_leader_epochs_come_back(cluster: int, revision: int, wave: int) -> None:
    for made in (LeaderEpoch(cluster, revision), Identity(WORLD, "m-1", wave, revision, BASE.digest)):
        assert type(made).from_json(json.loads(json.dumps(made.to_json()))) == made


WAVE = wave_plan(1, BASE, rotated(BASE))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"number": 0}, "number"),
        ({"number": 10000}, "number"),
        ({"changes": ()}, "changes"),
        ({"changes": WAVE.changes * 2}, "changes"),
        ({"target_digest": WAVE.base_digest}, "target_digest"),
        ({"bytes": -1}, "bytes"),
        ({"loads": WAVE.loads * 2}, "loads"),
        ({"loads": (Load(0, 0, 7, 0),)}, "loads"),
        ({"loads": (Load(0, 99, 1, 0),)}, "loads"),
    ],
)
def test_a_wave_that_contradicts_itself_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        replace(WAVE, **changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"base_digest": "f" * 16}, "base_digest"),
        ({"target_digest": "f" * 16}, "target_digest"),
        ({"changes": (*WAVE.changes, Change(5, 0, 0))}, "changes"),
        ({"loads": WAVE.loads[1:]}, "loads"),
        ({"loads": (replace(WAVE.loads[0], source_rank=4), *WAVE.loads[1:])}, "loads"),
        ({"loads": (replace(WAVE.loads[0], source_rank=WAVE.loads[0].slot // 3), *WAVE.loads[1:])}, "loads"),
    ],
)
def test_a_wave_that_does_not_fit_its_base_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        replace(WAVE, **changes).applied_to(BASE)
    assert caught.value.field == field


def test_a_wave_that_loses_an_expert_is_refused() -> None:
    lone = linear(1, 4, 2, 2)
    lost = WavePlan(1, (Change(0, 0, -1),), (), lone.digest, "f" * 16, 0)
    with pytest.raises(PlanError, match="expert 0 has no replica"):
        lost.applied_to(lone)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"waves": ()}, "waves"),
        ({"waves": PLAN.waves[1:]}, "waves"),
        ({"waves": (PLAN.waves[0], replace(PLAN.waves[1], base_digest="f" * 16))}, "waves"),
        ({"target_digest": "f" * 16}, "target_digest"),
        ({"base_digest": "f" * 16}, "waves"),
        ({"base_epoch": -1}, "base_epoch"),
        ({"base_epoch": 2**63 - 1}, "base_epoch"),
    ],
)
def test_a_plan_that_is_no_chain_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        replace(PLAN, **changes)
    assert caught.value.field == field


def test_a_wave_may_overlap_where_both_fit_the_free_cells() -> None:
    first, second = PLAN.waves
    assert first.incoming(3) == second.incoming(3)
    need = dict(first.incoming(3))
    spare = [need.get(rank, 0) for rank in range(4)]
    assert second.fits_beside(None, 3, spare)
    assert not second.fits_beside(first, 3, spare)
    assert second.fits_beside(first, 3, [2 * n for n in spare])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("id", ""),
        ("world", "A" * 16),
        ("base_epoch", -1),
        ("base_epoch", True),
        ("created_at", float("nan")),
        ("predicted", None),
        ("predicted", {}),
        ("decisions", [["a", "MAYBE", "b"]]),
        ("decisions", [["a", "YES"]]),
        ("decisions", "YES"),
        ("state", "proposed"),
        ("kind", "none"),
        ("waves", []),
        ("waves", [{}]),
        ("base_digest", "0" * 15),
        ("target_digest", None),
        ("more", 1),
    ],
)
def test_a_bad_field_is_named(name: str, value: Any) -> None:
    data = json.loads(json.dumps(PLAN.to_json()))
    data[name] = value
    with pytest.raises(PlanError, match=f"plan.({name}|waves)"):
        Plan.from_json(data)


@pytest.mark.parametrize("name", sorted(PLAN.to_json()))
def test_a_missing_field_is_named(name: str) -> None:
    data = PLAN.to_json()
    del data[name]
    with pytest.raises(PlanError, match=f"plan.{name}: is missing"):
        Plan.from_json(data)


def test_a_change_to_a_negative_slot_is_refused() -> None:
    data = plan_of(BASE, rotated(BASE)).to_json()
    waves: Any = data["waves"]
    bad = replace(PLAN.waves[0], changes=(Change(0, -1, 0), *PLAN.waves[0].changes[1:]), loads=())
    waves[0]["changes"] = bad.to_json()["changes"]
    with pytest.raises(PlanError, match=r"waves\[0\].changes"):
        Plan.from_json(data)
