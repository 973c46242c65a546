"""Nodes that a token touches: placements with and without sampled routings, judged on tokens that nobody has seen.

    python tests/bench/coactivation.py [--quick] [--tiny] [-o OUT.md]

Synthetic tokens have a topic each; a topic likes some experts, so that its experts fire together (Gumbel top-k over the
topic's likes). `--tiny` adds what the router of the tiny model that ships with EPlane really chose over held-out text of
changing domains (a minute more, needs torch and text on this machine).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from controller.solver import Answer, Problem, solve  # noqa: E402
from controller.solver.measure import balance, rank_loads  # noqa: E402
from controller.solver.touched import touched  # noqa: E402
from tests.bench.report import Report  # noqa: E402

TOPICS_LIKE, POPULAR = 3.0, 0.5
WINDOW, ENTRIES = 4, 8
"""Load entries that make one window; entries that a decision sees."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    experts: int
    top: int
    ranks: int
    places: int
    nodes: int
    topics: int


LITE = Shape("64 experts, top-6, 4 ranks of 16 on 4 nodes", 64, 6, 4, 16, 4, 8)
SPARE = Shape("64 experts, top-6, 8 ranks of 10 on 4 nodes", 64, 6, 8, 10, 4, 8)
V3 = Shape("256 experts, top-8, 32 ranks of 9 on 4 nodes", 256, 8, 32, 9, 4, 24)
TINY = Shape("tiny model, 32 experts, 8 ranks of 5 on 4 nodes", 32, 0, 8, 5, 4, 0)


class Router:
    """Tokens of one layer. likes [T, E]; the share of each topic drifts from one entry to the next."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.shape, self.rng = shape, np.random.default_rng(seed)
        normal = self.rng.normal
        self.likes = normal(0, POPULAR, shape.experts) + TOPICS_LIKE * normal(0, 1, (shape.topics, shape.experts))
        self.weight = normal(0, 0.5, shape.topics)

    def drift(self, step: float) -> None:
        self.weight += self.rng.normal(0, step, self.shape.topics)

    def draw(self, count: int) -> np.ndarray:
        """[count, K] distinct experts of tokens."""
        part = np.exp(self.weight) / np.exp(self.weight).sum()
        topic = self.rng.choice(self.shape.topics, count, p=part)
        scores = self.likes[topic] + self.rng.gumbel(size=(count, self.shape.experts))
        return np.argpartition(-scores, self.shape.top, axis=1)[:, : self.shape.top].astype(np.int32)


def counts(ids: np.ndarray, experts: int) -> np.ndarray:
    return np.bincount(ids.ravel(), minlength=experts).astype(float)


def judge(problem: Problem, answer: Answer, tokens: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """(nodes a token, node max / mean, rank balancedness) of tokens [L][n, K] that came after."""
    load = np.stack([counts(ids, problem.experts) for ids in tokens])
    ranks = rank_loads(load, answer.placement, answer.shares, problem.ranks)
    nodes = np.stack([ranks[:, problem.node_of_rank == n].sum(axis=1) for n in range(problem.nodes)], axis=1)
    each = [
        touched(problem, ids, row, shares).mean()
        for ids, row, shares in zip(tokens, answer.placement, answer.shares, strict=True)
    ]
    even = balance(ranks, problem.capacity, problem.drained)
    return float(np.mean(each)), float((nodes.max(axis=1) / nodes.mean(axis=1)).mean()), float(even.mean())


def at_once(report: Report, shape: Shape, sizes: Sequence[int], layers: int) -> None:
    """From nothing, topics that stay: how few nodes, at what balance, from how large a sample."""
    report.table(
        f"From nothing: {shape.name}, {layers} layers",
        ["placement", "nodes a token", "node max / mean", "balancedness"],
    )
    routers = [Router(shape, seed) for seed in range(layers)]
    load = np.stack([counts(router.draw(20_000), shape.experts) for router in routers])
    sample = [router.draw(max(sizes)) for router in routers]
    fresh = [router.draw(20_000) for router in routers]
    bare = Problem.of(load, shape.ranks, shape.places, nodes=shape.nodes)
    for name in ("static", "eplb", "eplane"):
        label = {"static": "in order", "eplane": "`eplane`, no sample"}.get(name, f"`{name}`")
        report.row(label, *judge(bare, solve(bare.with_policy(name)), fresh))
    for size in sizes:
        asked = replace(bare, routing_sample=tuple(ids[:size] for ids in sample))
        report.row(f"`eplane`, {size:,} tuples a layer", *judge(bare, solve(asked), fresh))


def over_time(
    report: Report,
    shape: Shape,
    stream: Sequence[Sequence[np.ndarray]],
    tuples: Sequence[int],
    title: str,
    fields: dict[str, Any] | None = None,
) -> None:
    """stream [W][L][n, K] tokens of each load entry. A decision after every WINDOW entries, judged on the next WINDOW."""
    report.table(title, ["policy", "nodes a token", "node max / mean", "balancedness", "moves a layer", "decisions"])
    layers = len(stream[0])
    load = np.stack([[counts(ids, shape.experts) for ids in entry] for entry in stream])
    rng = np.random.default_rng(1)
    for name, size in [("static", 0), ("eplb", 0), ("eplane", 0), *(("eplane", n) for n in tuples)]:
        prior, found = None, []
        moves: list[float] = []
        for now in range(WINDOW, len(stream) - WINDOW + 1, WINDOW):
            window = [np.concatenate([entry[layer] for entry in stream[now - WINDOW : now]]) for layer in range(layers)]
            sample = [ids[rng.choice(len(ids), min(size, len(ids)), replace=False)] for ids in window] if size else None
            problem = Problem.of(
                load[max(now - ENTRIES, 0) : now], shape.ranks, shape.places, nodes=shape.nodes, window=WINDOW,
                policy=name, routing_sample=sample, **(fields or {}),
            ).with_prior(prior)  # fmt: skip
            answer = solve(problem)
            coming = stream[now : now + WINDOW]
            found.append(
                judge(problem, answer, [np.concatenate([entry[layer] for entry in coming]) for layer in range(layers)])
            )
            moves += [answer.moves / layers] if prior is not None else []
            prior = answer.placement
        label = f"`{name}`, {size:,} tuples" if size else f"`{name}`"
        report.row(label, *np.mean(found, axis=0).tolist(), f"{np.mean(moves):.1f}", len(found))


def drifting(shape: Shape, layers: int, entries: int, count: int) -> list[list[np.ndarray]]:
    routers = [Router(shape, seed) for seed in range(layers)]
    stream = []
    for _ in range(entries):
        stream.append([router.draw(count) for router in routers])
        for router in routers:
            router.drift(0.1)
    return stream


def tiny_stream(windows: int) -> tuple[Shape, list[list[np.ndarray]]]:
    """What the tiny model's router chose: entries of 2,048 tokens of held-out text whose domains change."""
    import torch

    from runtime.tiny import DOMAINS, MODEL_DIR
    from runtime.tiny.corpus import load_corpus, token_stream
    from runtime.tiny.observe import load_model, observe

    torch.set_num_threads(1)
    model, rng, stream = load_model(MODEL_DIR), np.random.default_rng(3), []
    text = {domain: token_stream(split.held_out) for domain, split in load_corpus().items()}
    for window in range(windows):
        # Two thirds of a phase in one domain, then a mixture: as services see it.
        phase, at = divmod(window, WINDOW * 3)
        main = DOMAINS[phase % len(DOMAINS)]
        rows = []
        for _ in range(8):
            domain = main if at < WINDOW * 2 else DOMAINS[int(rng.integers(len(DOMAINS)))]
            start = int(rng.integers(0, len(text[domain]) - 256))
            rows.append(text[domain][start : start + 256])
        chosen = observe(model, np.stack(rows).astype(np.int64)).chosen
        stream.append([layer.reshape(-1, layer.shape[-1]).astype(np.int32) for layer in chosen])
    return replace(TINY, experts=int(model.config.num_experts)), stream


def times(report: Report, layers: int) -> None:
    """CPU time of whole solves, best of three, kernels compiled before."""
    report.table(f"CPU time of a solve: {V3.name}, {layers} layers, 256 tuples a layer", ["solve", "ms"])
    routers = [Router(V3, seed) for seed in range(layers)]
    load = np.stack([[counts(router.draw(2000), V3.experts) for router in routers] for _ in range(WINDOW)])
    later = np.stack([[counts(router.draw(2000), V3.experts) for router in routers] for _ in range(WINDOW)])
    sample = tuple(router.draw(256) for router in routers)
    bare = Problem.of(load, V3.ranks, V3.places, nodes=V3.nodes)
    near = solve(replace(bare, routing_sample=sample)).placement
    for label, given, prior in (("from nothing", load, None), ("from a prior, next window", later, near)):
        for with_sample in (False, True):
            asked = replace(
                Problem.of(given, V3.ranks, V3.places, nodes=V3.nodes).with_prior(prior),
                routing_sample=sample if with_sample else None,
            )
            solve(asked)
            best = min(_cpu_ms(asked) for _ in range(3))
            report.row(f"{label}, {'with' if with_sample else 'without'} sample", f"{best:.0f}")


def _cpu_ms(problem: Problem) -> float:
    begun = time.process_time()
    solve(problem)
    return (time.process_time() - begun) * 1e3


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer layers and windows")
    parser.add_argument("--tiny", action="store_true", help="the tiny model's own routing, too")
    parser.add_argument("-o", "--output", type=Path, help="write the tables to a file as well")
    given = parser.parse_args(arguments)
    report, layers = Report(), 2 if given.quick else 6
    at_once(report, LITE, (64, 256, 1024, 16_384), layers)
    if not given.quick:
        at_once(report, SPARE, (256, 1024), layers)
        at_once(report, V3, (256, 1024), layers)
    entries = WINDOW * (5 if given.quick else 9)
    for shape in (SPARE,) if given.quick else (LITE, SPARE, V3):
        stream = drifting(shape, layers, entries, 2000)
        over_time(report, shape, stream, (256, 1024), f"Topics that drift, next window: {shape.name}, {layers} layers")
    if given.tiny:
        shape, stream = tiny_stream(WINDOW * 19)
        over_time(report, shape, stream, (256, 1024), f"{shape.name}, {len(stream[0])} layers, next window")
    times(report, 8 if given.quick else 58)
    if given.output:
        given.output.write_text("\n".join(report.lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
