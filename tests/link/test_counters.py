"""Counters: no token is lost or counted twice, whatever the reader and the writer go through."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from eplane.errors import CounterError, LoadReportError
from eplane.load import SubWindow, fold
from eplane.placement import linear
from runtime.link import counters
from runtime.link.counters import MIXED_DIGEST, RING, CounterReader, CounterWriter

WORLD = "00112233445566aa"
A, B = "aa" * 8, "bb" * 8
L, K = 3, 4

WRITER = """
import sys
import numpy as np
from runtime.link.counters import CounterWriter
writer = CounterWriter(sys.argv[1], sys.argv[2], 1, 3, 4, 4)
steps = int(sys.argv[3])
for step in range(steps):
    if writer.due(step):
        writer.cut(step, "aa" * 8)
    writer.add(step, np.full((3, 4), 2), np.arange(12).reshape(3, 4) + step)
writer.cut(steps, "aa" * 8)
print("done", flush=True)
sys.stdin.read()
"""


def full(value: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.full((L, K), value, dtype=np.int64)


def writer_at(path: Path, world: str = WORLD) -> CounterWriter:
    return CounterWriter(path, world, 1, L, K, 8)


def test_windows_are_differences_with_their_steps_and_digest(tmp_path: Path) -> None:
    writer = writer_at(tmp_path / "c")
    writer.add(0, full(1), full(2))
    writer.add(3, full(1), full(0))
    assert writer.cut(8, A)
    assert not writer.cut(8, A), "a window has at least one step"
    writer.add(8, full(5), full(0))
    assert writer.cut(11, A)
    assert writer.cut(16, B)
    windows = CounterReader(tmp_path / "c").read_since(0)
    assert [(w.seq, w.first_step, w.last_step, w.digest) for w in windows] == [
        (1, 0, 8, A),
        (2, 8, 11, A),
        (3, 11, 16, B),
    ]
    assert [w.tokens for w in windows] == [4 * L * K, 5 * L * K, 0]
    assert (windows[0].prefill == 2).all()
    assert windows[0].world == WORLD
    assert windows[0].rank == 1
    assert [step for step in range(40) if writer.due(step)] == [8, 16, 24, 32]


def test_a_second_read_goes_on_where_the_first_ended(tmp_path: Path) -> None:
    writer, reader = writer_at(tmp_path / "c"), CounterReader(tmp_path / "c")
    for window in range(3):
        writer.add(window, full(window + 1), full(0))
        writer.cut(window + 1, A)
        (only,) = reader.read_since(window)
        assert only.tokens == (window + 1) * L * K
    assert reader.read_since(3) == []
    again = reader.read_since(1)
    assert [w.seq for w in again] == [2, 3], "asking again gives the same windows"


@pytest.mark.parametrize("switched", [False, True])
def test_a_reader_that_was_away_loses_no_token(tmp_path: Path, switched: bool) -> None:
    writer, reader = writer_at(tmp_path / "c"), CounterReader(tmp_path / "c")
    writer.add(0, full(1), full(0))
    writer.cut(1, A)
    (first,) = reader.read_since(0)
    for step in range(1, 3 * RING):
        writer.add(step, full(1), full(1))
        writer.cut(step + 1, B if switched and step >= RING else A)
    windows = reader.read_since(first.seq)
    assert len(windows) == RING
    assert sum(w.tokens for w in windows) == (3 * RING - 1) * 2 * L * K
    assert windows[0].first_step == 1
    assert [w.last_step for w in windows] == list(range(2 * RING + 1, 3 * RING + 1))
    assert windows[0].digest == (MIXED_DIGEST if switched else A)
    assert {w.digest for w in windows[1:]} == {B if switched else A}


def test_a_mixed_window_is_not_folded(tmp_path: Path) -> None:
    placement = linear(L, 4, 1, K)
    mixed = SubWindow(WORLD, MIXED_DIGEST, 0, 8, 0, full(1), full(1), 1)
    with pytest.raises(LoadReportError, match="counted under"):
        fold(placement, [mixed])


def test_a_reader_that_starts_late_begins_with_the_world_or_with_what_is_left(tmp_path: Path) -> None:
    writer = writer_at(tmp_path / "c")
    for step in range(2 * RING):
        writer.add(step, full(1), full(0))
        writer.cut(step + 1, A)
    windows = CounterReader(tmp_path / "c").read_since(0)
    assert sum(w.tokens for w in windows) == 2 * RING * L * K
    assert windows[0].first_step == 0
    windows = CounterReader(tmp_path / "c").read_since(5)
    assert [w.seq for w in windows] == list(range(RING + 2, 2 * RING + 1))
    windows = CounterReader(tmp_path / "c").read_since(RING + 10)
    assert windows[0].seq == RING + 11, "a new reader can go on from a window that is still in the ring"


def entry_at(path: Path, seq: int) -> tuple[int, int]:
    size = counters._entry_bytes(L, K)
    return counters.HEADER_BYTES + (seq - 1) % RING * size, size


def tear(path: Path, seq: int) -> None:
    """Leaves the entry as a writer would that died in the middle of it."""
    start, size = entry_at(path, seq)
    with path.open("r+b") as file:
        counts = 8 * L * K
        file.seek(start + size - counts)
        file.write(np.full((L, K), 1000, dtype="<i8").tobytes())


def test_a_torn_entry_is_seen_and_its_tokens_come_with_the_next(tmp_path: Path) -> None:
    path = tmp_path / "c"
    writer = writer_at(path)
    for step in range(4):
        writer.add(step, full(1), full(0))
        writer.cut(step + 1, A)
    tear(path, 3)
    reader = CounterReader(path)
    windows = reader.read_since(0)
    assert [w.seq for w in windows] == [1, 2, 4]
    assert [w.tokens for w in windows] == [L * K, L * K, 2 * L * K]
    assert reader.torn == 1


def test_without_the_crc_a_torn_entry_would_be_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c"
    writer = writer_at(path)
    for step in range(4):
        writer.add(step, full(1), full(0))
        writer.cut(step + 1, A)
    monkeypatch.setattr(counters.zlib, "crc32", lambda data: 0)
    reader = CounterReader(path)
    with path.open("r+b") as file:  # The header and entries as a writer without a CRC leaves them.
        file.seek(counters._HEAD.size)
        file.write(bytes(4))
        for seq in range(1, 5):
            file.seek(entry_at(path, seq)[0])
            file.write(bytes(4))
    tear(path, 4)
    assert sum(w.tokens for w in reader.read_since(0)) > 4 * L * K


def test_a_new_world_replaces_the_file_and_the_reader_follows(tmp_path: Path) -> None:
    path = tmp_path / "c"
    old = writer_at(path)
    old.add(0, full(9), full(9))
    old.cut(8, A)
    reader = CounterReader(path)
    assert reader.read_since(0)[0].world == WORLD
    new = writer_at(path, "ff" * 8)
    new.add(0, full(1), full(0))
    new.cut(8, B)
    (window,) = reader.read_since(1)
    assert (window.world, window.seq, window.tokens) == ("ff" * 8, 1, L * K)
    assert reader.read_since(1) == []


def test_no_file_and_foreign_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with pytest.raises(CounterError, match="no counters"):
        CounterReader(path).read_since(0)
    for content in (b"", b"x", b"\0" * 4096):
        path.write_bytes(content)
        with pytest.raises(CounterError):
            CounterReader(path).read_since(0)
    writer_at(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CounterError, match="no counters file"):
        CounterReader(path).read_since(0)
    with pytest.raises(CounterError):
        CounterWriter(path, WORLD, 0, 0, K, 8)
    with pytest.raises(CounterError):
        CounterWriter(tmp_path / "no" / "c", WORLD, 0, L, K, 8)


def test_a_reader_beside_a_real_writer_process_counts_every_token(tmp_path: Path) -> None:
    path, steps = tmp_path / "c", 6000
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), WORLD, str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    done = threading.Event()
    assert process.stdout is not None
    waiter = threading.Thread(target=lambda: (process.stdout.readline(), done.set()))  # type: ignore[union-attr]
    waiter.start()
    reader = CounterReader(path)
    seen: list[SubWindow] = []
    while True:
        ended = done.is_set()
        try:
            seen += reader.read_since(seen[-1].seq if seen else 0)
        except CounterError:
            done.wait(0.01)  # The writer has not made its file yet.
            continue
        if ended:
            break
    process.communicate("")
    waiter.join()
    assert process.returncode == 0
    assert [w.first_step for w in seen[1:]] == [w.last_step for w in seen[:-1]], "no gap and no overlap"
    assert seen[-1].last_step == steps
    prefill = sum(w.prefill for w in seen)
    decode = sum(w.decode for w in seen)
    assert (prefill == 2 * steps).all()
    assert (decode == np.arange(12).reshape(L, K) * steps + steps * (steps - 1) // 2).all()
