"""Copies of experts that are hot no more go to those that are, several at once."""

from __future__ import annotations

import numpy as np
import pytest

from controller.solver import Problem, solve
from controller.solver.methods.eplane import prepare
from controller.solver.renewal import exchanged, renew


def _stale(**fields: object) -> Problem:
    """Experts 0 and 1 were hot and have two copies each; now 6 and 7 are, and every rank is level with one copy of each."""
    load = np.tile(np.array([20.0, 20, 30, 30, 30, 30, 80, 80]), (4, 1, 1)) * 10
    prior = [[0, 6, 2], [1, 7, 3], [0, 1, 4], [5, 2, 3]]
    return Problem.of(load, 4, 3, window=4, prior=[[e for rank in prior for e in rank]], **fields)


def _search(problem: Problem):  # type: ignore[no-untyped-def]
    search, _, _ = prepare(problem)
    assert problem.prior is not None
    search.start(problem.prior.reshape(search.tables.shape))
    search.begin(0, search.tables[0])
    return search


def test_copies_go_where_they_are_wanted_now() -> None:
    table = exchanged(_search(_stale()), 0)
    assert table is not None
    counts = np.bincount(table.ravel(), minlength=8)
    assert counts[6] >= 2
    assert counts[7] >= 2
    assert counts.min() >= 1
    assert all(len(set(row)) == len(row) for row in table.tolist())


def test_a_renewal_stays_only_if_it_wins() -> None:
    search = _search(_stale(move_weight=0.0))
    before = search.price_of(0)
    assert renew(search, 0)
    assert search.price_of(0) < before
    dear = _search(_stale(move_weight=5.0))
    kept = dear.tables.copy()
    assert not renew(dear, 0)
    assert np.array_equal(dear.tables, kept)


@pytest.mark.parametrize(
    "fields", [{"max_moves": 1}, {"min_replicas": 1, "max_replicas": 2}, {"pinned": [[0, 0, 0], [0, 1, 2]]}]
)
def test_goals_hold(fields: dict[str, object]) -> None:
    problem = _stale(**fields)
    answer = solve(problem)
    if problem.max_moves is not None:
        assert answer.moves <= problem.max_moves
    for layer, expert, rank in problem.pinned.tolist():
        assert expert in answer.placement[layer, rank * 3 : rank * 3 + 3]
    counts = np.bincount(answer.placement[0], minlength=8)
    assert (counts <= problem.max_replicas[0]).all()


def test_where_copies_are_right_nothing_is_renewed() -> None:
    cold = Problem.of(_stale().load, 4, 3, window=4)
    search = _search(cold.with_prior(solve(cold).placement))
    assert exchanged(search, 0) is None or not renew(search, 0)


@pytest.mark.parametrize(("ranks", "tried"), [(8, False), (9, True)])
def test_few_ranks_renew_nothing(ranks: int, tried: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from controller.solver import renewal

    seen: list[int] = []

    def note(search: object, layer: int) -> bool:
        seen.append(layer)
        return False

    monkeypatch.setattr(renewal, "renew", note)
    load = np.random.default_rng(0).lognormal(4, 1, (2, 1, 20))
    cold = solve(Problem.of(load, ranks, 3))
    seen.clear()
    solve(Problem.of(load[:, :, ::-1], ranks, 3).with_prior(cold.placement))
    assert bool(seen) == tried
