"""Switching together: all ranks of a group change to the next placement at the start of the same step.

Each step, the engine thread calls, in this order:

    table = switch.begin_step(step)      a due switch happens here: pointers change, no byte is copied
    switch.sample()                      the armed hash for this step's headers: the same all step long
    switch.check(headers)                of every exchange, before its payload: all ranks serve this table in this step
    switch.agree(vector)                 once, with the armed hashes of all ranks as the first exchange brought them
    switch.end_step(step)                the device has finished the step: old cells may go

All ranks see the same vector, so all find the same wave agreed in the same step, and no barrier is needed. The side
threads (engine link, staging) only call `arm`, `set_shares`, `set_epoch` and read.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eplane.errors import LinkRefused, WorldEnded
from eplane.placement import FloatTable
from eplane.plan import Identity
from runtime.cells import CellPool
from runtime.faults import NO_FAULTS, Faults
from runtime.link.messages import ErrorCode, identity_hash
from runtime.tables import HEADER_DIGEST, HEADER_STEP, LiveTable, check_cells

REMEMBERED = 1024


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank stands at one moment. `retired`: cells that wait to be free.

    `last_step_under_old`: the last step served before the switch to `last_switched`.
    """

    step: int
    live: LiveTable
    armed: Identity | None
    last_switched: Identity | None
    last_step_under_old: int | None
    retired: int


class Switch:
    """Holds the live table of one rank and at most one armed successor."""

    def __init__(self, table: LiveTable, pool: CellPool, faults: Faults = NO_FAULTS) -> None:
        check_cells(table, pool)
        self._pool = pool
        self._faults = faults
        self._lock = threading.Lock()
        self._live = table
        self._next: tuple[Identity, LiveTable] | None = None
        self._due = False
        self._late = False
        self._sample = 0
        self._step = -1
        self._completed = -1
        self._retired: list[tuple[int, int]] = []  # (cell, last step that may read it)
        self._last_switched: Identity | None = None
        self._switched: OrderedDict[Identity, None] = OrderedDict()
        self._last_step_under_old: int | None = None

    # Engine thread

    def begin_step(self, step: int) -> LiveTable:
        """Opens `step`; the table returned is the one to use for all of it."""
        with self._lock:
            self._step = step
            if self._due and self._next is not None and not self._wait_once():
                self._change(step)
            self._release()
            self._sample = identity_hash(self._next[0]) if self._next is not None and not self._due else 0
            return self._live

    def sample(self) -> int:
        """Hash of the identity that was armed when the step began, 0 = none. The same value all step long."""
        return self._sample

    def agree(self, vector: Sequence[int]) -> None:
        """`vector`: the samples of all ranks in this step. All equal and not 0: the switch is due at the next step."""
        with self._lock:
            if self._sample != 0 and all(value == self._sample for value in vector):
                self._due = True

    def check(self, headers: torch.Tensor) -> None:
        """`headers [R, HEADER]` int64 of one exchange. Raises WorldEnded unless all serve my table in my step."""
        if self._faults.trust_headers:
            return
        check_headers(self._live, headers, self._step)

    def end_step(self, step: int) -> None:
        """The device work of `step` and of all steps before it is done."""
        with self._lock:
            self._completed = step
            self._release()

    def _change(self, step: int) -> None:
        if self._next is None:
            return
        identity, table = self._next
        before = {int(c) for c in self._live.cell_of.flat if c >= 0}
        after = {int(c) for c in table.cell_of.flat if c >= 0}
        for cell in after - before:
            self._pool.make_live(cell)
        for cell in before - after:
            self._pool.retire(cell)
            self._retired.append((cell, step - 1))
        self._live = table
        self._next = None
        self._due = False
        self._last_switched = identity
        self._switched[identity] = None
        if len(self._switched) > REMEMBERED:
            self._switched.popitem(last=False)
        self._last_step_under_old = step - 1

    def _release(self) -> None:
        """RETIRED > FREE for cells that no step under way can read and no transfer pins."""
        self._retired = [
            (cell, last)
            for cell, last in self._retired
            if last > self._completed or not self._pool.free_if_unpinned(cell)
        ]

    def _wait_once(self) -> bool:
        """The fault of a rank that switches one step after the others."""
        if self._faults.switch_late and not self._late:
            self._late = True
            return True
        self._late = False
        return False

    # Any thread

    def arm(self, identity: Identity, table: LiveTable, base_digest: str) -> None:
        """From the next step on this rank says that it is ready for `table`. There is no way back.

        Raises LinkRefused when another identity is armed or `base_digest` is not live, TableError when `table` names
        a cell that is not ready.
        """
        with self._lock:
            if self._next is not None:
                if self._next[0] == identity:
                    return
                raise LinkRefused(ErrorCode.ALREADY_ARMED, f"wave {self._next[0].wave} is armed and has not switched")
            if self._live.digest != base_digest:
                raise LinkRefused(
                    ErrorCode.WRONG_BASE, f"the wave starts from {base_digest}, and {self._live.digest} is live"
                )
            check_cells(table, self._pool)
            self._next = (identity, table)

    def set_shares(self, digest: str, shares: FloatTable) -> bool:
        """New shares for the live table from the next step on; False when another placement is live."""
        with self._lock:
            if self._live.digest != digest:
                return False
            self._live = self._live.with_shares(shares)
            return True

    def set_epoch(self, digest: str, epoch: int) -> bool:
        """Notes the number under which the live placement was adopted; False when another placement is live."""
        with self._lock:
            if self._live.digest != digest:
                return False
            self._live = self._live.with_epoch(epoch)
            return True

    @property
    def live(self) -> LiveTable:
        with self._lock:
            return self._live

    @property
    def armed(self) -> Identity | None:
        """What is armed and not yet switched. While this is set an idle rank ticks faster."""
        with self._lock:
            return None if self._next is None else self._next[0]

    @property
    def newest(self) -> LiveTable:
        """The table that the next wave starts from: the armed one (it will be live for certain), else the live one."""
        with self._lock:
            return self._live if self._next is None else self._next[1]

    @property
    def last_switched(self) -> Identity | None:
        with self._lock:
            return self._last_switched

    def is_committed(self, identity: Identity) -> bool:
        """Whether `identity` is armed, or has switched already, be it some waves ago."""
        with self._lock:
            return identity in self._switched or (self._next is not None and self._next[0] == identity)

    def standing(self) -> Standing:
        """Everything at one moment: read one by one, a switch could come between."""
        with self._lock:
            return Standing(
                self._step,
                self._live,
                None if self._next is None else self._next[0],
                self._last_switched,
                self._last_step_under_old,
                len(self._retired),
            )

    @property
    def step(self) -> int:
        """The step that was begun last, -1 before the first."""
        return self._step


def check_headers(table: LiveTable, headers: torch.Tensor, step: int) -> None:
    """Raises WorldEnded unless every row of `headers [R, HEADER]` carries the digest of `table` and `step`."""
    if bool(((headers[:, HEADER_DIGEST] == table.digest64) & (headers[:, HEADER_STEP] == step)).all()):
        return
    for rank, header in enumerate(headers.tolist()):
        if header[HEADER_DIGEST] != table.digest64 or header[HEADER_STEP] != step:
            raise WorldEnded(
                f"rank {rank} serves placement {header[HEADER_DIGEST] & (2**64 - 1):016x} in step {header[HEADER_STEP]}; "
                f"rank {table.rank} serves {table.digest} in step {step}"
            )
