"""One rank: logits equal plain `transformers`, and in deterministic mode bit for bit whatever stands beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from runtime.attention import Span
from runtime.checkpoint import model_dir
from runtime.deterministic import TILE_ROWS, fixed_tiles, tiled_linear
from runtime.reference import Reference
from tests.runtime.checkpoints import KINDS, plain_logits
from tests.runtime.local import LocalRank, local_rank

Get = Callable[[str], Path]
TOKENS = 150


def _tokens(seed: int, count: int = TOKENS) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 256, count)]


def _in_chunks(rank: LocalRank, tokens: list[int], seed: int) -> torch.Tensor:
    """The same tokens in random chunks, each beside a random part of another sequence, before or after it."""
    rng = np.random.default_rng(seed)
    parts: list[torch.Tensor] = []
    start = step = 0
    while start < len(tokens):
        count = min(int(rng.choice([1, 1, 2, 15, 16, 17, 40])), len(tokens) - start)
        other = int(rng.integers(0, 30))
        mine = (tokens[start : start + count], Span(start, count, (7, 3, 5)))
        beside = (_tokens(step, other), Span(0, other, (1, 2)))
        order = [mine, beside] if rng.random() < 0.5 else [beside, mine]
        logits = rank.logits(step, [part for part in order if part[1].count])
        offset = 0 if order[0] is mine else other
        parts.append(logits[offset : offset + count])
        start += count
        step += 1
    return torch.cat(parts)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_plain_transformers_and_bits_depend_on_nothing(kind: str, checkpoint: Get) -> None:
    folder = checkpoint(kind)
    tokens = _tokens(1)
    plain = plain_logits(folder, tokens)
    span = Span(0, TOKENS, (0, 1, 2))
    for deterministic in (True, False):
        rank = local_rank(folder, 3, slots=10, deterministic=deterministic)
        once = rank.logits(0, [(tokens, span)])
        assert float((once - plain).abs().max()) < 1e-4
        chunked = _in_chunks(rank, tokens, 5)
        assert float((chunked - plain).abs().max()) < 1e-4
        if deterministic:
            assert torch.equal(once, chunked)
            assert torch.equal(once, _in_chunks(local_rank(folder, 8, slots=12), tokens, 6))


def test_the_shipped_model_scores_as_plain_transformers_do() -> None:
    reference = Reference("tiny")
    prompt, output = (
        [256, *b"def read(self, path: str) -> bytes:\n"],
        list(b"    with open(path) as file:\n        return file.read()\n"),
    )
    plain = reference.plain(prompt, output)
    ours = reference.logits(prompt, output)
    assert float(np.abs(plain - ours).max()) < 1e-4
    likeliest, logs = reference.score(prompt, output)
    assert likeliest == [int(t) for t in ours.argmax(axis=1)]
    assert len(logs) == len(output)
    assert all(logprob <= 0.0 for logprob in logs)
    assert model_dir("tiny").name == "model"


def test_without_fixed_tiles_bits_do_depend_on_the_neighbours(checkpoint: Get) -> None:
    """The guard's reason: if this ever passes bit for bit, fixed tiles could go."""
    rank = local_rank(checkpoint("olmoe"), 3, slots=10, deterministic=False)
    tokens = _tokens(1)
    once = rank.logits(0, [(tokens, Span(0, TOKENS, (0, 1, 2)))])
    assert not torch.equal(once, _in_chunks(rank, tokens, 5))


def test_tiled_linear_is_linear() -> None:
    x, weight, bias = torch.randn(3, 7, 24), torch.randn(10, 24), torch.randn(10)
    usual = functional.linear(x, weight, bias)
    with fixed_tiles():
        tiled = functional.linear(x, weight, bias)
        assert functional.linear is tiled_linear
    assert functional.linear is not tiled_linear
    assert tiled.shape == usual.shape
    assert torch.allclose(tiled, usual, atol=1e-5)
    row = torch.randn(1, 24)
    for beside in (0, 1, TILE_ROWS - 1, TILE_ROWS, 100):
        many = torch.cat([torch.randn(beside, 24), row])
        assert torch.equal(tiled_linear(many, weight)[-1], tiled_linear(row, weight)[0])
