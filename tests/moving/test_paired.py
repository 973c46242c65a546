"""Paired transfers between two real processes on gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.moving import ranks


def run(folder: Path, script: str) -> list[object]:
    processes = ranks.start(ranks.paired, 2, str(folder), script)
    assert ranks.join(processes) == [0, 0]
    return [json.loads((folder / f"paired{rank}.json").read_text()) for rank in range(2)]


def test_bundles_go_both_ways_under_fresh_tags(tmp_path: Path) -> None:
    zero, one = run(tmp_path, "good")
    assert one == [[float(turn), float(turn)] for turn in (1, 3, 5, 7, 9)]
    assert zero == [[float(turn), float(turn)] for turn in (2, 4, 6, 8, 10)]


def test_a_fresh_tag_never_meets_an_old_bundle(tmp_path: Path) -> None:
    assert run(tmp_path, "fresh tag") == ["sent beside 2 orphans", [2.0, 2.0]]


def test_tooth_fresh_tags(tmp_path: Path) -> None:
    """Under a tag that was used before, the old bundle arrives for the new one (and only its digest would tell)."""
    sender, received = run(tmp_path, "reused tag")
    assert received == [1.0, 1.0]
    assert "generation 1 is over" in str(sender)


def test_what_is_never_sent_ends_the_generation(tmp_path: Path) -> None:
    _, waiting = run(tmp_path, "timed out")
    assert isinstance(waiting, dict)
    assert len(waiting["said"]) == 2
    assert waiting["said"][0] == waiting["said"][1] == f"generation 1 is over: {waiting['ended']}"
    assert "rank 0" in waiting["ended"]


@pytest.mark.parametrize("tensors", [1, 3])
def test_tags_are_never_given_twice(tensors: int) -> None:
    transfer = ranks.PairedTransfer(None, 1, 1.0)  # type: ignore[arg-type]
    taken = [tag + i for tag in (transfer.fresh_tags(tensors) for _ in range(50)) for i in range(tensors)]
    assert len(set(taken)) == 50 * tensors
