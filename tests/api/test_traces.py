"""Trace files and recordings: read piece by piece, never believed before they are looked at, never lost half-way."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.recording import Recording
from api.simulating import compare
from api.traces import Packed, Recorded, read_trace, windows_trace
from controller.simulate import SimulationSettings
from eplane.errors import ApiProblem, BadInput

LOAD = np.random.default_rng(3).poisson(40, size=(90, 2, 6)).astype(np.int32)


def saved(path: Path, packed: bool = False, **more: Any) -> Path:
    (np.savez_compressed if packed else np.savez)(path, load=LOAD, **more)
    return path


@pytest.mark.parametrize("kind", ["npy", "npz", "packed", "fortran npy", "fortran npz", "big endian", "float16"])
def test_every_kind_of_file_reads_the_same_and_lazily(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.npz"
    if "npy" in kind:
        path = tmp_path / "trace.npy"
        np.save(path, np.asfortranarray(LOAD) if "fortran" in kind else LOAD)
    elif kind == "packed":
        saved(path, packed=True)
    elif kind == "fortran npz":
        np.savez(path, load=np.asfortranarray(LOAD))
    else:
        np.savez(path, load=LOAD.astype({"big endian": ">i4", "float16": np.float16}.get(kind, np.int32)))
    found = read_trace(path).load
    assert tuple(found.shape) == LOAD.shape
    assert (isinstance(found, Packed), isinstance(found, np.memmap)) == (
        kind == "packed",
        kind not in ("packed", "fortran npz"),
    )
    for first, stop in ((0, 7), (7, 20), (30, 31), (31, 31), (2, 5), (80, 200)):
        assert np.array_equal(found[first:stop], LOAD[first:stop])


def test_a_packed_trace_gives_the_same_results(tmp_path: Path) -> None:
    asked = SimulationSettings(3, 3, window=4, history=8)
    plain, packed = (read_trace(saved(tmp_path / f"{p}.npz", p)).first(70) for p in (False, True))
    assert isinstance(packed.load, Packed)
    assert packed.load.shape[0] == plain.load.shape[0] == 70
    for settings in (asked, SimulationSettings(3, 3, window=4, group={"confirm": False}, hardware="demo", every=3)):
        runs = [compare(trace.load, ("eplb", "static"), settings) for trace in (plain, packed)]
        one, two = ([[(w.next_mean, w.moves, w.sentence) for w in r.windows] for r in run] for run in runs)
        assert one == two
        assert len(one[0]) > 10


def test_a_file_knows_its_time(tmp_path: Path) -> None:
    first = np.arange(90) * 32
    more: dict[str, Any] = {"first_step": first, "last_step": first + 32, "at": 1e9 + np.arange(90) * 1.5}
    known = read_trace(saved(tmp_path / "t.npz", **more))
    assert (known.entry_steps, known.entry_s) == (32, 1.5)
    odd = read_trace(saved(tmp_path / "u.npz", first_step=first[:3], last_step=first[:3], at=np.full(90, np.nan)))
    assert (odd.entry_steps, odd.entry_s) == (None, None)
    windows = [{"load": [[1, 2]], "first_step": 8 * n, "last_step": 8 * n + 8} for n in range(3)]
    assert windows_trace(windows, "x").entry_steps == 8


def test_damage_anywhere_is_one_sentence(tmp_path: Path) -> None:
    for packed in (False, True):
        path = saved(tmp_path / f"{packed}.npz", packed)
        raw = path.read_bytes()
        spoiled = bytearray(raw)
        spoiled[len(raw) // 2] ^= 0xFF
        for content in (bytes(spoiled), raw[: len(raw) // 2], raw[:200]):
            path.write_bytes(content)
            with pytest.raises(BadInput, match=r"is not a \.npz with numbers"):
                read_trace(path)
    whole = tmp_path / "t.npy"
    np.save(whole, LOAD)
    whole.write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(BadInput, match="is not"):
        read_trace(whole)
    bad = LOAD.astype(float)
    bad[-1, -1, -1] = np.nan
    np.save(whole, bad)
    with pytest.raises(BadInput, match="holds NaN"):
        read_trace(whole)


def test_what_does_not_fit_into_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.npz"
    np.savez(path, load=np.asfortranarray(LOAD))

    def full(array: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("numpy.ascontiguousarray", full)
    with pytest.raises(BadInput, match="does not fit into memory"):
        read_trace(path)


def test_a_file_that_is_gone_in_the_middle_is_one_sentence(tmp_path: Path) -> None:
    path = saved(tmp_path / "t.npz", packed=True)
    trace = read_trace(path).load
    path.unlink()
    with pytest.raises(BadInput, match="can not be read any more"):
        trace[0:4]


def answered(first: int, count: int, world: str = "w" * 16, shape: tuple[int, int] = (2, 6)) -> bytes:
    made = io.BytesIO()
    steps = (first + np.arange(count)) * 8
    load = np.full((count, *shape), 3, dtype=np.int32)
    named = {name: np.array([value] * count) for name, value in (("world", world), ("digest", "d" * 16))}
    np.savez(made, load=load, first_step=steps, last_step=steps + 8, **named)
    return made.getvalue()


def test_a_recording_counts_what_it_missed_and_goes_on_in_another_world(tmp_path: Path) -> None:
    path = tmp_path / "r.npz"
    with Recording(path) as recording:
        assert recording.last == (None, -1)
        assert recording.add(answered(0, 3), 100.0) == 3
        assert recording.last == ("w" * 16, 24)
        recording.add(answered(3, 2), 102.0)
        assert recording.lost == 0
        recording.add(answered(9, 1), 104.0)
        assert recording.lost == 1
        recording.add(answered(0, 2, "v" * 16), 106.0)
        assert recording.lost == 1
        # At any moment what was recorded is a file by itself.
        assert read_trace(recording.part).load.shape == (8, 2, 6)
        assert recording.add(answered(0, 2, "u" * 16, (2, 7)), 108.0) == 0
        assert recording.ended == "the group serves 2 x 7 experts now, 2 x 6 are recorded"
        recording.finish()
    found = read_trace(path)
    assert (found.load.shape, found.entry_steps) == ((8, 2, 6), 8)
    assert found.entry_s == pytest.approx(6 / 7)
    assert list(tmp_path.iterdir()) == [path]


def test_a_recorder_that_is_killed_leaves_what_it_had(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "r.npz")
    with recording:
        recording.add(answered(0, 3), 1.0)
    assert read_trace(recording.part).load.shape == (3, 2, 6)
    with pytest.raises(BadInput, match=r"r\.npz\.part exists already"), Recording(tmp_path / "r.npz"):
        pass


def test_an_answer_that_is_no_recording_is_refused(tmp_path: Path) -> None:
    with Recording(tmp_path / "r.npz") as recording, pytest.raises(ApiProblem, match="can not be read"):
        recording.add(b"<html>", 1.0)
    assert list(tmp_path.iterdir()) == []


def test_only_the_first_entries(tmp_path: Path) -> None:
    trace = Recorded(LOAD, 4, 1.0)
    assert trace.first(None) is trace
    assert trace.first(500) is trace
    assert trace.first(5).load.shape == (5, 2, 6)
