"""The recorded loads are whole, and they show what the report says: each domain heats its own experts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplane.errors import BadInput
from runtime.tiny import DOMAINS, MODEL_DIR, SHIFT_TRACE, LoadTrace, load_trace
from runtime.tiny.observe import load_model
from runtime.tiny.recorded import save_trace
from runtime.tiny.report import total_variation
from runtime.tiny.trace import LENGTH, PHASES, RAMP, ROWS, label, mixture, record


@pytest.fixture(scope="module")
def trace() -> LoadTrace:
    return load_trace(SHIFT_TRACE)


def test_the_shipped_trace_is_whole(trace: LoadTrace) -> None:
    windows = sum(count for _, count in PHASES)
    assert trace.load.shape == (windows, 8, 32)
    assert trace.load.dtype == np.int32
    assert (trace.load.sum(axis=2) == trace.tokens * trace.top_k).all()
    assert trace.domains == DOMAINS
    assert np.allclose(trace.mix, mixture())
    assert trace.domain == tuple(label(row) for row in trace.mix)
    changes = sum(a != b for a, b in zip(trace.domain, trace.domain[1:], strict=False))
    assert changes >= 12


def test_each_domain_loads_the_experts_that_the_report_names(trace: LoadTrace) -> None:
    told: dict[str, Any] = json.loads((MODEL_DIR / "report.json").read_text())["held_out"]["domains"]
    here = {d: trace.load[[i for i, name in enumerate(trace.domain) if name == d]].sum(axis=0) for d in DOMAINS}
    for domain in DOMAINS:
        own = np.mean(total_variation(here[domain], np.array(told[domain]["expert_load"])))
        assert own < 0.1
        for other in set(DOMAINS) - {domain}:
            assert np.mean(total_variation(here[domain], here[other])) > 1.5 * own


def test_a_trace_that_does_not_add_up_is_refused(trace: LoadTrace, tmp_path: Path) -> None:
    path = tmp_path / "t.npz"
    short = replace(trace, load=trace.load[:4], domain=trace.domain[:4], mix=trace.mix[:4])
    save_trace(path, short)
    again = load_trace(path)
    assert (again.load == short.load).all()
    assert again.domain == short.domain
    bad = short.load.copy()
    bad[2, 3, 4] += 1
    save_trace(path, replace(short, load=bad))
    with pytest.raises(BadInput, match="does not add up"):
        load_trace(path)
    save_trace(path, replace(short, domain=short.domain[:3]))
    with pytest.raises(BadInput, match="3 labels"):
        load_trace(path)
    path.write_bytes(b"PK nothing")
    with pytest.raises(BadInput, match="is no load trace"):
        load_trace(path)
    with pytest.raises(BadInput, match=r"65,535"):
        save_trace(path, replace(short, load=short.load + 70_000))


def test_the_mixture_ramps_between_long_phases_and_jumps_between_short_ones() -> None:
    mix = mixture((("python", 20), ("english", 20), ("chinese", 4), ("english", 4)))
    assert mix.shape == (48, 3)
    assert np.allclose(mix.sum(axis=1), 1)
    assert (mix[: 20 - RAMP, 0] == 1).all()
    assert (np.diff(mix[20 - RAMP : 20, 1]) > 0).all()
    assert [label(row) for row in mix[38:45]] == ["english"] * 2 + ["chinese"] * 4 + ["english"]
    assert label(mix[18]) == "mixed"


def test_recording_counts_every_token_of_every_window() -> None:
    model = load_model(MODEL_DIR)
    streams = {d: np.random.default_rng(i).integers(97, 123, 2000).astype(np.int16) for i, d in enumerate(DOMAINS)}
    mix = mixture((("python", 1), ("chinese", 1)))
    trace = record(model, streams, mix, seed=1)
    assert trace.load.shape == (2, 8, 32)
    assert (trace.load.sum(axis=2) == ROWS * LENGTH * 4).all()
    assert trace.domain == ("python", "chinese")
    assert (record(model, streams, mix[:1], seed=1).load == trace.load[:1]).all()
