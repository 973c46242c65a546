"""Measures a checkpoint of the tiny model: ``python -m runtime.tiny.report`` writes report.json and report.md beside it.

Loss, skew of the experts and how far the hot ones move between domains: on the held-out documents that lie on this
machine, and on the shipped prompts, which anyone can measure again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplane.errors import BadInput
from runtime.tiny import DOMAINS, MODEL_DIR, load_prompts
from runtime.tiny.corpus import load_corpus, token_stream
from runtime.tiny.observe import expert_counts, load_model, observe, observe_texts
from runtime.tiny.tokens import encode

HOT = 4
RANKS = 4
ROWS, LENGTH = 64, 512


def unigram_nats(texts: Sequence[bytes]) -> float:
    """Entropy of the texts' own byte counts: what the best model without any context could reach on them."""
    counts = np.bincount(np.frombuffer(b"".join(texts), dtype=np.uint8), minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


def skew(counts: NDArray[np.int64]) -> list[float]:
    """Hottest expert's load over the mean expert's, per layer. ``counts`` [L, E]."""
    return [float(x) for x in counts.max(axis=1) / counts.mean(axis=1)]


def rank_imbalance(counts: NDArray[np.int64], ranks: int = RANKS) -> list[float]:
    """Busiest rank's load over the mean rank's, per layer, with the experts placed in order on ``ranks`` ranks."""
    loads = counts.reshape(len(counts), ranks, -1).sum(axis=2)
    return [float(x) for x in loads.max(axis=1) / loads.mean(axis=1)]


def total_variation(one: NDArray[np.int64], two: NDArray[np.int64]) -> list[float]:
    """Share of the load that sits on other experts in the second domain, per layer: 0 same, 1 disjoint."""
    p, q = (c / c.sum(axis=1, keepdims=True) for c in (one, two))
    return [float(x) for x in 0.5 * np.abs(p - q).sum(axis=1)]


def hot_overlap(one: NDArray[np.int64], two: NDArray[np.int64], hot: int = HOT) -> list[float]:
    """Share of the ``hot`` most loaded experts that both domains have in common, per layer."""
    pairs = zip(one, two, strict=True)
    return [len(set(np.argsort(-a)[:hot]) & set(np.argsort(-b)[:hot])) / hot for a, b in pairs]


def figures(nats: float, predicted: int, counts: NDArray[np.int64], texts: Sequence[bytes]) -> dict[str, Any]:
    loss = nats / predicted
    return {
        "bytes": predicted,
        "nats_per_byte": loss,
        "bits_per_byte": loss / math.log(2),
        "best_unigram_nats_per_byte": unigram_nats(texts),
        "expert_skew": skew(counts),
        "rank_imbalance": rank_imbalance(counts),
        "expert_load": [[int(x) for x in layer] for layer in counts],
    }


def movement(counts: Mapping[str, NDArray[np.int64]]) -> dict[str, Any]:
    return {
        f"{one} / {two}": {
            "total_variation": total_variation(counts[one], counts[two]),
            "hot_overlap": hot_overlap(counts[one], counts[two]),
        }
        for one, two in combinations(counts, 2)
    }


def measure_prompts(model: Any) -> dict[str, Any]:
    domains, counts = dict[str, Any](), dict[str, NDArray[np.int64]]()
    for domain in DOMAINS:
        texts = [prompt.text for prompt in load_prompts(domain)]
        nats, predicted, counts[domain] = observe_texts(model, [encode(text) for text in texts])
        domains[domain] = figures(nats, predicted, counts[domain], [text.encode() for text in texts])
    return {"domains": domains, "movement": movement(counts)}


def measure_held_out(model: Any, rows: int, length: int) -> dict[str, Any]:
    """Rows of ``length`` bytes, evenly spread over each domain's held-out documents."""
    domains, counts = dict[str, Any](), dict[str, NDArray[np.int64]]()
    for domain, split in load_corpus().items():
        stream = token_stream(split.held_out).astype(np.int64)
        if len(stream) < length:
            raise BadInput(f"{domain}: {len(stream)} held-out tokens are too few for a row of {length}")
        starts = np.linspace(0, len(stream) - length, rows).astype(np.int64)
        nats, predicted = 0.0, 0
        counts[domain] = np.zeros((model.config.num_hidden_layers, model.config.num_experts), dtype=np.int64)
        for first in range(0, rows, 8):
            seen = observe(model, np.stack([stream[s : s + length] for s in starts[first : first + 8]]))
            nats += float(seen.loss.sum())
            predicted += seen.loss.size
            counts[domain] += expert_counts(seen.chosen, model.config.num_experts)
        domains[domain] = figures(nats, predicted, counts[domain], [d.text.encode() for d in split.held_out])
    return {"domains": domains, "movement": movement(counts)}


def training_facts(state: Path) -> dict[str, Any]:
    record = json.loads(state.read_text())
    recipe = record["recipe"]
    return {
        "steps": record["step"],
        "tokens": record["step"] * recipe["rows"] * recipe["length"],
        "minutes": record["seconds"] / 60,
        "recipe": recipe,
        "data": record["data"],
        "torch": torch.__version__,
    }


def _cells(values: Sequence[float]) -> str:
    return " | ".join(f"{value:.2f}" for value in values)


def as_markdown(report: Mapping[str, Any]) -> str:
    lines = ["# The tiny model, measured", ""]
    if "training" in report:
        facts = report["training"]
        lines += [
            f"{report['parameters']:,} parameters, trained {facts['minutes']:.0f} minutes on one CPU thread: "
            f"{facts['steps']:,} steps, {facts['tokens']:,} bytes of text.",
            "",
        ]
    titles = {"held_out": "On held-out documents", "prompts": "On the shipped prompts"}
    for part, title in titles.items():
        if part not in report:
            continue
        domains, moves = report[part]["domains"], report[part]["movement"]
        layers = len(next(iter(domains.values()))["expert_skew"])
        header = " | ".join(f"layer {i}" for i in range(layers))
        rule = "|---" * (layers + 1) + "|"
        lines += [
            f"## {title}",
            "",
            "| domain | bytes | nats/byte | bits/byte | best unigram, nats/byte |",
            "|---" * 5 + "|",
        ]
        lines += [
            f"| {name} | {d['bytes']:,} | {d['nats_per_byte']:.3f} | {d['bits_per_byte']:.3f} | "
            f"{d['best_unigram_nats_per_byte']:.3f} |"
            for name, d in domains.items()
        ]
        lines += ["", "Hottest expert's load over the mean expert's:", "", f"| domain | {header} |", rule]
        lines += [f"| {name} | {_cells(d['expert_skew'])} |" for name, d in domains.items()]
        lines += ["", f"Busiest rank's load over the mean rank's, experts in order on {RANKS} ranks:", ""]
        lines += [f"| domain | {header} |", rule]
        lines += [f"| {name} | {_cells(d['rank_imbalance'])} |" for name, d in domains.items()]
        lines += ["", "Load that sits on other experts after a change of domain (total variation, 0 to 1):", ""]
        lines += [f"| change | {header} |", rule]
        lines += [f"| {name} | {_cells(m['total_variation'])} |" for name, m in moves.items()]
        lines += ["", f"Share of the {HOT} hottest experts that both domains have in common:", ""]
        lines += [f"| change | {header} |", rule]
        lines += [f"| {name} | {_cells(m['hot_overlap'])} |" for name, m in moves.items()]
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.tiny.report", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--out", type=Path, help="folder of the report; default: the model's")
    parser.add_argument("--state", type=Path, help="state.json of the training run, for its facts")
    parser.add_argument("--prompts-only", action="store_true", help="no held-out documents: needs no corpus")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = load_model(args.model)
    report: dict[str, Any] = {"parameters": sum(p.numel() for p in model.parameters())}
    try:
        if args.state is not None:
            report["training"] = training_facts(args.state)
        if not args.prompts_only:
            report["held_out"] = measure_held_out(model, ROWS, LENGTH)
        report["prompts"] = measure_prompts(model)
    except BadInput as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    out = args.out or args.model
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report) + "\n")
    (out / "report.md").write_text(as_markdown(report), encoding="utf-8")
    print(as_markdown(report))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
