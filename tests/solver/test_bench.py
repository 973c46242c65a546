"""The comparison's loads, its numpy twins of the compiled kernels, and how it reads its options."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.bench import solver as bench
from tests.bench.solver_kernels import compare_kernels
from tests.bench.solver_loads import FAMILIES, PARTS, SHAPES, unrest
from tests.bench.solver_originals import SCENARIOS, SWIFT_IN_ORDER, Reached, means_table, scenario_table

SMALL = replace(SHAPES[-1], layers=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_load_is_the_same_in_every_run_and_another_with_each_seed(family: str) -> None:
    first, again, other = (FAMILIES[family](SMALL, seed) for seed in (1, 1, 2))
    assert first.shape == (7 * PARTS, 3, 64)
    assert (first == again).all()
    assert (first != other).any()


def test_windows_lie_as_far_apart_as_in_the_published_comparison() -> None:
    for shape in (replace(SHAPES[0], layers=6), replace(SHAPES[3], layers=6)):
        assert unrest(FAMILIES["zipf"](shape, 0), PARTS)[0] == pytest.approx(0.05, abs=0.01)
        apart, hot, _, _ = unrest(FAMILIES["corr_drift"](shape, 0), PARTS)
        assert apart == pytest.approx(0.095, abs=0.015)
        assert 4 < hot < 22


def test_unrest_counts_only_layers_with_tokens() -> None:
    load = np.zeros((2, 2, 2))
    load[:, 0] = [[10, 0], [0, 10]]
    load[0, 1] = [3, 1]
    assert unrest(load, 1) == (1.0, pytest.approx((2 + 2 + 1.5) / 3), 1.5, 2.0)
    assert unrest(np.zeros((2, 1, 2)), 1) == (0.0, 0.0, 0.0, 0.0)


def test_compiled_kernels_do_what_numpy_does() -> None:
    for name, _, _, miss in compare_kernels(3):
        assert miss < 1e-5, name


def test_one_row_has_every_policy_and_each_process_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ORDER", ("static", "eplb"))
    task = bench.Task(SMALL, "zipf", seeds=2, first=5)
    row = task()
    assert row == next(bench.each([task], 1))
    assert list(row) == ["static", "eplb", SWIFT_IN_ORDER]
    assert row["static"].moves == 0
    assert row["static"].next < row["eplb"].next <= 1
    lone = bench.run(FAMILIES["zipf"](SMALL, 5), SMALL, "eplb", PARTS)
    twin = bench.run(FAMILIES["zipf"](SMALL, 6), SMALL, "eplb", PARTS)
    assert row["eplb"].next == pytest.approx((lone.next + twin.next) / 2)


def test_a_row_is_met_only_by_better_balance_within_the_moves() -> None:
    def verdict(balance: float, moves: float) -> str:
        found = {p: Reached(0.9, 0.8, 100.0) for p in bench.ORDER}
        return bench.row_line("x", {**found, "eplane": Reached(0.9, balance, moves)}).split("|")[-2].strip()

    assert [verdict(0.81, 20), verdict(0.8, 20), verdict(0.81, 20.1)] == ["yes", "no", "no"]


def test_tables_beside_the_originals() -> None:
    row = {p: Reached(0.9, 0.8, 28.8) for p in (*bench.ORDER, SWIFT_IN_ORDER)}
    (line,) = scenario_table({("c1", "zipf"): row})[2:]
    assert line.startswith("| c1, zipf | 0.904 / 271 | 0.904 / 271 (TensorRT-LLM) | 0.918 / 23 | 0.800 / 28.8 |")
    assert len(means_table({("c1", "zipf"): row}, {"c1": 288})) == 2, "means only of all scenarios"
    few = {key: row for key in SCENARIOS if key[0] in ("c2", "c3")}
    assert "| 0.617 | 0.506 | 25.3 % | 0.900 | 0.800 | 10.0 % |" in means_table(few, {"c2": 288, "c3": 288})[-1]


def test_options_name_what_is_there() -> None:
    known = ["c1", "c2", "c3"]
    assert bench.chosen("c3,c1", known, known) == ["c1", "c3"]
    assert bench.chosen("", known, ["c1"]) == ["c1"]
    with pytest.raises(SystemExit, match="'c9' is none of c1, c2, c3"):
        bench.chosen("c1,c9", known, known)
    bench.assert_known()
