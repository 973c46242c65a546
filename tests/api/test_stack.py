"""The one-machine stack: what it starts and with which words, what it refuses, and that it comes up and goes away."""

from __future__ import annotations

import os
import signal
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from api.stack import Stack, StackSettings, answers, etcd_binary
from eplane.errors import BadInput, StackError
from tests.api.test_supervise import is_alive, wait_until


def _settings(tmp_path: Path, **more: object) -> StackSettings:
    return StackSettings(run_dir=tmp_path / "run", **more)  # type: ignore[arg-type]


def test_ranks_are_spread_in_blocks(tmp_path: Path) -> None:
    settings = _settings(tmp_path, ranks=5, nodes=2)
    assert settings.node_of_rank == ("n0", "n0", "n1", "n1", "n1")
    assert settings.ranks_of(1) == range(2, 5)
    for ranks, nodes in ((0, 1), (1, 2), (2, 0)):
        with pytest.raises(BadInput, match="every node needs at least one rank"):
            _settings(tmp_path, ranks=ranks, nodes=nodes)
    with pytest.raises(BadInput, match="slots"):
        _settings(tmp_path, slots=0)


def test_the_names_and_their_order(tmp_path: Path) -> None:
    stack = Stack(_settings(tmp_path, controllers=2))
    names = [spec.name for spec in stack.specs()]
    assert names == ["controller-0", "controller-1", "runtime-n0", "runtime-n1", "agent-n0", "agent-n1"]
    assert len({*stack.controller_urls, *stack.runtime_urls}) == 4
    few = Stack(_settings(tmp_path, runtimes=False, agents=False))
    assert [spec.name for spec in few.specs()] == ["controller-0"]


def test_the_other_parts_understand_their_command_lines(tmp_path: Path) -> None:
    """The words are theirs to define: parsed here by the very parsers that the processes use."""
    import argparse

    from agent.__main__ import parse
    from runtime.__main__ import _add_serve, _options

    stack = Stack(_settings(tmp_path, ranks=3, spare_cells=4, deterministic=False, fault="skip-digest", ttl_s=2.5))
    specs = {spec.name: spec for spec in stack.specs()}
    given = parse(list(specs["agent-n1"].argv[3:]))
    assert (given.group, given.node, given.ttl) == ("default", "n1", 2.5)
    assert given.link_dir == stack.link_dir("n1")
    assert specs["agent-n1"].final_codes == {76}
    assert not specs["runtime-n1"].final_codes
    parser = argparse.ArgumentParser()
    _add_serve(parser)
    options = _options(parser.parse_args(list(specs["runtime-n1"].argv[4:])))
    assert options.ranks == (1, 2)
    assert (options.slots, options.spare_cells, options.fault) == (10, 4, "skip-digest")


def test_environment_by_name(tmp_path: Path) -> None:
    env = {"agent": {"EPLANE_CRASH": "x"}, "agent-n1": {"MORE": "1"}}
    specs = {spec.name: spec for spec in Stack(_settings(tmp_path, env=env)).specs()}
    assert specs["agent-n0"].env["EPLANE_CRASH"] == "x"
    assert "MORE" not in specs["agent-n0"].env
    assert specs["agent-n1"].env["MORE"] == "1"
    assert "EPLANE_CRASH" not in specs["controller-0"].env
    assert {s.together for s in specs.values()} == {None, "runtime"}


def test_ports_that_were_asked_for(tmp_path: Path) -> None:
    stack = Stack(_settings(tmp_path, controllers=2, controller_port=7070, http_port=8000))
    assert stack.controller_urls == ("http://127.0.0.1:7070", "http://127.0.0.1:7071")
    assert stack.runtime_urls == ("http://127.0.0.1:8000", "http://127.0.0.1:8001")


def test_a_run_directory_too_deep_for_sockets(tmp_path: Path) -> None:
    deep = Stack(StackSettings(run_dir=tmp_path / ("x" * 100)))
    with pytest.raises(BadInput, match="choose a shorter one"):
        deep.specs()


def _program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_etcd_of_the_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp_path / "etcd", "exit 0")
    monkeypatch.delenv("EPLANE_ETCD", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert etcd_binary() == str(tmp_path / "etcd")
    monkeypatch.setenv("EPLANE_ETCD", "/bin/true")
    assert etcd_binary() == "/bin/true"
    monkeypatch.delenv("EPLANE_ETCD")
    monkeypatch.setenv("PATH", "/nowhere")
    assert etcd_binary().endswith("etcdbin/etcd")
    monkeypatch.setattr("api.stack.importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match="apt-get install etcd-server"):
        etcd_binary()


def test_one_stack_a_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPLANE_ETCD", "http://127.0.0.1:1, http://127.0.0.1:2")
    empty = _settings(tmp_path, controllers=0, runtimes=False, agents=False)
    with Stack(empty) as first:
        assert first.etcd_urls == ("http://127.0.0.1:1", "http://127.0.0.1:2")
        assert first.supervisor.states() == {}
        with pytest.raises(BadInput, match="in use by another stack"):
            Stack(empty).start()
    with Stack(empty):
        pass
    with pytest.raises(StackError, match="has not been started"):
        _ = Stack(empty).supervisor


@pytest.mark.parametrize("part", ["controller_port", "http_port"])
def test_a_port_of_a_stranger_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """The stranger may well answer the health question: then nothing would tell that it is not ours."""
    monkeypatch.setenv("EPLANE_ETCD", "http://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        taken = _settings(tmp_path, agents=False, **{part: port})
        with pytest.raises(BadInput, match=f"port {port} can not be had: Address already in use"):
            Stack(taken).start()
        without = _settings(tmp_path, controllers=0, runtimes=False, agents=False, http_port=port)
        with Stack(without):
            pass


def test_etcd_is_started_kept_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EPLANE_ETCD", raising=False)
    only_etcd = _settings(tmp_path, controllers=0, runtimes=False, agents=False)
    for _ in range(2):
        with Stack(only_etcd) as stack:
            pid = stack.supervisor.pid("etcd")
            assert answers(f"{stack.etcd_urls[0]}/health")
            assert stack.kill("etcd") == pid
            wait_until(lambda s=stack, p=pid: s.supervisor.pid("etcd") not in (None, p))  # type: ignore[misc]
            wait_until(lambda s=stack: answers(f"{s.etcd_urls[0]}/health"))  # type: ignore[misc]
            pid = stack.supervisor.pid("etcd")
        assert pid is not None
        assert not is_alive(pid)


FAILURES: list[tuple[str, type[Exception], str]] = [
    ("echo 'error: model x has no experts' >&2; exit 2", BadInput, "etcd: model x has no experts .*etcd.log"),
    ("echo 'no room' >&2; exit 1", StackError, "etcd ended with code 1: no room .*etcd.log"),
    ("exec sleep 600", StackError, "etcd does not answer after 1 s: it said nothing"),
]


@pytest.mark.parametrize(("script", "kind", "says"), FAILURES)
def test_what_does_not_come_up_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: type[Exception], says: str
) -> None:
    monkeypatch.delenv("EPLANE_ETCD", raising=False)
    _program(tmp_path / "etcd", script)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    stack = Stack(_settings(tmp_path, controllers=0, runtimes=False, agents=False))
    with pytest.raises(kind, match=says):
        stack.start(ready_s=1.0 if "sleep" in script else 30.0)
    assert not any(state.running for state in stack.supervisor.states().values())


def test_an_interrupted_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int | None] = []
    stack = Stack(_settings(tmp_path, controllers=0, runtimes=False, agents=False))

    def interrupt(*_: object) -> bool:
        pids.append(stack.supervisor.pid("etcd"))
        raise KeyboardInterrupt

    monkeypatch.delenv("EPLANE_ETCD", raising=False)
    monkeypatch.setattr("api.stack.answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stack.start()
    assert pids[0] is not None
    assert not is_alive(pids[0])


def test_signals_of_up_end_the_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from api.cli.up import _stop_on_signals

    set_to: dict[int, object] = {}
    monkeypatch.setattr("signal.signal", lambda signum, handler: set_to.__setitem__(signum, handler))
    _stop_on_signals()
    handler = set_to[signal.SIGTERM]
    assert isinstance(handler, Callable)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        handler(signal.SIGTERM, None)  # type: ignore[operator]
    assert set(set_to.values()) == {signal.SIG_IGN}
