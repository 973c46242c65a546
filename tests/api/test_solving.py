"""`eplane solve`: a problem in a file, an answer out, and the two kinds of refusal."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from api.cli import run
from controller.solver.parse import FIELDS

PROBLEM: dict[str, Any] = {
    "load": [[90, 10, 10, 10]],
    "ranks": 2,
    "slots_per_rank": 3,
    "policy": "eplb",
}


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(PROBLEM))
    return path


def test_the_answer_goes_to_standard_output(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["solve", str(problem)]) == 0
    answer = json.loads(capsys.readouterr().out)
    (placement,) = answer["placement"]
    assert {e for e in placement if e >= 0} == {0, 1, 2, 3}
    assert 0.9 < answer["balancedness"][0] <= 1


def test_the_answer_goes_to_a_file(problem: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answer.json"
    assert run(["solve", str(problem), "-o", str(out), "--policy", "static", "--table"]) == 0
    assert json.loads(out.read_text())["policy"] == "static"
    assert "BALANCEDNESS" in capsys.readouterr().out
    assert run(["solve", str(problem), "-o", str(tmp_path / "no" / "folder.json")]) == 2
    assert "can not be written" in capsys.readouterr().err


def test_the_problem_may_come_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(PROBLEM)))
    assert run(["solve", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["policy"] == "eplb"


BAD: list[tuple[str, str]] = [
    ("{no", "is not JSON"),
    ("[]", "a problem is a JSON object"),
    ("[" * 100_000, "is not JSON"),
    (json.dumps({**PROBLEM, "ranks": 0}), "ranks"),
    (json.dumps(PROBLEM)[:-1] + ', "ranks": 4}', "'ranks' stands twice in one object"),
    (json.dumps({**PROBLEM, "slots_per_rank": float("inf")}), "slots_per_rank: must be a whole number"),
    (json.dumps({**PROBLEM, "prior": [[1e30, 1, 2, 3, 0, 0]]}), "prior: id 1e+30 out of range"),
    (json.dumps({**PROBLEM, "bundle_bytes": 1e300}), "bundle_bytes: is 1e+300, must be"),
    (json.dumps({**PROBLEM, "load": [[1, -1, 1, 1]]}), "load"),
    (json.dumps({**PROBLEM, "policy": "best"}), "policy"),
    (json.dumps({**PROBLEM, "speed": 1}), "speed"),
]


@pytest.mark.parametrize(("text", "says"), BAD, ids=[says for _, says in BAD])
def test_a_problem_that_can_not_be_read(
    problem: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    problem.write_text(text)
    assert run(["solve", str(problem)]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_the_examples_of_the_documentation_are_solved(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    problem.write_text(example)
    assert run(["solve", str(problem)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert min(answer["balancedness"]) > 0.8
    exec(program, {})
    assert answer["decisions"][0] in capsys.readouterr().out
    for name in FIELDS:
        assert re.search(rf"`{name}\b", text), f"{name} is not documented"


def test_help_says_where_the_fields_are(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("solve", "simulate"):
        assert run([command, "--help"]) == 0
        assert "docs/cli.md" in capsys.readouterr().out


def test_goals_that_can_not_be_met(problem: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem.write_text(json.dumps({**PROBLEM, "slots_per_rank": 1}))
    assert run(["solve", str(problem)]) == 3
    err = capsys.readouterr().err
    assert err.startswith("eplane: goal ")
    assert err.count("\n") == 1
