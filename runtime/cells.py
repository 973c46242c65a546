"""Cells: the pieces of a rank's memory that hold one bundle each.

A cell goes round

    FREE --allocate--> STAGING --verify--> VERIFIED --make_live--> LIVE --retire--> RETIRED --free--> FREE
                          |                   |
                          +-------free--------+   (staging given up)

Only a VERIFIED or LIVE cell may be named by a table. A pinned cell (an outgoing transfer reads it) is not freed.
All methods may be called from any thread; the bytes of a STAGING cell belong to the one thread that stages it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

import torch

from eplane.errors import BundleMismatch, CellError, NoFreeCell
from runtime.link.manifest import BundleManifest, TensorSpec, bundle_digest

__all__ = ["BundleManifest", "CellPool", "CellState", "TensorSpec"]

NO_OWNER = (-1, -1)


class CellState(StrEnum):
    FREE = "FREE"
    STAGING = "STAGING"
    VERIFIED = "VERIFIED"
    LIVE = "LIVE"
    RETIRED = "RETIRED"


class CellPool:
    """`cells` cells of one bundle shape. `tensors[name]` is `[cells, *shape]`: grouped matmul runs on its rows."""

    def __init__(self, manifest: BundleManifest, cells: int, device: torch.device | str = "cpu") -> None:
        if cells < 1:
            raise CellError(f"a pool needs at least one cell, got {cells}")
        self.manifest = manifest
        self.cells = cells
        self.device = torch.device(device)
        self.tensors: dict[str, torch.Tensor] = {
            spec.name: torch.zeros((cells, *spec.shape), dtype=getattr(torch, spec.dtype), device=self.device)
            for spec in manifest.tensors
        }
        self._lock = threading.Lock()
        self._state = [CellState.FREE] * cells
        self._owner = [NO_OWNER] * cells
        self._pins = [0] * cells
        self._free = deque(range(cells))  # First in, first out: a cell rests as long as possible before its next use.

    # States

    def state(self, cell: int) -> CellState:
        with self._lock:
            return self._state[cell]

    def owner(self, cell: int) -> tuple[int, int]:
        """(layer, expert) of what the cell holds or is being filled with; (-1, -1) when FREE."""
        with self._lock:
            return self._owner[cell]

    def count(self, state: CellState) -> int:
        with self._lock:
            return self._state.count(state)

    def allocate(self, layer: int, expert: int) -> int:
        """FREE > STAGING. Raises NoFreeCell."""
        return self.allocate_all([(layer, expert)])[0]

    def allocate_all(self, owners: Sequence[tuple[int, int]]) -> list[int]:
        """One STAGING cell for each (layer, expert), or none at all. Raises NoFreeCell."""
        with self._lock:
            if len(self._free) < len(owners):
                raise NoFreeCell(f"{len(owners)} cells are needed and {len(self._free)} of {self.cells} are free")
            result = []
            for owner in owners:
                cell = self._free.popleft()
                self._state[cell] = CellState.STAGING
                self._owner[cell] = owner
                result.append(cell)
            return result

    def make_live(self, cell: int) -> None:
        """VERIFIED > LIVE: from now on a table may serve from it."""
        with self._lock:
            self._move(cell, (CellState.VERIFIED,), CellState.LIVE)

    def retire(self, cell: int) -> None:
        """LIVE > RETIRED: no table names it any more, but the device may still read it."""
        with self._lock:
            self._move(cell, (CellState.LIVE,), CellState.RETIRED)

    def free(self, cell: int) -> None:
        """RETIRED > FREE, or STAGING, VERIFIED > FREE when staging is given up. Raises CellError while pinned.

        Who frees a RETIRED cell must know that the last step that could read it is complete on the device.
        """
        with self._lock:
            if self._pins[cell]:
                raise CellError(f"cell {cell} is pinned by {self._pins[cell]} transfers and cannot be freed")
            self._free_unpinned(cell)

    def free_if_unpinned(self, cell: int) -> bool:
        """`free`, or False when a transfer pins the cell."""
        with self._lock:
            if self._pins[cell]:
                return False
            self._free_unpinned(cell)
            return True

    def _free_unpinned(self, cell: int) -> None:
        self._move(cell, (CellState.RETIRED, CellState.STAGING, CellState.VERIFIED), CellState.FREE)
        self._owner[cell] = NO_OWNER
        self._free.append(cell)

    def _move(self, cell: int, allowed: tuple[CellState, ...], target: CellState) -> None:
        if self._state[cell] not in allowed:
            raise CellError(f"cell {cell} is {self._state[cell]} and cannot become {target}")
        self._state[cell] = target

    # Pins

    def pin(self, cell: int) -> None:
        """Keeps a VERIFIED, LIVE or RETIRED cell from being freed until `unpin`."""
        with self._lock:
            if self._state[cell] in (CellState.FREE, CellState.STAGING):
                raise CellError(f"cell {cell} is {self._state[cell]} and cannot be pinned")
            self._pins[cell] += 1

    def unpin(self, cell: int) -> None:
        with self._lock:
            if not self._pins[cell]:
                raise CellError(f"cell {cell} is not pinned")
            self._pins[cell] -= 1

    @contextmanager
    def pinned(self, cell: int) -> Iterator[None]:
        self.pin(cell)
        try:
            yield
        finally:
            self.unpin(cell)

    def pin_bundle(self, layer: int, expert: int) -> int | None:
        """Finds a LIVE (else VERIFIED) cell that holds the bundle and pins it; None when there is none."""
        with self._lock:
            for wanted in (CellState.LIVE, CellState.VERIFIED):
                for cell in range(self.cells):
                    if self._state[cell] is wanted and self._owner[cell] == (layer, expert):
                        self._pins[cell] += 1
                        return cell
            return None

    # Bytes

    def buffers(self, cell: int) -> list[memoryview]:
        """Writable byte views in manifest order: the memory of the cell itself on CPU, else a copy for `fill`."""
        views = []
        for spec in self.manifest.tensors:
            flat = self.tensors[spec.name][cell].reshape(-1).view(torch.uint8)
            views.append(flat.cpu().numpy().data.cast("B"))
        return views

    def staging_buffers(self, cell: int) -> list[memoryview]:
        """Where the bytes of a STAGING cell are to be put; call `fill` when they are complete."""
        self._expect(cell, CellState.STAGING)
        return self.buffers(cell)

    def fill(self, cell: int, buffers: Sequence[memoryview]) -> None:
        """Takes over what was put into `staging_buffers`. Copies nothing on CPU."""
        self._expect(cell, CellState.STAGING)
        if self.device.type == "cpu":
            return
        for spec, view in zip(self.manifest.tensors, buffers, strict=True):
            row = torch.frombuffer(view, dtype=torch.uint8)
            self.tensors[spec.name][cell].reshape(-1).view(torch.uint8).copy_(row)

    def write(self, cell: int, raw: memoryview | bytes) -> None:
        """Puts a whole bundle (bytes in manifest order) into a STAGING cell. Raises BundleMismatch on a wrong size."""
        view = memoryview(raw).cast("B")
        if view.nbytes != self.manifest.bundle_bytes:
            raise BundleMismatch(f"a bundle has {self.manifest.bundle_bytes} bytes, got {view.nbytes}")
        buffers = self.staging_buffers(cell)
        start = 0
        for buffer in buffers:
            buffer[:] = view[start : start + buffer.nbytes]
            start += buffer.nbytes
        self.fill(cell, buffers)

    def bytes_of(self, cell: int) -> bytes:
        """A copy of the bundle's bytes in manifest order."""
        return b"".join(self.buffers(cell))

    def digest(self, cell: int, pace: Callable[[], None] | None = None) -> str:
        """Digest of what the cell's memory holds now, read back from the device.

        `pace` is called between portions, so that a background thread leaves the cores to the step loop.
        """
        return bundle_digest(self.buffers(cell), pace)

    def verify(self, cell: int, expected: str, pace: Callable[[], None] | None = None) -> None:
        """STAGING > VERIFIED if the cell's own memory has the digest `expected`; else raises BundleMismatch."""
        self._expect(cell, CellState.STAGING)
        found = self.digest(cell, pace)
        if found != expected:
            layer, expert = self.owner(cell)
            raise BundleMismatch(f"layer {layer}, expert {expert}: digest {found}, expected {expected}")
        with self._lock:
            self._move(cell, (CellState.STAGING,), CellState.VERIFIED)

    def trust(self, cell: int) -> None:
        """STAGING > VERIFIED without looking: only for the fault that shows what digests are for."""
        with self._lock:
            self._move(cell, (CellState.STAGING,), CellState.VERIFIED)

    def spoil(self, cell: int) -> None:
        """Flips the top bit of every fourth byte: finite numbers, but wrong ones. For planted faults and tests."""
        for tensor in self.tensors.values():
            tensor[cell].reshape(-1).view(torch.uint8)[3::4] ^= 0x80

    def hold(self, layer: int, expert: int, raw: memoryview | bytes, expected: str) -> int:
        """Allocates, writes, verifies and makes live in one go: how a rank fills its cells at start."""
        cell = self.allocate(layer, expert)
        self.write(cell, raw)
        self.verify(cell, expected)
        self.make_live(cell)
        return cell

    def _expect(self, cell: int, state: CellState) -> None:
        found = self.state(cell)
        if found is not state:
            raise CellError(f"cell {cell} is {found}, not {state}")
