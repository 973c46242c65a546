"""Load traces in files: `.npz` and `.npy` of any size, read piece by piece, and load windows as the REST API gives them.

Every number is looked at once before anything runs (NaN, infinity, negative, checksum). After that a plain array is
mapped, and a compressed one is unpacked again as far as it is read, so that a trace need not fit into memory.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from controller.solver.problem import Floats
from controller.tape import Trace
from eplane.errors import BadInput

TRACE_ARRAY = "load"
_CHUNK = 1 << 24
_ZIP = b"PK\x03\x04"
_LOCAL_HEADER = 30
_DAMAGED = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError, RuntimeError)


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """A trace `load [W, L, E]`, and what the file knows of its time: steps and seconds of one entry on average."""

    load: Trace
    entry_steps: int | None = None
    entry_s: float | None = None

    def first(self, entries: int | None) -> Recorded:
        """Only the first entries."""
        if entries is None or entries >= self.load.shape[0]:
            return self
        cut = self.load.first(entries) if isinstance(self.load, Packed) else self.load[:entries]
        return replace(self, load=cut)


def read_trace(path: Path, array: str = TRACE_ARRAY) -> Recorded:
    """`[W, L, E]` from the array of that name in an .npz file, or a whole .npy file. Raises BadInput."""
    try:
        with path.open("rb") as file:
            packed = file.read(4) == _ZIP
        return _from_archive(path, array) if packed else Recorded(_mapped(path, 0, str(path)))
    except OSError as error:
        raise BadInput(f"{path} can not be read: {error.strerror or error}") from None
    except _DAMAGED as error:
        said = str(error).splitlines()
        raise BadInput(f"{path} is not a .npz with numbers: {said[0] if said else type(error).__name__}") from None
    except MemoryError:
        raise BadInput(f"{path} does not fit into memory") from None


def windows_trace(raw: object, source: str) -> Recorded:
    """Load windows as `GET /v1/groups/{g}/windows` answers them, oldest first. Raises BadInput.

    Only the last world's windows count: another world may place another model.
    """
    listed = raw.get("windows") if isinstance(raw, Mapping) else raw
    if not isinstance(listed, list) or not listed or not all(isinstance(w, Mapping) and "load" in w for w in listed):
        raise BadInput(f"{source}: windows: must be a list of objects with `load` [layers][experts]")
    world = listed[-1].get("world")
    mine = [w for w in listed if w.get("world") == world]
    try:
        loads = np.asarray([w["load"] for w in mine])
    except ValueError:
        raise BadInput(f"{source}: windows: their loads do not have one shape") from None
    except MemoryError:
        raise BadInput(f"{source}: windows: they do not fit into memory") from None
    steps = None
    with suppress(KeyError, TypeError, ValueError):
        steps = _mean_steps(np.asarray([[w["first_step"], w["last_step"]] for w in mine]).T)
    return Recorded(checked_trace(loads, f"{source}: windows"), steps)


def checked_trace(load: NDArray[Any], source: str) -> Floats:
    """The load as float64, once it is known to be one. Raises BadInput that begins with `source`."""
    _check_kind(load.dtype, load.shape, source)
    _check_numbers(load, source)
    return load.astype(np.float64)


def _check_kind(dtype: np.dtype[Any], shape: tuple[int, ...], source: str) -> None:
    if dtype.kind not in "iuf":
        raise BadInput(f"{source} holds {dtype}, not numbers")
    if len(shape) != 3 or min(shape) < 1:
        raise BadInput(f"{source} has shape {list(shape)}; [windows, layers, experts] is needed")


def _check_numbers(load: NDArray[Any], source: str) -> None:
    low, high = float(load.min()), float(load.max())
    if not np.isfinite([low, high]).all():
        raise BadInput(f"{source} holds NaN or infinity")
    if low < 0:
        raise BadInput(f"{source} holds negative loads")


@dataclass(frozen=True, slots=True)
class _Head:
    """What the head of an array says. `size`: bytes of the head itself."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    size: int


def _head_of(file: IO[bytes]) -> _Head:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"an array of format {version[0]}.{version[1]}")
    shape, fortran, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError("an array of objects")
    return _Head(shape, fortran, dtype, file.tell())


def _mapped(path: Path, offset: int, source: str, check: bool = True) -> NDArray[Any]:
    """The array whose head begins at `offset`, mapped into memory."""
    with path.open("rb") as file:
        file.seek(offset)
        head = _head_of(file)
    _check_kind(head.dtype, head.shape, source)
    order = "F" if head.fortran else "C"
    found = np.memmap(path, head.dtype, "r", head.size, head.shape, order)  # type: ignore[call-overload]
    if check:
        rows = max(1, _CHUNK // max(1, found[0].nbytes))
        for at in range(0, len(found), rows):
            _check_numbers(found[at : at + rows], source)
    return found  # type: ignore[no-any-return]


def _from_archive(path: Path, array: str) -> Recorded:
    with zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy"): name for name in archive.namelist()}
        if array not in names:
            held = ", ".join(list(names)[:20]) or "nothing"
            raise BadInput(f"{path} has no array {array!r}; it holds {held}")
        source, info = f"{path}: {array}", archive.getinfo(names[array])
        with archive.open(info) as file:
            head = _head_of(file)
            _check_kind(head.dtype, head.shape, source)
            for chunk in _chunks(file, head):
                _check_numbers(chunk, source)
        steps, seconds = _time_of(archive, names, head.shape[0])
    if head.fortran:
        # Its entries do not lie one after another: it can only be read as a whole.
        with np.load(path, allow_pickle=False) as whole:
            return Recorded(np.ascontiguousarray(whole[array]), steps, seconds)
    if info.compress_type == zipfile.ZIP_STORED:
        return Recorded(_mapped(path, _data_offset(path, info), source, check=False), steps, seconds)
    return Recorded(Packed(path, info.filename, head.shape, head.dtype, head.shape[0]), steps, seconds)


def _chunks(file: IO[bytes], head: _Head) -> Iterator[NDArray[Any]]:
    """All numbers after the head, in order; the archive compares its checksum at the end."""
    left = int(np.prod(head.shape, dtype=np.int64)) * head.dtype.itemsize
    step = max(head.dtype.itemsize, _CHUNK // head.dtype.itemsize * head.dtype.itemsize)
    while left:
        raw = _exactly(file, min(step, left))
        left -= len(raw)
        yield np.frombuffer(raw, dtype=head.dtype)
    file.read(1)


def _exactly(file: IO[bytes], size: int) -> bytes:
    parts = []
    while size:
        part = file.read(size)
        if not part:
            raise ValueError("the array ends before its last number")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _data_offset(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the content of a member begins: behind its local header, whose lengths are its own."""
    with path.open("rb") as file:
        file.seek(info.header_offset)
        raw = file.read(_LOCAL_HEADER)
    if len(raw) < _LOCAL_HEADER or not raw.startswith(_ZIP):
        raise ValueError("a member of the archive has no header")
    name, extra = struct.unpack("<HH", raw[26:30])
    return int(info.header_offset) + _LOCAL_HEADER + int(name) + int(extra)


class Packed:
    """An array in a compressed archive, unpacked as far as it is read. `entries`: how many of it count."""

    def __init__(self, path: Path, member: str, shape: tuple[int, ...], dtype: np.dtype[Any], entries: int) -> None:
        self._path = path
        self._member = member
        self._whole = shape
        self._dtype = dtype
        self._entries = entries
        self._at = 0
        self._reader: Generator[bytes, int, None] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._entries, *self._whole[1:])

    def first(self, entries: int) -> Packed:
        return Packed(self._path, self._member, self._whole, self._dtype, entries)

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Entries `start` to `stop`: quick where they follow those that were read last. Raises BadInput."""
        try:
            return self._read(part)
        except (OSError, *_DAMAGED) as error:
            # It was whole when the replay began.
            raise BadInput(f"{self._path} can not be read any more: {error}") from None

    def _read(self, part: slice) -> NDArray[Any]:
        first, stop, _ = part.indices(self._entries)
        stop = max(first, stop)
        if self._reader is None or first < self._at:
            self._reader, self._at = self._unpack(), 0
            next(self._reader)
        size = int(np.prod(self._whole[1:])) * self._dtype.itemsize
        for _ in range(first - self._at):
            self._reader.send(size)
        raw = self._reader.send((stop - first) * size)
        self._at = stop
        return np.frombuffer(raw, dtype=self._dtype).reshape(-1, *self._whole[1:])

    def _unpack(self) -> Generator[bytes, int, None]:
        """Sent a number of bytes, it gives the next ones."""
        with zipfile.ZipFile(self._path) as archive, archive.open(self._member) as file:
            _head_of(file)
            raw = b""
            while True:
                raw = _exactly(file, (yield raw))


def _time_of(archive: zipfile.ZipFile, names: Mapping[str, str], entries: int) -> tuple[int | None, float | None]:
    """Steps and seconds of an entry, where the file has `first_step`, `last_step` and `at`, one number an entry."""
    found: dict[str, NDArray[Any]] = {}
    for name in ("first_step", "last_step", "at"):
        if name in names:
            with archive.open(names[name]) as file:
                read = np.lib.format.read_array(file, allow_pickle=False)
            if read.shape == (entries,) and read.dtype.kind in "iuf" and np.isfinite(read).all():
                found[name] = read
    steps = None
    if "first_step" in found and "last_step" in found:
        steps = _mean_steps(np.stack([found["first_step"], found["last_step"]]))
    at = found.get("at")
    seconds = float(at[-1] - at[0]) / (entries - 1) if at is not None and entries > 1 else 0.0
    return steps, seconds if seconds > 0 else None


def _mean_steps(spans: NDArray[Any]) -> int | None:
    """Of `spans [2, W]`, first and last step; None where they are no spans."""
    mean = float((spans[1] - spans[0]).mean())
    return round(mean) if mean >= 1 else None
