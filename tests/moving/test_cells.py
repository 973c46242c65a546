"""Cells: every transition that is not drawn is refused, and nothing unverified, pinned or in use is given away."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplane.errors import BundleMismatch, CellError, NoFreeCell
from runtime.cells import BundleManifest, CellPool, CellState, TensorSpec
from runtime.link.manifest import bundle_digest

MANIFEST = BundleManifest(
    (TensorSpec("up", "bfloat16", (2, 3)), TensorSpec("scale", "float32", ()), TensorSpec("zero", "int8", (5,)))
)
RAW = bytes(range(MANIFEST.bundle_bytes))
DIGEST = bundle_digest([RAW])
STEPS = ("write", "verify", "make_live", "retire", "free")


def pool(cells: int = 3) -> CellPool:
    return CellPool(MANIFEST, cells)


def cell_in(made: CellPool, state: CellState) -> int:
    cell = made.allocate(1, 2)
    made.write(cell, RAW)
    if state is CellState.STAGING:
        return cell
    made.verify(cell, DIGEST)
    for wanted, step in (
        (CellState.LIVE, made.make_live),
        (CellState.RETIRED, made.retire),
        (CellState.FREE, made.free),
    ):
        if made.state(cell) is state:
            break
        step(cell)
        assert made.state(cell) is wanted
    return cell


def act(made: CellPool, cell: int, step: str) -> None:
    if step == "write":
        made.write(cell, RAW)
    elif step == "verify":
        made.verify(cell, DIGEST)
    else:
        getattr(made, step)(cell)


ALLOWED = {
    CellState.STAGING: {"write": CellState.STAGING, "verify": CellState.VERIFIED, "free": CellState.FREE},
    CellState.VERIFIED: {"make_live": CellState.LIVE, "free": CellState.FREE},
    CellState.LIVE: {"retire": CellState.RETIRED},
    CellState.RETIRED: {"free": CellState.FREE},
    CellState.FREE: {},
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("state", list(CellState))
def test_every_step_from_every_state(state: CellState, step: str) -> None:
    made = pool()
    cell = cell_in(made, state)
    following = ALLOWED[state].get(step)
    if following is None:
        with pytest.raises(CellError):
            act(made, cell, step)
        assert made.state(cell) is state
    else:
        act(made, cell, step)
        assert made.state(cell) is following


def test_a_bundle_comes_back_byte_for_byte() -> None:
    made = pool()
    cell = made.hold(1, 2, RAW, DIGEST)
    assert made.bytes_of(cell) == RAW
    assert made.digest(cell) == DIGEST
    assert made.owner(cell) == (1, 2)
    assert bytes(made.tensors["up"][cell].reshape(-1).view(torch.uint8).tolist()) == RAW[:12]
    assert made.tensors["scale"].shape == (3,)
    assert made.tensors["up"].dtype is torch.bfloat16


def test_wrong_bytes_never_become_verified() -> None:
    made = pool()
    cell = made.allocate(0, 0)
    with pytest.raises(BundleMismatch, match="bytes"):
        made.write(cell, RAW[:-1])
    made.write(cell, RAW)
    for name in ("up", "scale", "zero"):
        made.tensors[name][cell].reshape(-1).view(torch.uint8)[0] ^= 1
        with pytest.raises(BundleMismatch, match="layer 0, expert 0"):
            made.verify(cell, DIGEST)
        assert made.state(cell) is CellState.STAGING
        made.tensors[name][cell].reshape(-1).view(torch.uint8)[0] ^= 1
    made.verify(cell, DIGEST)


def test_the_digest_is_of_the_memory_and_not_of_what_was_received() -> None:
    made = pool()
    cell = cell_in(made, CellState.LIVE)
    made.spoil(cell)
    assert made.digest(cell) != DIGEST


def test_all_cells_or_none() -> None:
    made = pool(3)
    made.allocate(0, 0)
    with pytest.raises(NoFreeCell, match="2 of 3"):
        made.allocate_all([(0, 1), (0, 2), (0, 3)])
    assert made.count(CellState.FREE) == 2
    assert len(made.allocate_all([(0, 1), (0, 2)])) == 2


def test_a_freed_cell_rests_before_it_is_used_again() -> None:
    made = pool(3)
    first = made.allocate(0, 0)
    made.free(first)
    assert [made.allocate(0, i) for i in range(3)][-1] == first


@pytest.mark.parametrize("state", [CellState.VERIFIED, CellState.RETIRED])
def test_a_pinned_cell_is_not_freed(state: CellState) -> None:
    made = pool()
    cell = cell_in(made, state)
    with made.pinned(cell):
        with pytest.raises(CellError, match="pinned"):
            made.free(cell)
        assert not made.free_if_unpinned(cell)
    assert made.free_if_unpinned(cell)
    with pytest.raises(CellError):
        made.unpin(cell)


@pytest.mark.parametrize("state", [CellState.FREE, CellState.STAGING])
def test_what_has_no_bundle_cannot_be_pinned(state: CellState) -> None:
    made = pool()
    cell = cell_in(made, state)
    with pytest.raises(CellError, match="pinned"):
        made.pin(cell)
    assert made.pin_bundle(1, 2) is None


def test_a_live_cell_is_served_before_a_verified_one() -> None:
    made = pool()
    verified = cell_in(made, CellState.VERIFIED)
    assert made.pin_bundle(1, 2) == verified
    live = cell_in(made, CellState.LIVE)
    assert made.pin_bundle(1, 2) == live
    assert made.pin_bundle(1, 3) is None


def test_staging_buffers_are_the_cell_itself_on_cpu() -> None:
    made = pool()
    cell = made.allocate(0, 0)
    for buffer in made.staging_buffers(cell):
        np.frombuffer(buffer, dtype=np.uint8)[:] = 7
    assert made.bytes_of(cell) == b"\x07" * MANIFEST.bundle_bytes
    made.fill(cell, made.staging_buffers(cell))
    live = cell_in(made, CellState.LIVE)
    with pytest.raises(CellError):
        made.staging_buffers(live)
