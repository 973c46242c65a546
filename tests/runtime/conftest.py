"""Checkpoints and worlds that the runtime's tests share; a world costs seconds, so a module starts it once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.runtime.checkpoints import make_checkpoint

# One thread, as in every rank: with more, a parallel region waits for cores that other processes hold.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny random checkpoint of a kind, made once a session."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_checkpoint(kind, tmp_path_factory.mktemp("checkpoints") / kind)
        return made[kind]

    return get
