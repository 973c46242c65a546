"""Counters: the tokens that arrived at every slot, from the engine to the agent through a memory-mapped file.

The writer keeps a ring of snapshots of CUMULATIVE counts, one at the end of each window of steps. A reader takes
differences, so one that was away longer than the ring loses no token, only resolution. A snapshot carries a CRC over
all of it: one that is being written, or was left half written by a crash, is seen as such.

    file:      header (HEADER_BYTES), then RING entries
    entry:     crc, seq, first_step, last_step, since_seq, digest, prefill int64 [L, K], decode int64 [L, K]

All little-endian. Window `seq` (from 1) covers the steps first_step <= s < last_step, which were all served under
`digest`; `since_seq` is the first window of the unbroken run under that digest.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from eplane.errors import CounterError, LoadReportError
from eplane.load import SubWindow

RING = 64
HEADER_BYTES = 128
MIXED_DIGEST = "0" * 16
"""Digest of a window that spans a switch because its parts were missed: it fits no placement, so it is not folded."""

Counts = NDArray[np.int64]
_MAGIC = b"EPLCNT01"
_HEAD = struct.Struct("<8s16sIIIII")  # magic, world, rank, layers, slots, ring, window_steps; then a CRC of them
_ENTRY = struct.Struct("<IQQQQ8s")  # crc, seq, first_step, last_step, since_seq, digest
_CRC = struct.Struct("<I")


class CounterWriter:
    """The engine's end. `add` is cheap enough for every step; `cut` copies the counts into the ring.

    Called by the engine thread alone. All ranks of a group must cut at the same steps: see `due`.
    """

    def __init__(self, path: Path | str, world: str, rank: int, layers: int, slots: int, window_steps: int) -> None:
        if min(layers, slots, window_steps) < 1 or len(world) != 16:
            raise CounterError(f"no counters for {layers} layers, {slots} slots, {window_steps} steps, world {world!r}")
        self._path = Path(path)
        self._window_steps = window_steps
        self._prefill: Counts = np.zeros((layers, slots), dtype=np.int64)
        self._decode: Counts = np.zeros((layers, slots), dtype=np.int64)
        self._entry_bytes = _entry_bytes(layers, slots)
        self._seq = 0
        self._cut_step = 0
        self._since_seq = 1
        self._digest = ""
        head = _HEAD.pack(_MAGIC, world.encode("ascii"), rank, layers, slots, RING, window_steps)
        size = HEADER_BYTES + RING * self._entry_bytes
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            with fresh.open("wb") as file:
                file.write(head + _CRC.pack(zlib.crc32(head)))
                file.truncate(size)
            with fresh.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), size)
            # Renamed when complete: a reader sees the old world's file or the new one's, never half of one.
            fresh.rename(self._path)
        except OSError as error:
            raise CounterError(f"the counters cannot be made at {self._path}: {error}") from error

    def due(self, step: int) -> bool:
        """Whether a window ends before `step`; besides, one ends at every switch."""
        return step > 0 and step % self._window_steps == 0

    def add(self, step: int, prefill: Counts, decode: Counts) -> None:
        """Tokens that arrived in `step` at each own slot, `[L, K]` each. Padding, warm-up and ticks are not load."""
        if step < self._cut_step:
            raise CounterError(f"step {step} is before the last cut at {self._cut_step}")
        self._prefill += prefill
        self._decode += decode

    def cut(self, step: int, digest: str) -> bool:
        """Ends the window: steps before `step` were served under `digest`. False if no step has passed since."""
        if step <= self._cut_step:
            return False
        self._seq += 1
        if digest != self._digest:
            self._digest, self._since_seq = digest, self._seq
        head = _ENTRY.pack(0, self._seq, self._cut_step, step, self._since_seq, bytes.fromhex(digest))
        body = head[4:] + self._prefill.astype("<i8").tobytes() + self._decode.astype("<i8").tobytes()
        start = HEADER_BYTES + (self._seq - 1) % RING * self._entry_bytes
        # The CRC is put last; until then the entry matches neither its old CRC nor the zero.
        self._map[start : start + 4] = _CRC.pack(0)
        self._map[start + 4 : start + self._entry_bytes] = body
        self._map[start : start + 4] = _CRC.pack(zlib.crc32(body))
        self._cut_step = step
        return True

    def close(self) -> None:
        self._map.close()


@dataclass(frozen=True, slots=True)
class _Snapshot:
    seq: int
    first_step: int
    last_step: int
    since_seq: int
    digest: str
    prefill: Counts
    decode: Counts


class CounterReader:
    """The agent's end. Follows the file when a new world's engine replaces it."""

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._map: mmap.mmap | None = None
        self._inode = -1
        self._memory: OrderedDict[int, _Snapshot] = OrderedDict()
        self.world = ""
        self.rank = -1
        self.layers = 0
        self.slots = 0
        self.window_steps = 0
        self.torn = 0
        """Entries that were found half written, even after waiting."""
        self.overflowed = 0
        """Windows over so long an absence that their counts do not fit a window."""

    def read_since(self, seq: int) -> list[SubWindow]:
        """The windows after `seq`, oldest first. Raises CounterError when there is no file, or not one of ours.

        0 means from the world's first step. After a change of world `seq` is taken as 0 once, as it counted in the
        world before. Windows that are no longer in the ring come as one window over all of them; if a switch lies
        inside, its digest is MIXED_DIGEST. A reader that never saw `seq` itself and finds it gone starts at the
        oldest snapshot, for what came before cannot be told apart.
        """
        if self._follow():
            seq = 0
        found = self._snapshots(seq)
        base = self._base(seq, found)
        result = []
        for snapshot in found:
            if base is None:
                base = snapshot
                self._remember(snapshot)
                continue
            if snapshot.seq <= base.seq:
                continue
            try:
                result.append(self._difference(base, snapshot))
            except LoadReportError:
                # More than a window can tell (years of absence): the count starts anew from here.
                self.overflowed += 1
            self._remember(snapshot)
            base = snapshot
        return result

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None

    def _follow(self) -> bool:
        """Opens the file, or opens it anew when it was replaced; True if the world is another than before."""
        try:
            if self._map is not None and self._path.stat().st_ino == self._inode:
                return False
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CounterError(f"there are no counters at {self._path}: {error}") from error
        if len(mapped) < HEADER_BYTES:
            mapped.close()
            raise CounterError(f"{self._path} is no counters file: it is too short")
        head = mapped[: _HEAD.size]
        magic, world, rank, layers, slots, ring, window_steps = _HEAD.unpack(head)
        crc = _CRC.unpack(mapped[_HEAD.size : _HEAD.size + 4])[0]
        sound = magic == _MAGIC and crc == zlib.crc32(head) and ring == RING
        if not sound or len(mapped) != HEADER_BYTES + RING * _entry_bytes(layers, slots):
            mapped.close()
            raise CounterError(f"{self._path} is no counters file of this version")
        self.close()
        changed = self.world not in ("", world.decode("ascii"))
        self._map, self._inode, self.world = mapped, inode, world.decode("ascii")
        self.rank, self.layers, self.slots, self.window_steps = rank, layers, slots, window_steps
        self._memory.clear()
        return changed

    def _snapshots(self, seq: int) -> list[_Snapshot]:
        """All sound snapshots from `seq` on, ascending."""
        found = [snapshot for index in range(RING) if (snapshot := self._read(index, seq)) is not None]
        return sorted(found, key=lambda snapshot: snapshot.seq)

    def _read(self, index: int, seq: int) -> _Snapshot | None:
        if self._map is None:
            return None
        size = _entry_bytes(self.layers, self.slots)
        start = HEADER_BYTES + index * size
        for attempt in range(5):
            head = _ENTRY.unpack(self._map[start : start + _ENTRY.size])
            if not any(head[:5]):
                return None  # Never written.
            if head[0] != 0 and head[1] < seq:
                return None  # Old; whether it is sound does not matter.
            raw = self._map[start : start + size]
            crc, found, first, last, since, digest = _ENTRY.unpack(raw[: _ENTRY.size])
            if zlib.crc32(raw[4:]) == crc and found > 0 and (found - 1) % RING == index:
                counts = np.frombuffer(raw, dtype="<i8", offset=_ENTRY.size).astype(np.int64)
                prefill, decode = counts.reshape(2, self.layers, self.slots)
                return _Snapshot(found, first, last, since, digest.hex(), prefill, decode)
            time.sleep(0.0002 * (attempt + 1))
        self.torn += 1
        return None

    def _base(self, seq: int, found: list[_Snapshot]) -> _Snapshot | None:
        if seq == 0:
            zero = np.zeros((self.layers, self.slots), dtype=np.int64)
            return _Snapshot(0, 0, 0, 0, "", zero, zero)
        return self._memory.get(seq) or next((snapshot for snapshot in found if snapshot.seq == seq), None)

    def _difference(self, base: _Snapshot, snapshot: _Snapshot) -> SubWindow:
        whole = snapshot.since_seq <= base.seq + 1
        return SubWindow(
            world=self.world,
            digest=snapshot.digest if whole else MIXED_DIGEST,
            first_step=base.last_step,
            last_step=snapshot.last_step,
            rank=self.rank,
            prefill=snapshot.prefill - base.prefill,
            decode=snapshot.decode - base.decode,
            seq=snapshot.seq,
        )

    def _remember(self, snapshot: _Snapshot) -> None:
        self._memory[snapshot.seq] = snapshot
        while len(self._memory) > RING:
            self._memory.popitem(last=False)


def _entry_bytes(layers: int, slots: int) -> int:
    return _ENTRY.size + 2 * 8 * layers * slots
