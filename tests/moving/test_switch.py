"""The switch: one version in a step, old cells kept until nothing can read them, and each guard's own tooth."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
import torch

from eplane.errors import LinkRefused, TableError, WorldEnded
from eplane.placement import Placement
from eplane.plan import Identity
from runtime.cells import CellPool, CellState
from runtime.faults import Faults
from runtime.link.messages import StagedState, identity_hash
from runtime.switch import Switch
from runtime.tables import HEADER, LiveTable, build_table, check_cells
from tests.moving.rig import LEADER, RealGroup, RealRank, all_digests, bundle, is_verified, manifest, number_of

BASE = Placement(np.array([[0, 1, 2, 3]]), 2, 4)
TARGET = Placement(np.array([[2, 1, 0, 3]]), 2, 4)
DIGESTS = all_digests(1, 4)
IDENTITY = Identity("0" * 16, "m", 1, 2, TARGET.digest)


def rank_zero() -> tuple[CellPool, Switch, LiveTable, int]:
    """Rank 0 of BASE with expert 2 verified in a spare cell: (pool, switch, next table, cell that will retire)."""
    pool = CellPool(manifest(), 3)
    cells = [pool.hold(0, expert, bundle(0, expert), DIGESTS[0][expert]) for expert in (0, 1)]
    switch = Switch(build_table(BASE, 0, np.array([cells])), pool)
    new = pool.allocate(0, 2)
    pool.write(new, bundle(0, 2))
    pool.verify(new, DIGESTS[0][2])
    return pool, switch, build_table(TARGET, 0, np.array([[new, cells[1]]]), epoch=2), cells[0]


def test_the_sample_is_the_same_all_step_long() -> None:
    _, switch, table, _ = rank_zero()
    switch.begin_step(0)
    switch.arm(IDENTITY, table, BASE.digest)
    assert switch.sample() == 0, "armed in the middle of a step: told from the next one on"
    switch.agree([0, 0])
    switch.begin_step(1)
    assert switch.sample() == identity_hash(IDENTITY)


def test_only_a_full_and_equal_vector_makes_a_switch_due() -> None:
    _, switch, table, _ = rank_zero()
    switch.arm(IDENTITY, table, BASE.digest)
    mine = identity_hash(IDENTITY)
    for step, vector in enumerate([[mine, 0], [mine, mine + 1], [0, 0]]):
        assert switch.begin_step(step).digest == BASE.digest
        switch.agree(vector)
    assert switch.begin_step(3).digest == BASE.digest
    switch.agree([mine, mine])
    assert switch.live.digest == BASE.digest, "never in the middle of a step"
    live = switch.begin_step(4)
    assert (live.digest, live.epoch) == (TARGET.digest, 2)
    assert (switch.last_switched, switch.standing().last_step_under_old, switch.armed) == (IDENTITY, 3, None)
    assert switch.sample() == 0
    switch.agree([0, 0])
    assert switch.begin_step(5) is live


def test_a_retired_cell_waits_for_the_last_step_that_can_read_it() -> None:
    pool, switch, table, old = rank_zero()
    switch.arm(IDENTITY, table, BASE.digest)
    for step in range(3):  # The device lags: no step is reported complete.
        switch.begin_step(step)
        switch.agree([switch.sample()] * 2)
    assert pool.state(old) is CellState.RETIRED
    assert switch.standing().last_step_under_old == 0
    assert switch.standing().retired == 1
    switch.begin_step(3)
    assert pool.state(old) is CellState.RETIRED
    switch.end_step(0)
    assert pool.state(old) is CellState.FREE
    assert switch.standing().retired == 0


def test_a_retired_cell_waits_for_its_last_transfer() -> None:
    pool, switch, table, old = rank_zero()
    pool.pin(old)
    switch.arm(IDENTITY, table, BASE.digest)
    for step in range(4):
        switch.begin_step(step)
        switch.agree([switch.sample()] * 2)
        switch.end_step(step)
    assert pool.state(old) is CellState.RETIRED
    pool.unpin(old)
    switch.begin_step(4)
    assert pool.state(old) is CellState.FREE


def test_at_most_one_epoch_is_armed_and_only_on_its_base() -> None:
    _, switch, table, _ = rank_zero()
    with pytest.raises(LinkRefused, match="starts from") as wrong:
        switch.arm(IDENTITY, table, TARGET.digest)
    assert wrong.value.code == "wrong_base"
    switch.arm(IDENTITY, table, BASE.digest)
    switch.arm(IDENTITY, table, BASE.digest)
    with pytest.raises(LinkRefused) as second:
        switch.arm(Identity("0" * 16, "m", 2, 3, TARGET.digest), table, BASE.digest)
    assert second.value.code == "already_armed"


def test_a_table_with_a_cell_that_is_not_ready_is_never_armed() -> None:
    pool, switch, table, _ = rank_zero()
    pool.free(int(table.cell_of[0, 0]))
    with pytest.raises(TableError):
        switch.arm(IDENTITY, table, BASE.digest)
    assert switch.armed is None


def test_headers_of_another_placement_or_step_end_the_world() -> None:
    _, switch, _, _ = rank_zero()
    table = switch.begin_step(7)
    good = torch.tensor([[table.digest64, 0, 3, 7]] * 2, dtype=torch.int64)
    assert good.shape[1] == HEADER
    switch.check(good)
    for row, column in ((1, 0), (0, 0), (1, 3)):
        bad = good.clone()
        bad[row, column] += 1
        with pytest.raises(WorldEnded, match=f"rank {row} serves") as caught:
            switch.check(bad)
        assert caught.value.exit_code == 70


# Teeth: with one guard taken out, the check of the answers sees it.


def swapped() -> Placement:
    return Placement(np.array([[2, 1, 0, 3]]), 2, 4)


def real_group(faults: list[Faults]) -> RealGroup:
    group = RealGroup(2, 1, 4, 2, 2)
    for rank, fault in zip(group.ranks, faults, strict=True):
        rank.switch._faults = fault
    return group


def switch_under_traffic(group: RealGroup) -> None:
    identity = group.stage(group.start, swapped())
    group.until(is_verified, tokens=20)
    for rank in group.ranks:
        rank.port.arm(identity, LEADER)
    for _ in range(6):
        group.step(tokens=20)


@pytest.mark.parametrize("late", [0, 1])
def test_tooth_epoch_stamp(late: int) -> None:
    """A rank that switches a step late: with the stamp the world ends before a token is wrong; without, they are wrong."""
    guarded = real_group([Faults(switch_late=rank == late) for rank in range(2)])
    with pytest.raises(WorldEnded):
        switch_under_traffic(guarded)
    assert guarded.wrong == 0
    blind = real_group([Faults(switch_late=rank == late, trust_headers=True) for rank in range(2)])
    switch_under_traffic(blind)
    assert blind.wrong > 0
    for group in (guarded, blind):
        group.close()


def lagging_device(rank: RealRank, group: RealGroup) -> float:
    """Expert 0's answer in a step that the device finishes only after the switch and the next wave's staging.

    Rank 1 holds no spare cell but the one that the switch retires, so the next wave wants exactly that.
    """
    table = rank.switch.live
    here = divmod(table.placement.replicas(0, 2)[0], 2)[1]
    identity = group.stage(group.start, swapped())
    group.until(is_verified)
    for each in group.ranks:
        each.port.arm(identity, LEADER)
    for step in range(group.step_number + 1, group.step_number + 4):
        rank.switch.begin_step(step)
        rank.switch.agree([rank.switch.sample()] * 2)
    assert rank.switch.last_switched == identity
    following = Placement(np.array([[2, 3, 0, 1]]), 2, 4)
    with contextlib.suppress(LinkRefused):  # With the guard: no cell is free.
        rank.port.stage(group.wave(swapped(), following, rank.rank, number=2, epoch=3))
        assert _settled(rank)
    return rank.answer(table, 0, here)


def _settled(rank: RealRank) -> bool:
    for _ in range(500):
        staged = rank.port.status().staged
        if staged is not None and staged.state is not StagedState.STAGING:
            return True
        time.sleep(0.01)
    return False


def test_tooth_early_reuse_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RealGroup(2, 1, 4, 2, 1)
    assert lagging_device(group.ranks[1], group) == number_of(0, 2)
    group.close()

    def hasty(self: Switch) -> None:
        self._retired = [entry for entry in self._retired if not self._pool.free_if_unpinned(entry[0])]

    monkeypatch.setattr(Switch, "_release", hasty)
    group = RealGroup(2, 1, 4, 2, 1)
    assert lagging_device(group.ranks[1], group) != number_of(0, 2)
    group.close()


def test_tooth_only_ready_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the check of cells a table could name a cell whose bundle never came."""
    pool, switch, table, _ = rank_zero()
    pool.free(int(table.cell_of[0, 0]))
    monkeypatch.setattr("runtime.switch.check_cells", lambda *_: None)
    switch.arm(IDENTITY, table, BASE.digest)
    with pytest.raises(TableError):
        check_cells(table, pool)
