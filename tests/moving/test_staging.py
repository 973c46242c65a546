"""Staging: every source is tried, nothing wrong becomes VERIFIED, and a given-up wave leaves nothing behind."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pytest

from eplane.errors import LinkRefused
from eplane.placement import Placement
from runtime.cells import CellPool, CellState
from runtime.faults import Faults
from runtime.link.messages import Staged, StagedState
from tests.moving.rig import LEADER, RealGroup, RealRank

# Three ranks; experts 0 and 1 have a second replica.
BASE = Placement(np.array([[0, 1, 2, 0, 3, 1]]), 3, 4)
# Rank 2 gives up 1 for 0; the plan names rank 0 as the source, and rank 1 holds it too.
TARGET = Placement(np.array([[0, 1, 2, 0, 3, 0]]), 3, 4)
DEAD = "127.0.0.1:9"


@pytest.fixture
def group() -> Iterator[RealGroup]:
    made = make_group()
    yield made
    made.close()


def make_group(faults: Faults | None = None) -> RealGroup:
    made = RealGroup(3, 1, 4, 2, 1, start=BASE)
    for rank in made.ranks:
        if faults is not None:
            rank.port._faults = faults
    return made


def stage(group: RealGroup, peers: dict[int, str] | None = None, **names: object) -> Staged:
    """Rank 2 stages TARGET; how it ended."""
    rank = group.ranks[2]
    command = group.wave(BASE, TARGET, 2, **names)
    if peers is not None:
        command = dataclasses.replace(command, peers=peers)
    rank.port.stage(command)
    return ended(rank)


def ended(rank: RealRank) -> Staged:
    for _ in range(2000):
        staged = rank.port.status().staged
        if staged is not None and staged.state is not StagedState.STAGING:
            return staged
        time.sleep(0.005)
    raise AssertionError("staging does not end")


def test_from_the_rank_that_the_plan_names(group: RealGroup) -> None:
    staged = stage(group)
    assert (staged.state, staged.done, staged.bytes) == (
        StagedState.VERIFIED,
        1,
        group.ranks[0].pool.manifest.bundle_bytes,
    )
    assert group.ranks[2].checkpoint_reads == 0


def test_a_dead_source_is_replaced_by_another_replica(group: RealGroup) -> None:
    assert stage(group, {0: DEAD, 1: group.addresses[1]}).state is StagedState.VERIFIED
    assert group.ranks[2].checkpoint_reads == 0


def test_a_source_with_a_spoilt_bundle_is_replaced_by_another_replica(group: RealGroup) -> None:
    spoilt = group.ranks[0]
    spoilt.pool.spoil(int(spoilt.switch.live.cell_of[0, 0]))
    assert stage(group).state is StagedState.VERIFIED
    assert group.ranks[2].checkpoint_reads == 0
    arm_all(group)
    assert group.ranks[2].answer(group.ranks[2].switch.live, 0, 1) == 1


def arm_all(group: RealGroup) -> None:
    for rank in group.ranks:
        command = group.wave(BASE, TARGET, rank.rank)
        rank.port.stage(command)
        ended(rank) if rank.port.status().staged else None
        rank.port.arm(command.identity, LEADER)
    group.until(lambda s: s.clean)


def test_without_any_live_source_the_checkpoint_serves(group: RealGroup) -> None:
    assert stage(group, {0: DEAD, 1: DEAD}).state is StagedState.VERIFIED
    assert group.ranks[2].checkpoint_reads == 1
    assert stage(group, {}).state is StagedState.VERIFIED


def test_no_source_is_a_sentence_and_leaves_nothing(group: RealGroup) -> None:
    rank = group.ranks[2]
    rank.port._origin = dataclasses.replace(rank.port._origin, checkpoint=lambda layer, expert: b"short")
    staged = stage(group, {0: DEAD})
    assert staged.state is StagedState.FAILED
    assert staged.reason is not None
    for part in ("layer 0, expert 0", "rank 0", "refused", "checkpoint", "5"):
        assert part in staged.reason
    for _ in range(500):
        if rank.pool.count(CellState.FREE) == 1:
            break
        time.sleep(0.005)
    assert rank.pool.count(CellState.FREE) == 1
    with pytest.raises(LinkRefused, match="not verified"):
        rank.port.arm(staged.identity, LEADER)
    rank.port._origin = dataclasses.replace(rank.port._origin, checkpoint=rank.load)
    assert stage(group, {0: DEAD}).state is StagedState.VERIFIED, "a failed wave can be staged again"


def test_an_unforeseen_error_of_a_loader_fails_the_wave_and_not_the_rank(group: RealGroup) -> None:
    rank = group.ranks[2]

    def broken(layer: int, expert: int) -> bytes:
        raise KeyError("no such tensor")

    rank.port._origin = dataclasses.replace(rank.port._origin, checkpoint=broken)
    staged = stage(group, {})
    assert staged.state is StagedState.FAILED
    assert "KeyError" in (staged.reason or "")
    assert rank.port.abort(staged.identity, LEADER).clean


def test_a_given_up_wave_frees_its_cells_only_when_nobody_writes(group: RealGroup) -> None:
    rank = group.ranks[2]
    command = dataclasses.replace(group.wave(BASE, TARGET, 2), bytes_per_s=10.0)
    rank.port.stage(command)
    assert rank.pool.count(CellState.STAGING) == 1
    rank.port.abort(command.identity, LEADER)
    for _ in range(1000):
        if rank.port.status().clean:
            break
        time.sleep(0.005)
    assert rank.port.status().clean
    assert rank.pool.count(CellState.FREE) == 1
    assert rank.switch.live.digest == BASE.digest


def test_cells_that_others_still_read_are_told(group: RealGroup, caplog: pytest.LogCaptureFixture) -> None:
    rank = group.ranks[2]
    staged = stage(group)
    (cell,) = [c for c in range(rank.pool.cells) if rank.pool.state(c) is CellState.VERIFIED]
    rank.pool.pin(cell)
    assert rank.port.status().waits is None
    rank.port.abort(staged.identity, LEADER)
    said = rank.port.status()
    assert not said.clean
    assert said.waits == "1 cells of wave 1 are still read by other ranks (layer 0, expert 0)"
    with pytest.raises(LinkRefused, match="not free yet: 1 cells of wave 1 are still read"):
        rank.port.stage(group.wave(BASE, TARGET, 2, migration="1" * 16))
    assert len([r for r in caplog.records if "not free yet" in r.getMessage()]) == 1, "once, not with each look"
    rank.pool.unpin(cell)
    for _ in range(1000):
        if rank.port.status().clean:
            break
        time.sleep(0.005)
    assert (rank.port.status().clean, rank.port.status().waits) == (True, None)


def test_a_corrupted_transfer_is_never_verified() -> None:
    group = make_group(Faults(corrupt_received=True))
    staged = stage(group)
    assert staged.state is StagedState.FAILED
    assert "digest" in (staged.reason or "")
    group.close()


@pytest.mark.parametrize(
    "faults",
    [Faults.named("skip-digest", 0), Faults.named("wrong-bundle", 0)],
    ids=["skip-digest", "wrong-bundle"],
)
def test_tooth_digest_and_planted_faults(faults: Faults) -> None:
    """With digests off, or spoilt after them, the answers are wrong, and the check of the answers sees it."""
    group = make_group(faults)
    arm_all(group)
    for _ in range(20):
        group.step(tokens=20)
    assert group.wrong > 0
    group.close()


def test_tooth_digest_check_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CellPool, "verify", lambda self, cell, expected, pace=None: self.trust(cell))
    group = make_group(Faults(corrupt_received=True))
    arm_all(group)
    for _ in range(20):
        group.step(tokens=20)
    assert group.wrong > 0
    group.close()
