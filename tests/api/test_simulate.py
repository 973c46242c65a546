"""`eplane simulate`: a trace in, policies side by side out, and every refusal in one sentence."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from api.cli import run
from controller.settings import GroupSettings
from eplane.placement import linear
from tests.api.desk import SmallController
from tests.api.serving import served

SHAPE = ("--ranks", "4", "--slots", "3", "--policy", "static,eplb")


@pytest.fixture
def load() -> np.ndarray[Any, Any]:
    """Six windows, two layers, eight experts; the first experts are hot, a little otherwise in each window."""
    hot = 1000 / (1 + np.arange(8)) ** 1.5
    return np.random.default_rng(7).poisson(hot, size=(6, 2, 8)).astype(np.uint16)


@pytest.fixture
def trace(tmp_path: Path, load: np.ndarray[Any, Any]) -> Path:
    path = tmp_path / "trace.npz"
    np.savez(path, load=load, names=np.array(["a", "b"]), counts=load[:, 0])
    return path


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["simulate", *arguments, "-o", "json"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    value: dict[str, Any] = json.loads(said.out)
    return value


def timeless(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The results without what a clock measured."""
    results = []
    for result in value["results"]:
        rows = [{k: v for k, v in row.items() if k != "solve_s"} for row in result["windows_detail"]]
        results.append({**result, "solve_ms": None, "windows_detail": rows})
    return results


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert run(["simulate", *arguments]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    return said.err


def test_one_is_told_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.npy"
    np.save(path, np.ones((2, 1, 2)))
    assert run(["simulate", str(path), "--ranks", "2", "--slots", "1", "--policy", "static", "--prior", "linear"]) == 0
    said = capsys.readouterr().out
    assert "2 entries, 1 x 2 experts on 2 ranks with 1 slot\n" in said
    assert "\n1 decision, one every 1 entry; " in said
    np.save(path, np.ones((1, 1, 2)))
    assert "the trace has 1 entry, 3 at least" in refused(capsys, str(path), "--ranks", "2", "--slots", "1")


def test_policies_side_by_side(trace: Path, load: np.ndarray[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    value = answered(capsys, str(trace), "--ranks", "4", "--slots", "2", "--policy", "eplb,static", "--nodes", "2")
    assert (value["entries"], value["layers"], value["experts"], value["ranks"]) == (6, 2, 8, 4)
    eplb, static = value["results"]
    assert (eplb["policy"], static["policy"]) == ("eplb", "static")
    # Without a spare slot `static` leaves the experts where they are: two in a row on each rank.
    ranks = load[2:].astype(float).reshape(4, 2, 4, 2).sum(axis=3)
    balance = ranks.mean(axis=2) / ranks.max(axis=2)
    assert static["next"] == pytest.approx(balance.mean())
    assert static["next_p5"] == pytest.approx(np.mean([np.percentile(b, 5) for b in balance]))
    assert (static["moves"], static["rebalances"], static["bytes"], static["windows"]) == (0, 0, 0, 4)
    assert eplb["next"] > static["next"] + 0.1
    assert 0 < eplb["step_us"] <= static["step_us"]
    assert eplb["steps_a_second"] == pytest.approx(1e6 / eplb["step_us"])
    assert len(eplb["windows_detail"]) == 5


def test_windows_of_several_entries(trace: Path, load: np.ndarray[Any, Any], tmp_path: Path, capsys: Any) -> None:
    summed = tmp_path / "summed.npy"
    np.save(summed, load.reshape(3, 2, 2, 8).sum(axis=1))
    pairs = answered(capsys, str(trace), *SHAPE, "--window", "2")
    ones = answered(capsys, str(summed), *SHAPE)
    assert pairs["results"][0]["windows"] == 1
    assert pairs["results"][0]["next"] == pytest.approx(ones["results"][0]["next"])
    assert answered(capsys, str(trace), *SHAPE, "--limit", "4")["entries"] == 4


def test_the_recorded_format_gives_the_same(
    trace: Path, load: np.ndarray[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [{"world": "before", "load": [[1.0, 2.0]]}]
    path = tmp_path / "windows.json"
    path.write_text(json.dumps({"windows": [*old, *({"world": "now", "load": w.tolist()} for w in load)]}))
    assert timeless(answered(capsys, str(path), *SHAPE)) == timeless(answered(capsys, str(trace), *SHAPE))


def test_slots_by_rank_and_fields_of_the_problem(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = answered(capsys, str(trace), "--ranks", "4", "--slots", "3,2,2,2", "--policy", "eplb", "--hardware", "none")
    assert (value["slots_per_rank"], value["hardware"], value["results"][0]["step_us"]) == ([3, 2, 2, 2], None, None)
    small = answered(capsys, str(trace), *SHAPE, "--set", "bundle_bytes=10")["results"][1]
    assert small["bytes"] == 10 * small["moves"] > 0
    far = ("--gate", "--set", "bundle_bytes=1000000000000", "--set", "horizon_s=0.5")
    held = answered(capsys, str(trace), *SHAPE, *far)["results"][1]
    assert held["moves"] == 0
    assert held["refused"] == {"gain": held["verdicts"]["not_worth_it"]}


def test_the_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(trace), *SHAPE]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert lines[0].endswith("6 entries, 2 x 8 experts on 4 ranks with 3 slots")
    assert lines[2].split()[:3] == ["POLICY", "NEXT", "P5"]
    assert [line.split()[0] for line in lines[3:5]] == ["static", "eplb"]
    assert {len(line.split()) for line in lines[2:5]} == {11}
    assert lines[6].startswith("4 decisions after the first, one every 1 entry")


def test_the_shipped_trace(capsys: pytest.CaptureFixture[str]) -> None:
    value = answered(capsys, "shift", "--limit", "4", "--policy", "static")
    assert (value["layers"], value["experts"], value["slots_per_rank"]) == (8, 32, 5)


def test_the_picture(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "out.png"
    answered(capsys, str(trace), *SHAPE, "--picture", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_a_picture_that_can_not_be_drawn_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = str(tmp_path / "none.npz")
    assert "out.doc: the name must end with" in refused(capsys, nothing, "--picture", "out.doc")
    assert "there is no folder" in refused(capsys, nothing, "--picture", str(tmp_path / "no" / "out.png"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "needs matplotlib" in refused(capsys, nothing, "--picture", str(tmp_path / "out.png"))


def test_as_a_controller_with_settings_of_a_file(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The settings as `eplane config show -o json` gives them; --set changes one more, for this run only."""
    path = tmp_path / "settings.json"
    free = {"confirm": False, "cooldown_s": 0, "min_window_tokens": 1, "window": 2, "interval_s": 2}
    path.write_text(json.dumps({**GroupSettings().shown(), **free}))
    value = answered(capsys, str(trace), *SHAPE, "--settings", str(path), "--every", "1")
    assert (value["gate"], value["window"], value["every"], value["prior"]) == (True, 2, 1, "linear")
    # The cost model of the settings, as none was asked for.
    assert value["hardware"] == "demo"
    static, eplb = value["results"]
    assert static["verdicts"] == {"static": 4}
    assert eplb["verdicts"]["started"] == eplb["rebalances"] == eplb["windows"] - sum(eplb["refused"].values()) > 0
    assert eplb["waves"] >= eplb["rebalances"]
    assert eplb["migration_s"] > 0
    begun = [row for row in eplb["windows_detail"] if row["acted"]]
    assert all(row["sentence"].startswith(f"a migration begins, {row['moves']} moves in") for row in begun)
    one = answered(capsys, str(trace), *SHAPE, "--settings", str(path), "--set", "max_moves_per_wave=1", "--every", "1")
    assert one["results"][1]["waves"] > eplb["waves"]
    path_of_none = tmp_path / "defaults.json"
    path_of_none.write_text("{}")
    short = (str(trace), *SHAPE, "--settings", str(path_of_none))
    assert "window: is 16; the trace has 6 entries" in refused(capsys, *short)
    held = answered(capsys, str(trace), *SHAPE, "--settings", str(path), "--set", "moves_per_hour=0", "--every", "1")
    assert held["results"][1]["moves"] == 0
    assert set(held["results"][1]["refused"]) <= {"moves_per_hour", "gain"}
    assert run(["simulate", str(trace), *SHAPE, "--settings", str(path), "--set", "moves_per_hour=0"]) == 0
    table = capsys.readouterr().out
    assert "moves_per_hour refused" in table
    assert "0 an hour are allowed" in table
    assert "WAVES" in table


def test_where_it_starts(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear_ = answered(capsys, str(trace), *SHAPE, "--prior", "linear")
    assert (linear_["prior"], linear_["results"][1]["windows"]) == ("linear", 5)
    path = tmp_path / "placement.json"
    table = linear(2, 8, 4, 3).p2l.tolist()
    for held in ({"p2l": table, "ranks": 4}, {"placement": table}, table):
        path.write_text(json.dumps(held))
        value = answered(capsys, str(trace), *SHAPE, "--prior", str(path))
        assert value["prior"] == "given"
        assert timeless(value) == timeless(linear_)
    path.write_text('{"p2l": []}')
    assert "must hold a table" in refused(capsys, str(trace), *SHAPE, "--prior", str(path))
    path.write_text("[[0, 1], [0, 1]]")
    assert "prior" in refused(capsys, str(trace), *SHAPE, "--prior", str(path))
    assert "can not be read" in refused(capsys, str(trace), *SHAPE, "--prior", str(tmp_path / "none"))


def test_as_the_groups_own_controller(trace: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """--settings group: its world, its settings, what serves there now. Its trace has its shape."""
    small = SmallController()
    small.small.recorded = 6
    small.small.settings = {"policy": "eplb", "window": 2, "confirm": False, "min_window_tokens": 1, "hardware": "cpu"}
    path = tmp_path / "own.npz"
    with served(small) as url:
        to = ("--url", url, "-g", "g")
        assert run(["load", "--record", str(path), "--for", "0", *to]) == 0
        capsys.readouterr()
        value = answered(capsys, str(path), "--settings", "group", "--policy", "eplb", *to)
        assert (value["ranks"], value["slots_per_rank"], value["window"], value["prior"]) == (2, 2, 2, "given")
        assert (value["hardware"], value["gate"], value["nodes"]) == ("cpu", True, 1)
        alone = answered(capsys, str(path), "--prior", "group", "--policy", "eplb", *to)
        assert (alone["gate"], alone["prior"], alone["window"]) == (False, "given", 1)
        assert small.small.changes == []
        other = refused(capsys, str(trace), "--settings", "group", *to, code=3)
        assert "goal capacity cannot be met: layer 0 has 4 slots for 8 experts" in other
    assert "no controller answers" in refused(
        capsys, str(path), "--settings", "group", "--url", "http://127.0.0.1:1", "--patience", "0", code=5
    )


BAD_OPTIONS = [
    (("--policy", "best"), "policy"),
    (("--policy", ","), "policies"),
    (("--policy", "eplb,eplb"), "policies: names one policy twice"),
    (("--hardware", "abacus"), "hardware"),
    (("--slots", "many"), "--slots"),
    (("--slots", "3,3"), "slots_per_rank"),
    (("--nodes", "3"), "nodes"),
    (("--ranks", "0"), "--ranks"),
    (("--window", "3"), "window"),
    (("--gate", "--hardware", "none"), "hardware"),
    (("--set", "speed=1"), "speed"),
    (("--gate", "--set", "speed=1"), "speed"),
    (("--gate", "--set", 'drained=["n7"]'), "drained: names node n7"),
    (("--gate", "--set", "min_gain=2"), "min_gain"),
    (("--gate", "--slots", "3,2,2,2"), "slots_per_rank"),
    (("--gate", "--window", "6"), "window"),
    (("--settings", "/no/such/file"), "/no/such/file can not be read"),
    (("--every", "0"), "--every"),
    (("--delay", "-1"), "--delay"),
    (("--every", "6"), "window"),
    (("--set", "prior=null"), "prior"),
    (("--set", "speed"), "--set"),
    (("--array", "none"), "has no array 'none'; it holds load, names, counts"),
    (("--array", "names"), "names holds <U1, not numbers"),
    (("--array", "counts"), "counts has shape [6, 8]"),
]


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS, ids=[" ".join(o) for o, _ in BAD_OPTIONS])
def test_options_that_can_not_be_used(
    trace: Path, options: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refused(capsys, str(trace), "--ranks", "4", *options)


def test_files_that_can_not_be_used(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = trace.read_bytes()
    path = tmp_path / "bad.npz"
    assert "bad.npz can not be read: No such file" in refused(capsys, str(path))
    assert "can not be read" in refused(capsys, str(tmp_path))
    spoiled = bytearray(whole)
    # Inside the data of the first array, so that only the archive's checksum tells.
    spoiled[len(whole) // 8 + 100] ^= 0xFF
    for content in (b"", b"PK\x03\x04", b"words", whole[: len(whole) // 2], bytes(spoiled)):
        path.write_bytes(content)
        assert "bad.npz is not a .npz with numbers" in refused(capsys, str(path))
    np.savez(path, load=np.array([{"a": 1}], dtype=object))
    assert "bad.npz is not a .npz with numbers" in refused(capsys, str(path))
    for wrong, says in ((np.nan, "NaN"), (np.inf, "infinity"), (-1.0, "negative")):
        np.savez(path, load=np.full((4, 1, 4), wrong))
        assert f"bad.npz: load holds {says}" in refused(capsys, str(path)).replace("NaN or infinity", says)
    np.savez(path, load=np.zeros((4, 0, 4)))
    assert "load has shape [4, 0, 4]" in refused(capsys, str(path))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{no", "is not JSON"),
        ("[]", "windows: must be"),
        ('{"windows": [{"step": 1}]}', "windows: must be"),
        ('[{"load": [[1, 2]]}, {"load": [[1]]}]', "do not have one shape"),
        ('[{"load": "x"}]', "not numbers"),
        ('[{"load": [1, 2]}]', "has shape [1, 2]"),
    ],
)
def test_recorded_windows_that_can_not_be_used(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "windows.json"
    path.write_text(text)
    error = refused(capsys, str(path))
    assert says in error
    assert "windows.json" in error


def test_too_little_memory_is_one_sentence(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr("api.simulating.compare", full)
        assert "there is not enough memory for a replay" in refused(capsys, str(trace), *SHAPE)
    monkeypatch.setattr("json.loads", full)
    windows = trace.with_suffix(".json")
    windows.write_text("[]")
    assert "does not fit into memory" in refused(capsys, str(windows), *SHAPE)


def test_goals_that_can_not_be_met(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "goal capacity" in refused(capsys, str(trace), "--ranks", "4", "--slots", "1", code=3)
    few = (str(trace), *SHAPE, "--gate", "--nodes", "2")
    for setting, goal in (("min_replicas=2", "min_replicas"), ('drained=["n1"]', "drained")):
        assert f"goal {goal} cannot be met" in refused(capsys, *few, "--set", setting, code=3)


def test_help_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from api.cli import run\n"
        "assert run(['simulate', '--help']) == 0\n"
        "heavy = ('numpy', 'numba', 'rich.progress', 'matplotlib', 'fastapi')\n"
        "print(sorted(set(heavy) & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "[]\n"


def test_the_bar_is_for_people_only(trace: Path) -> None:
    command = [sys.executable, "-m", "api.cli", "simulate", str(trace), *SHAPE, "-o", "json"]
    seen, terminal = os.openpty()
    try:
        env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=terminal, timeout=60, check=True, env=env)
        # As it comes: how much the bar has drawn depends on how long the run took.
        parts = []
        while select.select([seen], [], [], 0)[0]:
            parts.append(os.read(seen, 65536))
        bar = b"".join(parts).decode()
    finally:
        os.close(terminal)
        os.close(seen)
    assert len(json.loads(done.stdout)["results"]) == 2
    assert "eplb" in bar
    assert "5/5" in bar
