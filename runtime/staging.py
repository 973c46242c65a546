"""Staging: brings the bundles of one wave into free cells of this rank, verifies them, and makes the wave's table.

    STAGING --all bundles verified--> VERIFIED --arm--> (the switch owns the cells)
       |                                 |
       +--no source has a bundle--> FAILED, its cells free again
       +--cancelled (abort, a newer migration)----+--> its cells free again

Every source is tried in turn: the rank the plan names, the other ranks that hold the expert, the checkpoint. What
arrives is digested in the cell itself before the cell counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from eplane.errors import BundleMismatch, EPlaneError, LinkRefused, NoFreeCell, PlacementError, TransferError
from eplane.placement import EMPTY, Placement
from runtime.cells import CellPool
from runtime.faults import Faults
from runtime.link.messages import ErrorCode, StageCommand, Staged, StagedState
from runtime.tables import LiveTable, build_table
from runtime.transfer import MAX_DEADLINE_S, BundleRequest, Pacer, TokenBucket, fetch

_log = logging.getLogger(__name__)

Checkpoint = Callable[[int, int], bytes]
"""(layer, expert) -> the bundle's bytes in manifest order, in resident form."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where this rank gets bundles from: the digests all ranks agreed on, the checkpoint, the time for one bundle."""

    digests: Sequence[Sequence[str]]
    checkpoint: Checkpoint
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One bundle on its way into `cell`. `sources`: ranks to ask, the plan's first."""

    layer: int
    expert: int
    cell: int
    sources: tuple[int, ...]


class Staging:
    """The background work of one stage command. Made by `begin`, which refuses what cannot be done at all."""

    def __init__(
        self,
        command: StageCommand,
        table: LiveTable,
        arrivals: Sequence[Arrival],
        pool: CellPool,
        origin: Origin,
        faults: Faults,
    ) -> None:
        self.identity = command.identity
        self.base_digest = command.base_digest
        self.table = table
        self._command = command
        self._arrivals = arrivals
        self._pool = pool
        self._origin = origin
        self._faults = faults
        self._bucket = TokenBucket(command.bytes_per_s)
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._state = StagedState.STAGING
        self._done = 0
        self._bytes = 0
        self._reason: str | None = None
        self._waits: str | None = None
        self._given = False
        self._thread = threading.Thread(target=self._run, name=f"stage-{command.identity.wave}", daemon=True)

    @classmethod
    def begin(cls, command: StageCommand, base: LiveTable, pool: CellPool, origin: Origin, faults: Faults) -> Staging:
        """Checks `command` against the table it starts from, takes its cells, starts. Raises LinkRefused."""
        target = _target(command, base.placement)
        wanted = _wanted(command, base.placement, target, base.rank)
        try:
            cells = pool.allocate_all([(layer, expert) for layer, expert, _ in wanted])
        except NoFreeCell as error:
            raise LinkRefused(ErrorCode.CAPACITY, str(error)) from error
        arrivals = [Arrival(layer, expert, cell, s) for (layer, expert, s), cell in zip(wanted, cells, strict=True)]
        try:
            table = _table(command, base, target, arrivals)
        except EPlaneError as error:
            for cell in cells:
                pool.free(cell)
            raise LinkRefused(ErrorCode.BAD_REQUEST, str(error)) from error
        staging = cls(command, table, arrivals, pool, origin, faults)
        staging._thread.start()
        return staging

    def status(self) -> Staged:
        with self._lock:
            total = len(self._arrivals)
            return Staged(self.identity, self._state, self._done, total, self._bytes, self._reason)

    @property
    def waits(self) -> str | None:
        """What its cells wait for before they are free, once it has ended; None while they wait for nothing."""
        with self._lock:
            return self._waits

    def give_up(self) -> None:
        """Cancels. The cells are free once `stopped`: the thread may still be writing into one until then."""
        self._cancelled.set()

    def wait_stopped(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.stopped

    @property
    def stopped(self) -> bool:
        """The thread has ended, and if the staging was given up, all its cells are free."""
        return not self._thread.is_alive()

    def hand_over(self) -> None:
        """The switch has taken the table: the cells are no longer this staging's to free."""
        with self._lock:
            self._given = True
        self._cancelled.set()

    def _run(self) -> None:
        try:
            pace = Pacer()
            for arrival in self._arrivals:
                self._bring(arrival, pace)
            self._settle(StagedState.VERIFIED, None)
            self._cancelled.wait()
        except EPlaneError as error:
            self._settle(StagedState.FAILED, str(error))
        except Exception as error:
            # Whatever a loader or a device raises ends this wave, told in its status; it must not end the rank.
            _log.exception("staging of wave %d failed", self.identity.wave)
            self._settle(StagedState.FAILED, f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                given = self._given
            if not given:
                self._free_cells()

    def _free_cells(self) -> None:
        waiting, told = list(self._arrivals), False
        # Another rank pulls a bundle that was verified here; it has a deadline.
        while waiting := [arrival for arrival in waiting if not self._pool.free_if_unpinned(arrival.cell)]:
            first = f"layer {waiting[0].layer}, expert {waiting[0].expert}"
            sentence = f"{len(waiting)} cells of wave {self.identity.wave} are still read by other ranks ({first})"
            with self._lock:
                self._waits = sentence
            if not told:
                _log.warning("a wave is given up, its cells are not free yet: %s", sentence)
                told = True
            time.sleep(0.01)
        with self._lock:
            self._waits = None

    def _settle(self, state: StagedState, reason: str | None) -> None:
        with self._lock:
            self._state = state
            self._reason = reason

    def _bring(self, arrival: Arrival, pace: Pacer) -> None:
        """One bundle, from the first source that has it right. Raises TransferError when none has."""
        expected = self._origin.digests[arrival.layer][arrival.expert]
        failures = []
        for name, address in self._ways(arrival):
            if self._cancelled.is_set():
                raise TransferError("given up")
            try:
                if address is None:
                    received = self._load(arrival)
                else:
                    received = self._fetch(address, arrival, expected)
                self._accept(arrival.cell, expected, pace)
            except (TransferError, BundleMismatch, OSError) as error:
                failures.append(f"{name}: {error}")
                continue
            with self._lock:
                self._done += 1
                self._bytes += received
            return
        raise TransferError(
            f"layer {arrival.layer}, expert {arrival.expert} could not be had from any source ({'; '.join(failures)})"
        )

    def _ways(self, arrival: Arrival) -> Iterator[tuple[str, str | None]]:
        """(name, address) of each source; None stands for the checkpoint."""
        for rank in arrival.sources:
            if rank in self._command.peers:
                yield f"rank {rank}", self._command.peers[rank]
        yield "checkpoint", None

    def _fetch(self, address: str, arrival: Arrival, expected: str) -> int:
        request = BundleRequest(self.identity.world, arrival.layer, arrival.expert, expected)
        buffers = self._pool.staging_buffers(arrival.cell)
        size = self._pool.manifest.bundle_bytes
        deadline_s = min(MAX_DEADLINE_S, self._origin.deadline_s + 2 * self._bucket.seconds(size))
        received = fetch(
            address, request, buffers, deadline_s=deadline_s, bucket=self._bucket, cancelled=self._cancelled
        )
        self._pool.fill(arrival.cell, buffers)
        return received

    def _load(self, arrival: Arrival) -> int:
        raw = self._origin.checkpoint(arrival.layer, arrival.expert)
        self._pool.write(arrival.cell, raw)
        return len(raw)

    def _accept(self, cell: int, expected: str, pace: Pacer) -> None:
        if self._faults.corrupt_received:
            self._pool.spoil(cell)
        if self._faults.trust_bundles:
            self._pool.trust(cell)
        else:
            self._pool.verify(cell, expected, pace)
        if self._faults.corrupt_verified:
            self._pool.spoil(cell)


def _target(command: StageCommand, base: Placement) -> Placement:
    try:
        target = base.apply(command.changes)
    except PlacementError as error:
        raise LinkRefused(ErrorCode.BAD_REQUEST, f"the changes make no placement: {error}") from error
    if target.digest != command.identity.digest:
        raise LinkRefused(
            ErrorCode.DIGEST_MISMATCH,
            f"the changes lead from {base.digest} to {target.digest}, not to {command.identity.digest}",
        )
    return target


def _wanted(
    command: StageCommand, base: Placement, target: Placement, rank: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """(layer, expert, ranks to ask) of each bundle that `rank` lacks. Raises LinkRefused if `loads` say otherwise."""
    named = {(load.layer, load.expert): load.source_rank for load in command.loads}
    lacking = [(layer, expert) for layer, expert, receiver in base.moves(target) if receiver == rank]
    if set(named) != set(lacking) or len(named) != len(command.loads):
        raise LinkRefused(
            ErrorCode.BAD_REQUEST,
            f"rank {rank} lacks the bundles (layer, expert) {lacking}, and the loads are {sorted(named)}",
        )
    result = []
    for layer, expert in lacking:
        holders = [base.rank_of(slot) for slot in base.replicas(layer, expert)]
        first = named[layer, expert]
        result.append((layer, expert, (first, *(holder for holder in holders if holder != first))))
    return result


def _table(command: StageCommand, base: LiveTable, target: Placement, arrivals: Sequence[Arrival]) -> LiveTable:
    """The wave's table: kept bundles stay in their cells, whatever slot they get; new ones are where they arrive."""
    own_before = base.placement.by_rank()[:, base.rank]
    cell = {
        (int(layer), int(own_before[layer, k])): int(base.cell_of[layer, k])
        for layer, k in zip(*np.nonzero(own_before != EMPTY), strict=True)
    }
    cell.update({(arrival.layer, arrival.expert): arrival.cell for arrival in arrivals})
    own_after = target.by_rank()[:, base.rank]
    cell_of = np.full(own_after.shape, EMPTY, dtype=np.int32)
    for layer, k in zip(*np.nonzero(own_after != EMPTY), strict=True):
        cell_of[layer, k] = cell[int(layer), int(own_after[layer, k])]
    return build_table(
        target, base.rank, cell_of, command.shares, command.identity.epoch, base.device, local_first=base.local_first
    )
