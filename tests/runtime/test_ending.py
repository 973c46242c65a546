"""How worlds end: told to, by the loss of a rank, by the loss of the launcher; and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from eplane.errors import BadInput
from eplane.placement import linear
from runtime.options import ServeOptions
from runtime.worldstart import first_placement, keep_placement
from tests.runtime.local import random_placement
from tests.runtime.serving import Serve, complete, serving

Get = Callable[[str], Path]


def _no_process_left(serve: Serve) -> None:
    deadline = time.monotonic() + 20
    while serve.descendants() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert serve.descendants() == []


def test_a_killed_rank_ends_the_world_with_503_and_exit_70(tmp_path: Path, checkpoint: Get) -> None:
    with serving(str(checkpoint("olmoe")), tmp_path, 2) as serve, ThreadPoolExecutor(2) as pool:
        asked = pool.submit(complete, serve.url, prompt=[1, 2, 3], max_tokens=480, ignore_eos=True)
        body = {"prompt": [1], "max_tokens": 480, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{serve.url}/v1/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            os.kill(serve.rank_pids()[1], signal.SIGKILL)
            events = [line for line in lines if line]
        assert "[DONE]" not in events[-1]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["status"] == 503
        answer = asked.result(60)
        assert answer.status_code == 503
        assert answer.headers["content-type"] == "application/problem+json"
        assert "the world is lost" in answer.json()["detail"] or "lost a peer" in answer.json()["detail"]
        assert serve.wait() == 70
        _no_process_left(serve)
        assert "error: " in serve.log


def test_a_full_queue_answers_429_what_waits_is_served_and_told_to_stop_it_ends_with_0(
    tmp_path: Path, checkpoint: Get
) -> None:
    with (
        serving(str(checkpoint("olmoe")), tmp_path, 1, "--queue", "2", "--kv-tokens", "256") as serve,
        ThreadPoolExecutor(8) as pool,
    ):
        # A request needs 2 of the 4 pages: two run, two wait.
        asked = [pool.submit(complete, serve.url, prompt=[n], max_tokens=64, ignore_eos=True) for n in range(8)]
        answers = [a.result(60) for a in asked]
        codes = sorted(a.status_code for a in answers)
        assert set(codes) == {200, 429}, (serve.log, [a.text for a in answers])
        assert codes.count(200) >= 2
        refused = next(a for a in answers if a.status_code == 429)
        assert refused.json()["code"] == "busy"
        assert int(refused.headers["Retry-After"]) >= 1
        assert all(a.json()["usage"]["completion_tokens"] == 64 for a in answers if a.status_code == 200)
        large = complete(serve.url, prompt=[1], max_tokens=300)
        assert large.status_code == 400
        assert "exceed the 256 tokens" in large.json()["detail"]
        last = pool.submit(complete, serve.url, prompt=[1, 2, 3], max_tokens=250, ignore_eos=True)
        while "requests_open 1.0" not in httpx.get(f"{serve.url}/metrics").text:
            time.sleep(0.02)
        os.kill(serve.pid, signal.SIGTERM)
        assert last.result(60).status_code == 503
        assert serve.wait() == 0
        _no_process_left(serve)
        assert serve.log == ""


def _run(*options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "runtime", "serve", "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def test_bad_input_gives_one_sentence_and_exit_2(tmp_path: Path, checkpoint: Get) -> None:
    folder = str(checkpoint("olmoe"))
    link = ("--link-dir", str(tmp_path / "link"))
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"127.0.0.1:{taken.getsockname()[1]}"
        for options, sentence in (
            (("--model", folder, "--http", port), f"error: --http {port}: Address already in use"),
            (("--model", str(tmp_path / "none")), "no config.json is there"),
            (("--model", folder, "--world-size", "2", "--ranks", "0,2"), "--ranks names rank 2"),
            (("--model", folder, "--nodes", "a,b", "--world-size", "3"), "--nodes names 2 ranks"),
            (("--model", folder, "--ranks", "x"), "--ranks must look like"),
            (("--model", folder, "--master", "here"), "--master must be HOST:PORT"),
            (("--model", folder, "--spare-cells", "-1"), "--spare-cells must be at least 0, got -1"),
            (("--model", folder, "--http", "127.0.0.1:0", "--link-dir", str(tmp_path / "file")), "File exists"),
            (("--model", folder, "--http", "127.0.0.1:0", "--link-dir", f"/tmp/{'x' * 92}"), "of 108 bytes, Linux"),
        ):
            code, said = _run(*link, *options)
            assert (code, said.count("\n")) == (2, 1), said
            assert sentence in said


def test_what_only_a_rank_can_see_is_one_sentence_too(tmp_path: Path, checkpoint: Get) -> None:
    link = str(tmp_path / "link")
    code, said = _run("--model", str(checkpoint("olmoe")), "--http", "127.0.0.1:0", "--link-dir", link, "--slots", "3")
    assert (code, said.count("\n")) == (2, 1), said
    assert "8 experts do not fit 1 ranks x 3 slots; give at least --slots 8" in said


def test_the_launcher_needs_no_torch_and_says_what_is_missing(checkpoint: Get) -> None:
    hide = "import sys; sys.modules.update(torch=None, transformers=None)"
    load = "import runtime.launcher, runtime.server, runtime.__main__"
    done = subprocess.run([sys.executable, "-c", f"{hide}; {load}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    find = "import importlib.util; importlib.util.find_spec = lambda name: None"
    run = f"from runtime.__main__ import main; sys.exit(main(['serve', '--model', {str(checkpoint('olmoe'))!r}]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}; {load}; {find}; {run}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: torch is not installed, and ranks need it: install eplane[runtime]\n"


@pytest.mark.parametrize("tokens", [-1, 1025])
def test_a_sample_has_bounds(tokens: int) -> None:
    with pytest.raises(BadInput, match="--routing-sample must be between"):
        ServeOptions("m", routing_sample=tokens)


def test_the_first_placement_is_the_one_given_else_the_one_kept_else_linear(tmp_path: Path) -> None:
    def options(**more: Any) -> ServeOptions:
        return ServeOptions("m", world_size=2, ranks=(0,), nodes=("local", "local"), slots=5, **more)

    start = linear(3, 8, 2, 5)
    assert first_placement(options(), 3, 8).digest == start.digest
    kept, given = random_placement(1, 3, 8, 2, 5), random_placement(2, 3, 8, 2, 5)
    state = {"state_dir": str(tmp_path)}
    keep_placement(tmp_path / "default.placement.json", kept)
    assert first_placement(options(**state), 3, 8).digest == kept.digest
    assert first_placement(options(**state, placement="linear"), 3, 8).digest == start.digest
    keep_placement(tmp_path / "given.json", given)
    assert first_placement(options(**state, placement=str(tmp_path / "given.json")), 3, 8).digest == given.digest
    # What another model or world left behind is of no use, and does no harm.
    assert first_placement(options(**state), 2, 8).digest == linear(2, 8, 2, 5).digest
    for content in ("", "[]", '{"p2l": [[0, 1]]}', json.dumps({"p2l": [[0] * 10] * 3})):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(BadInput, match=r"broken\.json: "):
            first_placement(options(placement=str(tmp_path / "broken.json")), 3, 8)
