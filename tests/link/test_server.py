"""The two ends of the engine link as processes see them: no torch, no silence when something dies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eplane.errors import LinkError, LinkLost
from runtime.link.client import LinkClient
from runtime.link.server import LinkServer
from tests.link.model_engine import ModelGroup

WITHOUT_TORCH = """
import importlib, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "safetensors"):
            raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
import runtime.link
names = [module.name for module in pkgutil.iter_modules(runtime.link.__path__)]
for name in names:
    importlib.import_module(f"runtime.link.{name}")
assert "torch" not in sys.modules
print(len(names))
"""


def test_the_engine_link_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 7


def model_port() -> ModelGroup:
    return ModelGroup(["n0"], 1, 2, 2, 1)


async def test_no_engine_and_a_gone_engine_are_link_lost(tmp_path: Path) -> None:
    path = tmp_path / "rank0.sock"
    client = LinkClient(path, timeout_s=2.0)
    with pytest.raises(LinkLost, match="no engine answers"):
        await client.connect("a")
    with pytest.raises(LinkLost, match="not connected"):
        await client.status()
    server = LinkServer(model_port().ranks[0], path)
    await client.connect("a")
    server.close()
    with pytest.raises(LinkLost):
        await client.status()
    assert not client.connected
    assert not path.exists()


async def test_a_silent_engine_is_link_lost_and_its_late_reply_is_not_taken(tmp_path: Path) -> None:
    group, path = model_port(), tmp_path / "rank0.sock"
    server = LinkServer(group.ranks[0], path)
    client = LinkClient(path, timeout_s=0.3)
    await client.connect("a")
    release = threading.Event()
    holder = threading.Thread(target=lambda: _hold(group, release))
    holder.start()
    with pytest.raises(LinkLost, match="no answer"):
        await client.status()
    release.set()
    holder.join()
    assert not client.connected
    await client.connect("a")
    assert (await client.status()).rank == 0
    await client.close()
    server.close()


def _hold(group: ModelGroup, release: threading.Event) -> None:
    with group.lock:
        release.wait(30)


async def test_calls_of_several_tasks_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "rank0.sock"
    server = LinkServer(model_port().ranks[0], path)
    client = LinkClient(path)
    await client.connect("a")
    described = await asyncio.gather(*(client.describe() for _ in range(20)), *(client.describe() for _ in range(20)))
    assert {d.rank for d in described} == {0}
    await client.close()
    server.close()


async def test_a_dead_link_thread_is_told(tmp_path: Path) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    deaths: list[BaseException] = []
    path = tmp_path / "rank0.sock"
    server = LinkServer(Broken(), path, deaths.append)  # type: ignore[arg-type]
    client = LinkClient(path, timeout_s=2.0)
    with pytest.raises(LinkLost):
        await client.connect("a")
    server.close()
    assert [type(death) for death in deaths] == [KeyboardInterrupt]


def test_a_socket_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="cannot listen"):
        LinkServer(model_port().ranks[0], tmp_path / "missing" / "rank0.sock")


def test_only_the_owner_may_open_the_socket(tmp_path: Path) -> None:
    path = tmp_path / "rank0.sock"
    server = LinkServer(model_port().ranks[0], path)
    assert path.stat().st_mode & 0o077 == 0
    server.close()
