"""Real processes: controllers on a real etcd, the command line against them, TLS, and what does not start."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.cli import run
from api.stack import Stack, StackSettings, answers
from tests.api.test_supervise import is_alive, wait_until
from tests.etcd_process import EtcdProcess, free_port


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("EPLANE_")}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """etcd and two controllers; no model."""
    settings = StackSettings(
        tmp_path_factory.mktemp("stack") / "run",
        group="g",
        controllers=2,
        mode="observe",
        ttl_s=1.0,
        runtimes=False,
        agents=False,
        group_settings={"interval_s": 0.5},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("EPLANE_ETCD", raising=False)
        with Stack(settings) as one:
            yield one


def _ask(stack: Stack, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, object, str]:
    code = run([*words, "-g", "g", "--url", ",".join(stack.controller_urls), "-o", "json", "--patience", "30"])
    seen = capsys.readouterr()
    return code, json.loads(seen.out) if seen.out else None, seen.err


def test_the_command_line_goes_through_an_election(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    code, status, _ = _ask(stack, capsys, "status")
    assert code == 0
    assert isinstance(status, dict)
    assert (status["mode"], status["epoch"], status["leads_here"]) == ("observe", None, True)
    _, config, _ = _ask(stack, capsys, "config", "show")
    assert isinstance(config, dict)
    assert config["interval_s"] == 0.5
    leader = status["leader"]["id"]
    pid = stack.kill(leader)
    assert _ask(stack, capsys, "pause", "--reason", "upgrade")[:2] == (0, {"paused": True})
    assert _ask(stack, capsys, "mode", "auto")[:2] == (0, {"mode": "auto"})
    code, status, _ = _ask(stack, capsys, "status")
    assert isinstance(status, dict)
    assert (status["mode"], status["paused"]) == ("auto", True)
    wait_until(lambda: stack.supervisor.pid(leader) not in (None, pid))
    code, _, err = _ask(stack, capsys, "rebalance")
    assert (code, "no world has been adopted" in err) == (4, True)


def test_a_controller_told_to_stop_ends_with_0(stack: Stack) -> None:
    wait_until(lambda: answers(f"{stack.controller_urls[1]}/health"))
    stack.supervisor.stop("controller-1")
    assert stack.supervisor.state("controller-1").last_code == 0


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(["controller", "--listen", address]) == 2
    assert capsys.readouterr().err == f"eplane: can not listen on {address}: Address already in use\n"


def test_an_etcd_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["controller", "--etcd", "http://127.0.0.1:1", "--listen", f"127.0.0.1:{free_port()}"]) == 5
    said = capsys.readouterr().err
    assert said.startswith("eplane: no etcd answers at 127.0.0.1:1")
    assert said.count("\n") == 1


REFUSED = [
    (("--listen", "0.0.0.0:7070"), "are missing: give both, or listen on 127.0.0.1"),
    (("--listen", "example.org:7070"), "are missing"),
    (("--mode", "full"), "--mode: is 'full'"),
    (("--group", "a b"), "--group: "),
    (("--group", "a", "--group", "a"), "--group: a group is named twice"),
    (("--etcd", "https://127.0.0.1:1"), "etcd over TLS needs --etcd-ca"),
    (("--etcd-cert", "x"), "--etcd-cert and --etcd-key belong together"),
    (("--token-file", "/no/such/file"), "the token file /no/such/file can not be read"),
    (("--tls-cert", "/no/such/file"), "--tls-cert and --tls-key belong together"),
]


@pytest.mark.parametrize(("words", "says"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_refused_before_anything_starts(
    words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EPLANE_ETCD", raising=False)
    listen = () if "--listen" in words else ("--listen", f"127.0.0.1:{free_port()}")
    code = run(["controller", *words, *listen])
    seen = capsys.readouterr()
    assert (code, seen.out, seen.err.count("\n")) == (2, "", 1)
    assert says in seen.err


def _certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "api.pem", folder / "api.key"
    words = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    command = ["openssl", *words.split(), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    key.chmod(0o600)
    return cert, key


def test_beyond_loopback_with_tls_and_tokens(
    tmp_path: Path, shared_etcd: EtcdProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    cert, key = _certificate(tmp_path)
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    tokens.write_text("operator carol 0123456789abcdef\n")
    tokens.chmod(0o600)
    mine.write_text("0123456789abcdef\n")
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    command = [sys.executable, "-m", "api.cli", "controller", "--etcd", f"http://{shared_etcd.endpoint}"]
    command += ["--group", "tls", "--listen", f"0.0.0.0:{port}", "--url", url, "--tls-cert", str(cert)]
    command += ["--tls-key", str(key), "--token-file", str(tokens)]
    with subprocess.Popen(command, env=_environment(), stderr=subprocess.PIPE) as process:
        try:
            trust = ssl.create_default_context(cafile=cert)
            wait_until(lambda: process.poll() is not None or _healthy(f"{url}/health", trust))
            line = ["-g", "tls", "--url", url, "--ca", str(cert), "--patience", "20"]
            assert run(["status", *line]) == 2
            assert "send a token" in capsys.readouterr().err
            assert run(["pause", *line, "--token-file", str(mine), "--actor", "somebody-else"]) == 0
            assert run(["mode", "auto", *line, "--token-file", str(mine)]) == 2
            assert "may not administer" in capsys.readouterr().err
            assert run(["anomalies", *line, "--token-file", str(mine)]) == 0
            assert "paused by carol" in capsys.readouterr().out
            assert run(["status", "-g", "tls", "--url", url, "--patience", "0"]) == 5
            assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
            assert not _healthy(f"http://127.0.0.1:{port}/health", trust)
        finally:
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=30)[1]
        assert process.returncode == 0, said


def _healthy(url: str, trust: ssl.SSLContext) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5, context=trust) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        time.sleep(0.05)
        return False


def test_up_cleans_up_when_it_is_told_to_stop(tmp_path: Path) -> None:
    """`up` whose model never comes up: SIGTERM ends it, and every process with it."""
    command = [
        sys.executable,
        "-m",
        "api.cli",
        "up",
        "--run-dir",
        str(tmp_path / "run"),
        "--port",
        "0",
        "--http-port",
        "0",
    ]
    command += ["--ranks", "1", "--nodes", "1", "--model", str(tmp_path / "pipe")]
    (tmp_path / "pipe").mkdir()
    # A config that is a pipe nobody writes to: the launcher waits for it for ever.
    os.mkfifo(tmp_path / "pipe" / "config.json")
    with subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        log = tmp_path / "run" / "logs" / "agent-n0.log"
        wait_until(log.exists)
        mine = _children(process.pid)
        assert len(mine) >= 4
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.splitlines()[-1:]) == (0, b"stopped\n", [b"stopping"])
    assert not any(is_alive(pid) for pid in mine)


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(word) for word in (task / "children").read_text().split()]
    return found
