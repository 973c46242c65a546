"""The shipped model is what its report says: it reads, it routes unevenly, and its hot experts move with the text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open

from runtime.tiny import DOMAINS, MODEL_DIR, PROMPTS_DIR, SHIFT_TRACE, load_prompts
from runtime.tiny import report as reporting
from runtime.tiny.observe import expert_counts, load_model, observe, observe_texts
from runtime.tiny.report import hot_overlap, rank_imbalance, skew, total_variation, unigram_nats
from runtime.tiny.tokens import decode, encode

SAMPLE = 12
"""Prompts a domain that are measured again here."""


@pytest.fixture(scope="module")
def model() -> Any:
    torch.set_num_threads(1)
    return load_model(MODEL_DIR)


@pytest.fixture(scope="module")
def shipped() -> dict[str, Any]:
    report: dict[str, Any] = json.loads((MODEL_DIR / "report.json").read_text())
    return report


@pytest.fixture(scope="module")
def sample(model: Any) -> dict[str, tuple[float, NDArray[np.int64]]]:
    """Per domain: nats a byte and expert counts [L, E] on some of the shipped prompts."""
    result = {}
    for domain in DOMAINS:
        texts = [encode(p.text) for p in load_prompts(domain)[-SAMPLE - 4 : -4]]
        nats, predicted, counts = observe_texts(model, texts)
        result[domain] = (nats / predicted, counts)
    return result


def test_the_files_are_small_and_the_weights_standard() -> None:
    files = [MODEL_DIR / name for name in ("config.json", "generation_config.json", "model.safetensors")]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    assert SHIFT_TRACE.stat().st_size <= 500_000
    assert sum(file.stat().st_size for file in PROMPTS_DIR.iterdir()) <= 100_000
    with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as tensors:
        names = set(tensors.keys())
        assert {tensors.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    experts = {
        f"model.layers.{x}.mlp.experts.{e}.{p}_proj.weight"
        for x in range(8)
        for e in range(32)
        for p in ("gate", "up", "down")
    }
    assert experts <= names
    config = json.loads((MODEL_DIR / "config.json").read_text())
    wanted = {"model_type": "qwen3_moe", "num_hidden_layers": 8, "num_local_experts": 32, "num_experts_per_tok": 4}
    assert {key: config[key] for key in wanted} == wanted
    assert config["max_position_embeddings"] >= 512


@pytest.mark.parametrize("domain", DOMAINS)
def test_it_goes_on_with_a_prompt(model: Any, domain: str) -> None:
    ids = encode(load_prompts(domain)[0].text)
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    new = out[0, len(ids) :].tolist()
    assert 0 < len(new) <= 12
    assert max(new) < 260
    assert isinstance(decode(new), str)


@pytest.mark.parametrize("domain", DOMAINS)
def test_it_predicts_far_better_than_byte_counts(
    sample: dict[str, tuple[float, NDArray[np.int64]]], domain: str
) -> None:
    texts = [p.text.encode() for p in load_prompts(domain)[-SAMPLE - 4 : -4]]
    assert sample[domain][0] < 0.75 * unigram_nats(texts)


def test_the_report_is_reproduced(sample: dict[str, tuple[float, NDArray[np.int64]]], shipped: dict[str, Any]) -> None:
    for domain, (nats, counts) in sample.items():
        told = shipped["prompts"]["domains"][domain]
        assert nats == pytest.approx(told["nats_per_byte"], rel=0.25)
        load = np.array(told["expert_load"])
        assert load.sum() == 8 * 4 * sum(len(encode(p.text)) for p in load_prompts(domain))
        assert max(total_variation(counts, load)) < 0.2
        assert told["bits_per_byte"] == pytest.approx(told["nats_per_byte"] / math.log(2))
        assert np.mean(skew(counts)) > 1.5
        assert np.mean(told["expert_skew"]) > 1.5


def test_hot_experts_move_between_domains(
    sample: dict[str, tuple[float, NDArray[np.int64]]], shipped: dict[str, Any]
) -> None:
    """Two halves of one domain load the same experts; two domains do not."""
    for part in ("held_out", "prompts"):
        for figures in shipped[part]["movement"].values():
            assert np.mean(figures["total_variation"]) > 0.15
            assert np.mean(figures["hot_overlap"]) < 0.75
    for domain, (_, counts) in sample.items():
        own = np.array(shipped["held_out"]["domains"][domain]["expert_load"])
        distance = np.mean(total_variation(counts, own))
        for other in set(DOMAINS) - {domain}:
            foreign = np.array(shipped["held_out"]["domains"][other]["expert_load"])
            assert distance < np.mean(total_variation(counts, foreign))


def test_observed_experts_are_the_routers_choice(model: Any) -> None:
    rows = np.array([encode("def main():")], dtype=np.int64)
    seen = observe(model, rows)
    assert seen.chosen.shape == (8, 1, rows.shape[1], 4)
    assert seen.loss.shape == (1, rows.shape[1] - 1)
    output = model(input_ids=torch.from_numpy(rows), output_router_logits=True)
    for layer, logits in zip(seen.chosen, output.router_logits, strict=True):
        top = torch.topk(logits, 4, dim=-1).indices.numpy()
        assert (np.sort(top, axis=-1) == np.sort(layer[0], axis=-1)).all()
    counts = expert_counts(seen.chosen, 32)
    assert counts.shape == (8, 32)
    assert (counts.sum(axis=1) == rows.size * 4).all()


def test_figures_on_known_counts() -> None:
    even = np.full((1, 8), 10)
    tilted = np.array([[70, 2, 2, 2, 1, 1, 1, 1]])
    assert skew(even) == [1.0]
    assert skew(tilted) == [7.0]
    assert rank_imbalance(tilted, ranks=4) == [3.6]
    assert total_variation(even, even) == [0.0]
    assert total_variation(np.array([[5, 0]]), np.array([[0, 5]])) == [1.0]
    assert hot_overlap(tilted, tilted) == [1.0]
    assert hot_overlap(np.array([[9, 8, 1, 1]]), np.array([[1, 8, 9, 1]]), hot=2) == [0.5]
    assert unigram_nats([b"ab", b"ab"]) == pytest.approx(math.log(2))


def test_the_report_command_measures_the_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped: dict[str, Any]
) -> None:
    monkeypatch.setattr(reporting, "load_prompts", lambda domain: load_prompts(domain)[:3])
    assert reporting.main(["--prompts-only", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parameters"] == shipped["parameters"]
    assert set(report["prompts"]["domains"]) == set(DOMAINS)
    assert "held_out" not in report
    assert "| python |" in (tmp_path / "report.md").read_text()
