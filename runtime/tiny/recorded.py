"""Recorded load traces: what the shipped model's router really chose over a long shifting stream. Numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from eplane.errors import BadInput

_KEYS = ("load", "domain", "mix", "domains", "tokens", "top_k")


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """``load[w, l, e]``: assignments (token x chosen expert) of window w to expert e of MoE layer l.

    Each ``load[w, l].sum()`` is ``tokens * top_k``. ``mix[w]`` is the share of each of ``domains`` in the window's
    text, ``domain[w]`` its name when one has it all, else "mixed".
    """

    load: NDArray[np.int32]
    domain: tuple[str, ...]
    mix: NDArray[np.float32]
    domains: tuple[str, ...]
    tokens: int
    top_k: int


def load_trace(path: Path) -> LoadTrace:
    """Reads a trace and checks it whole: shapes, and that every window and layer adds up."""
    try:
        with np.load(path, allow_pickle=False) as file:
            data = {key: file[key] for key in _KEYS}
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise BadInput(f"{path} is no load trace: {error}") from error
    load, mix = data["load"].astype(np.int32), data["mix"].astype(np.float32)
    tokens, top_k = int(data["tokens"]), int(data["top_k"])
    domain, domains = tuple(map(str, data["domain"])), tuple(map(str, data["domains"]))
    if load.ndim != 3 or len(domain) != len(load) or mix.shape != (len(load), len(domains)):
        raise BadInput(f"{path} is no load trace: load {load.shape}, {len(domain)} labels, mix {mix.shape}")
    if (load < 0).any() or (load.sum(axis=2) != tokens * top_k).any():
        raise BadInput(f"{path} is no load trace: a window does not add up to {tokens} tokens x {top_k} experts")
    return LoadTrace(load, domain, mix, domains, tokens, top_k)


def save_trace(path: Path, trace: LoadTrace) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if int(trace.load.max(initial=0)) > np.iinfo(np.uint16).max:
        raise BadInput("a count over 65,535 does not fit a trace: use fewer tokens a window")
    np.savez_compressed(
        path,
        load=trace.load.astype(np.uint16),
        domain=np.array(trace.domain),
        mix=trace.mix,
        domains=np.array(trace.domains),
        tokens=np.int64(trace.tokens),
        top_k=np.int64(trace.top_k),
    )
