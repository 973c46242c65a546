"""A long record of a group's load: what its leader keeps for a while, fetched again and again into one file.

`FILE.npz.part` grows while it is recorded and is at any moment a whole `.npy` file, so what was recorded is not lost
with the recorder. At the end it becomes the array `load [W, L, E]` of `FILE.npz`, beside `first_step`, `last_step`,
`digest`, `world` and `at` (seconds since 1970 at which a window was fetched). Memory: a few numbers a window.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from eplane.errors import ApiProblem, BadInput

_HEAD_BYTES = 128
_MOST = int(np.iinfo(np.int32).max)


@dataclass
class Recording:
    """One file in the making. Windows come oldest first; `lost`: gaps between those that were fetched.

    `ended`: why no more can be added, where a world of another shape has come.
    """

    path: Path
    windows: int = 0
    lost: int = 0
    tokens: int = 0
    ended: str | None = None
    _shape: tuple[int, ...] = ()
    _columns: dict[str, list[Any]] = field(default_factory=dict)
    _part: IO[bytes] | None = None

    def __enter__(self) -> Recording:
        for taken in (self.path, self.part):
            if taken.exists():
                raise BadInput(f"--record {taken} exists already; name another file, or move it away")
        if self.path.suffix != ".npz":
            raise BadInput(f"--record {self.path}: the name must end with .npz")
        try:
            self._part = self.part.open("w+b")
        except OSError as error:
            raise BadInput(f"--record {self.path} can not be written: {error.strerror or error}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._part is not None:
            self._part.close()
        if not self.windows:
            self.part.unlink(missing_ok=True)

    @property
    def part(self) -> Path:
        return self.path.with_name(self.path.name + ".part")

    @property
    def last(self) -> tuple[str | None, int]:
        """World and last step of what is recorded: what to ask on from."""
        return (self._columns["world"][-1], self._columns["last_step"][-1]) if self.windows else (None, -1)

    def add(self, raw: bytes, at: float) -> int:
        """Take a recording as the API gives it; how many windows were added. Raises BadInput, ApiProblem."""
        arrays = _read(raw)
        load = arrays["load"]
        if self._shape and load.shape[1:] != self._shape:
            was, now = (" x ".join(map(str, shape)) for shape in (self._shape, load.shape[1:]))
            self.ended = f"the group serves {now} experts now, {was} are recorded"
            return 0
        if load.max() > _MOST:
            raise BadInput(f"a window has more than {_MOST} tokens for one expert: --record can not hold it")
        world, last = self.last
        for name in ("first_step", "last_step", "digest", "world"):
            self._columns.setdefault(name, []).extend(arrays[name].tolist())
        self._columns.setdefault("at", []).extend([at] * len(load))
        firsts, lasts, worlds = arrays["first_step"], arrays["last_step"], arrays["world"]
        if world == str(worlds[0]) and int(firsts[0]) > last:
            self.lost += 1
        self.lost += int(((firsts[1:] > lasts[:-1]) & (worlds[1:] == worlds[:-1])).sum())
        self._shape = tuple(load.shape[1:])
        self._append(load.astype("<i4"))
        return len(load)

    def _append(self, load: NDArray[np.int32]) -> None:
        if self._part is None:
            raise BadInput(f"--record {self.path} is not open")
        try:
            self._part.seek(0, os.SEEK_END)
            if not self.windows:
                self._part.write(_head((0, *self._shape)))
            self._part.write(load.tobytes())
            # Only now does the head count them: a recorder that is killed in between leaves a file that holds true.
            self._part.seek(0)
            self._part.write(_head((self.windows + len(load), *self._shape)))
            self._part.flush()
        except OSError as error:
            raise BadInput(f"{self.part} can not be written: {error.strerror or error}") from None
        self.windows += len(load)
        self.tokens += int(load.sum(dtype=np.int64))

    def finish(self) -> None:
        """Make the `.npz` of what is recorded. Nothing is made of nothing."""
        if not self.windows or self._part is None:
            return
        self._part.close()
        made = self.path.with_name(self.path.name + ".new")
        try:
            with zipfile.ZipFile(made, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
                archive.write(self.part, "load.npy")
                for name, values in self._columns.items():
                    column = io.BytesIO()
                    np.lib.format.write_array(column, np.asarray(values), allow_pickle=False)
                    archive.writestr(f"{name}.npy", column.getvalue())
            made.replace(self.path)
            self.part.unlink()
        except OSError as error:
            made.unlink(missing_ok=True)
            said = error.strerror or error
            raise BadInput(f"{self.path} can not be written: {said}; what was recorded is in {self.part}") from None


def _head(shape: tuple[int, ...]) -> bytes:
    """The head of a `.npy` file of int32, always of one length so that it can be written anew in place."""
    text = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}, }}"
    room = _HEAD_BYTES - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", room) + text.ljust(room - 1).encode() + b"\n"


def _read(raw: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of an answer. Raises ApiProblem where it is something else."""
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as found:
            arrays = {name: found[name] for name in ("load", "first_step", "last_step", "digest", "world")}
        if arrays["load"].ndim != 3 or any(len(a) != len(arrays["load"]) for a in arrays.values()):
            raise ValueError("its arrays are not of one length")
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise ApiProblem("bad_request", f"the recording that came can not be read: {error}", 200, 5) from None
    return arrays
