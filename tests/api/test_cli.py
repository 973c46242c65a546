"""The command line: what it prints, what it asks for, its exit codes, and what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

from api.auth import Auth, AuthSettings
from api.cli import run
from tests.api.desk import SmallController
from tests.api.serving import served

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[SmallController, str]]:
    controller = SmallController()
    with served(controller) as url:
        yield controller, url


@pytest.fixture
def controller(server: tuple[SmallController, str]) -> SmallController:
    server[0].__init__()  # type: ignore[misc]
    return server[0]


@pytest.fixture
def eplane(
    server: tuple[SmallController, str],
    controller: SmallController,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Command:
    """Run a command against the small controller: (exit code, standard output, standard error)."""
    monkeypatch.setenv("EPLANE_URL", server[1])
    monkeypatch.setenv("EPLANE_GROUP", "g")
    monkeypatch.setenv("EPLANE_ACTOR", "me")

    def command(*arguments: str) -> tuple[int, str, str]:
        code = run(list(arguments))
        seen = capsys.readouterr()
        return code, seen.out, seen.err

    return command


READS = {
    ("status",): ["propose", "epoch", "0.710", "the load is level enough", "n0"],
    ("load",): ["LAYER", "BALANCEDNESS", "0.714"],
    ("load", "--layer", "0"): ["RANK", "7"],
    ("placement",): ["epoch 3", "0 1", "2 ."],
    ("placement", "--epoch", "2", "--layer", "0"): ["epoch 2"],
    ("nodes",): ["n0", "0,1"],
    ("goals",): ["worth", "NO", "gains less"],
    ("anomalies",): ["nothing"],
    ("history", "--limit", "2"): ["EPOCH", "3", "someone", "4.0 KiB", "tilted"],
    ("explain", "0", "1"): ["expert 1 is on rank 0"],
    ("leader",): ["g", "http://127.0.0.1:7071"],
    ("mode",): ["propose"],
    ("config", "show"): ["interval_s  3.0", 'policy      "eplane"'],
    ("plan", "list"): ["p1", "PROPOSED", "2.0 KiB"],
    ("plan", "show", "p1"): ["0.600 -> 0.900", "gains 1.5 s", "load is tilted"],
    ("migration", "list"): ["none"],
}


@pytest.mark.parametrize("command", READS)
def test_what_a_person_reads(eplane: Command, controller: SmallController, command: tuple[str, ...]) -> None:
    code, out, err = eplane(*command)
    assert (code, err) == (0, "")
    for word in READS[command]:
        assert word in out
    assert controller.small.changes == []


@pytest.mark.parametrize("command", [c for c in READS if "--layer" not in c])
def test_what_a_script_reads(eplane: Command, command: tuple[str, ...]) -> None:
    _, as_json, _ = eplane(*command, "-o", "json")
    _, as_yaml, _ = eplane(*command, "-o", "yaml")
    assert yaml.safe_load(as_yaml) == json.loads(as_json)


def test_one_layer_is_one_layer_for_scripts_too(eplane: Command, controller: SmallController) -> None:
    controller.small.layers = 2
    whole = json.loads(eplane("load", "-o", "json")[1])
    one = json.loads(eplane("load", "--layer", "1", "-o", "json")[1])
    assert len(whole["load"]) == len(whole["rank_load"]) == 2
    assert (one["layer"], one["load"], one["rank_load"]) == (1, whole["load"][1:], whole["rank_load"][1:])
    assert one["windows"] == whole["windows"]
    table = json.loads(eplane("placement", "-o", "json")[1])["p2l"]
    one = json.loads(eplane("placement", "--layer", "1", "-o", "json")[1])
    assert (one["layer"], one["p2l"]) == (1, table[1:])
    assert eplane("placement", "--layer", "1")[1].splitlines()[2].split()[0] == "1"


def test_a_recording_becomes_a_trace(eplane: Command, controller: SmallController, tmp_path: Path) -> None:
    path, small = tmp_path / "long.npz", controller.small
    small.recorded = 5
    code, out, err = eplane("load", "--record", str(path), "--for", "0", "-o", "json")
    assert (code, err) == (0, "")
    assert {k: v for k, v in json.loads(out).items() if k != "seconds"} == {
        "file": str(path), "windows": 5, "gaps": 0, "tokens": 50, "ended_by": "the time given",
    }  # fmt: skip
    assert sorted(tmp_path.iterdir()) == [path]
    with np.load(path) as found:
        assert found["load"].shape == (5, 1, 3)
        assert found["last_step"].tolist() == [8, 16, 24, 32, 40]
    code, out, _ = eplane("simulate", str(path), "--ranks", "2", "--slots", "2", "--policy", "static", "-o", "json")
    assert (code, json.loads(out)["entries"]) == (0, 5)
    assert "exists already" in eplane("load", "--record", str(path), "--for", "0")[2]
    assert "must end with .npz" in eplane("load", "--record", str(tmp_path / "x"), "--for", "0")[2]
    assert "can not be written" in eplane("load", "--record", "/no/such/x.npz", "--for", "0")[2]
    small.recorded = 0
    assert "nothing is recorded" in eplane("load", "--record", str(tmp_path / "none.npz"), "--for", "0")[1]
    assert sorted(tmp_path.iterdir()) == [path]


def test_rebalance_is_dry_by_default(eplane: Command, controller: SmallController) -> None:
    code, out, _ = eplane("rebalance", "--policy", "eplb", "--option", "max_moves=4", "--option", "how=gently")
    assert code == 0
    assert "dry run: nothing was moved" in out
    why = "asked for on the command line"
    assert controller.small.changes == [("propose", "eplb", "me", why, {"max_moves": 4, "how": "gently"})]
    assert controller.small.migrations_by_id == {}


def test_rebalance_executes_when_told_to(eplane: Command, controller: SmallController) -> None:
    code, out, _ = eplane("rebalance", "--execute", "--wait", "--reason", "evening", "-o", "json")
    assert code == 0
    assert json.loads(out)["state"] == "DONE"
    assert controller.small.changes[1] == ("execute", "p2", 3, "me", "evening")
    code, out, _ = eplane("rebalance", "--execute")
    assert (code, "m2" in out) == (0, True)


def test_rebalance_without_a_reason_to_move(eplane: Command, controller: SmallController) -> None:
    controller.small.no_plan = "the gain is smaller than the cost"
    code, out, _ = eplane("rebalance", "--execute")
    assert (code, out.strip()) == (0, "the gain is smaller than the cost")


def test_plan_and_rollback_and_migration(eplane: Command, controller: SmallController) -> None:
    small = controller.small
    assert eplane("plan", "execute", "p1", "--wait")[0] == 0
    out = eplane("migration", "show", "m1")[1]
    assert "DONE" in out
    assert "1/0/0" in out
    assert "m1" in eplane("migration", "list")[1]
    assert eplane("migration", "abort", "m1", "--wait")[0] == 0
    assert "DISCARDED" in eplane("plan", "discard", "p1")[1]
    code, out, _ = eplane("rollback", "1")
    assert (code, "dry run" in out, small.changes[-1][0]) == (0, True, "rollback")
    assert eplane("rollback", "1", "--execute")[0] == 0
    assert small.changes[-1][0] == "execute"


def test_mode_pause_and_config(eplane: Command, controller: SmallController) -> None:
    small = controller.small
    assert "auto" in eplane("mode", "auto")[1]
    assert eplane("pause", "--reason", "upgrade")[0] == 0
    assert small.paused
    assert "PAUSED" in eplane("status")[1]
    assert eplane("resume")[0] == 0
    assert "9.5" in eplane("config", "set", "interval_s=9.5", "policy=eplb")[1]
    assert small.settings == {"policy": "eplb", "interval_s": 9.5}
    assert small.changes[1] == ("pause", "me", "upgrade")


def test_exit_codes(eplane: Command, controller: SmallController) -> None:
    small = controller.small
    assert eplane("plan", "show", "p9") == (2, "", "eplane: there is no plan p9\n")
    assert eplane("mode", "full")[0] == 2
    small.refuses = "goal capacity says NO: rank 1 has no free cell"
    assert eplane("rebalance") == (3, "", f"eplane: {small.refuses}\n")
    small.refuses = None
    code, _, err = eplane("plan", "execute", "p1", "--epoch", "2")
    assert (code, err) == (4, "eplane: the group is at epoch 3, the request assumes 2\n")
    assert eplane("rollback", "7")[0] == 4
    small.down = True
    code, _, err = eplane("pause", "--patience", "0")
    assert (code, "no endpoint answers" in err) == (5, True)
    small.down, small.breaks = False, True
    assert eplane("pause", "--patience", "0")[0] == 5
    code, _, err = eplane("status", "--url", "http://127.0.0.1:1", "--patience", "0")
    assert (code, err.count("\n"), "no controller answers" in err) == (5, 1, True)


def test_a_migration_that_does_not_get_through_is_a_conflict(eplane: Command, controller: SmallController) -> None:
    controller.small.migrations_by_id["m1"] = {"id": "m1", "state": "RUNNING", "ends": "ABORTED"}
    from api.cli.migration import await_end
    from api.cli.output import Output
    from api.cli.session import Session
    from eplane.errors import Conflict

    session = Session("g", Output.JSON, os.environ["EPLANE_URL"], None, None, 1.0)
    with pytest.raises(Conflict, match="m1 ended ABORTED"):
        await_end(session, "m1")
    session.close()


@pytest.mark.parametrize("paused", [False, True])
def test_waiting_has_an_end_and_says_what_holds_it_up(
    eplane: Command, controller: SmallController, paused: bool
) -> None:
    small = controller.small
    small.paused, small.end_of_migrations = paused, "RUNNING"
    code, out, err = eplane("rebalance", "--execute", "--wait", "--timeout", "0.6")
    assert (code, out) == (5, "")
    held = "waiting: group g is paused, no wave cuts over until `eplane resume`\n" if paused else ""
    assert (
        err
        == f"{held}eplane: migration m1 has not ended after 0.6 s, it is RUNNING{', the group is paused' * paused}\n"
    )


BAD_INPUT = [
    ("nonsense",),
    ("status", "--nonsense"),
    ("status", "-o", "xml"),
    ("status", "--url", "localhost"),
    ("status", "--group", "no such group"),
    ("status", "--token-file", "/no/such/file"),
    ("status", "--watch", "--every", "0"),
    ("status", "--url", "http://[::1"),
    ("status", "--url", "http://127.0.0.1:70700"),
    ("load", "--layer", "9"),
    ("placement", "--layer", "9"),
    ("explain", "0"),
    ("explain", "one", "2"),
    ("explain", "-1", "2"),
    ("rollback",),
    ("rollback", "-3"),
    ("plan", "show", "../../x"),
    ("plan", "show", "p 1"),
    ("rebalance", "--option", "novalue"),
    ("rebalance", "--policy", "best"),
    ("rebalance", "--reason", ""),
    ("config", "set", "speed"),
    ("config", "set", "speed=1"),
    ("history", "--limit", "0"),
    ("solve", "/no/such/problem.json"),
    ("up", "--ranks", "1", "--nodes", "2"),
    ("up", "--ranks", "0"),
    ("up", "--setting", "x"),
    ("up", "--run-dir", "/proc/none"),
    ("up", "--run-dir", "/dev/null"),
    ("controller", "--listen", "7070"),
    ("controller", "--listen", "127.0.0.1:99999"),
]


@pytest.mark.parametrize("command", BAD_INPUT, ids=lambda c: " ".join(c))
def test_bad_input_is_one_sentence(eplane: Command, command: tuple[str, ...]) -> None:
    code, out, err = eplane(*command)
    assert (code, out) == (2, "")
    assert err.startswith("eplane: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_a_wrong_token(eplane: Command, controller: SmallController, tmp_path: Path) -> None:
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    tokens.write_text("viewer v 0123456789abcdef\n")
    tokens.chmod(0o600)
    mine.write_text("0123456789abcdef")
    with served(controller, Auth(AuthSettings(token_file=tokens))) as url:
        assert eplane("status", "--url", url)[0] == 2
        assert eplane("status", "--url", url, "--token-file", str(mine))[0] == 0
        code, _, err = eplane("pause", "--url", url, "--token-file", str(mine))
        assert (code, "may not operate" in err) == (2, True)
        mine.write_text("wrong-0123456789")
        code, _, err = eplane("status", "--url", url, "--token-file", str(mine))
        assert (code, "not known" in err) == (2, True)


def test_watch_goes_on_until_ctrl_c(eplane: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("api.cli.state.time.sleep", nap)
    code, out, _ = eplane("status", "--watch", "--every", "0.5")
    assert (code, naps, out.count("balancedness")) == (130, [0.5] * 3, 3)


def test_every_command_has_help() -> None:
    for command in ([], ["plan"], ["migration"], ["config"], ["rebalance"], ["controller"], ["up"], ["doctor"]):
        assert run([*command, "--help"]) == 0


def test_an_unforeseen_error_is_a_sentence_too(eplane: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr("api.cli.session.Session.get", fail)
    code, _, err = eplane("status")
    assert (code, err) == (1, "eplane: internal error, ZeroDivisionError: oh (EPLANE_TRACE=1 shows where)\n")
    monkeypatch.setenv("EPLANE_TRACE", "1")
    with pytest.raises(ZeroDivisionError):
        run(["status"])


# ---------------------------------------------------------------- in processes of their own


def _process(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **more},
        check=False,
    )


def test_the_command_line_imports_nothing_heavy() -> None:
    """What a command needs it imports when it runs; --help must not cost seconds."""
    heavy = "torch numpy httpx grpc fastapi uvicorn pydantic_core._x yaml rich.console prometheus_client controller agent runtime"
    script = (
        "import sys\n"
        "from api.cli import run\n"
        "assert run(['--help']) == 0\n"
        f"print('HEAVY', [m for m in {heavy.split()!r} if m in sys.modules])\n"
    )
    done = _process("-c", script)
    assert done.stdout.rstrip().endswith("HEAVY []"), done.stdout[-200:] + done.stderr


def test_exit_codes_of_the_process(server: tuple[SmallController, str], controller: SmallController) -> None:
    done = _process("-m", "api.cli", "status", "-g", "g", "-o", "json", "--url", server[1])
    assert (done.returncode, json.loads(done.stdout)["epoch"], done.stderr) == (0, 3, "")
    controller.small.refuses = "a goal says no"
    script = "import sys; sys.argv = ['rebalance', '-g', 'g']; from api.cli import main_rebalance; main_rebalance()"
    done = _process("-c", script, EPLANE_URL=server[1])
    assert (done.returncode, done.stderr) == (3, "rebalance: a goal says no\n")


def test_the_face_works_without_torch() -> None:
    """torch hidden: API, client, controller's command and doctor's imports are all there."""
    script = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "import api.app, api.client, api.serving, api.stack, api.diagnosis, api.cli.__init__\n"
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'agent', 'runtime') and sys.modules[m]))\n"
    )
    done = _process("-c", script)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_the_documentation_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out.partition("Commands:")[2].partition("Exit codes")[0]
    commands = [line.split()[0] for line in listed.splitlines() if line.startswith("  ") and line[2:3].strip()]
    assert len(commands) >= 20
    assert [name for name in commands if f"`{name}" not in text] == []
