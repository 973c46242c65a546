"""Fixtures that more than one part uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.etcd_process import EtcdProcess


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    """One etcd for all tests that only talk to it: keep to a prefix of your own, and never kill, pause, compact or wipe it."""
    with EtcdProcess(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdProcess]:
    """An etcd of the test's own, to kill, pause, restart, compact and wipe."""
    with EtcdProcess(tmp_path / "etcd") as process:
        yield process
