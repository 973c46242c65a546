"""`python -m agent` as a process: one clear sentence and the documented exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def run(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_an_unreachable_etcd_is_exit_5(tmp_path: Path) -> None:
    done = run("--group", "g", "--node", "n0", "--etcd", "http://127.0.0.1:1", "--link-dir", str(tmp_path))
    assert done.returncode == 5
    assert "127.0.0.1:1" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_bad_names_and_files_are_exit_2(tmp_path: Path) -> None:
    base = ["--node", "n0", "--etcd", "http://127.0.0.1:1", "--link-dir", str(tmp_path)]
    for options in (["--group", "a/b", *base], ["--group", "g", *base, "--ttl", "0.1"], base):
        done = run(*options)
        assert done.returncode == 2, done.stderr
        assert "Traceback" not in done.stderr
    missing = run("--group", "g", *base, "--token-file", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert "none" in missing.stderr


def test_the_agent_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import agent.daemon, agent.__main__"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
