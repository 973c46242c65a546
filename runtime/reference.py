"""The check of served answers: one rank, deterministic, the whole answer in one teacher-forced pass.

In deterministic mode a served token's logits depend on its own sequence alone, bit for bit, so the pass over prompt
and answer gives the very logits from which each token was chosen: on any number of ranks, under any placement, with
any neighbours, before and after any migration.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from eplane.errors import BadInput
from eplane.placement import linear
from runtime.attention import Span
from runtime.cells import CellPool
from runtime.checkpoint import model_dir
from runtime.collective import Alone
from runtime.dispatch import Dispatcher
from runtime.forward import Forward
from runtime.kvcache import pages_for
from runtime.model import attach, load_model
from runtime.rank import fill_cells
from runtime.sampling import Sampling, choose, log_probabilities
from runtime.tables import build_table

CHUNK_TOKENS = 256
"""Tokens of a pass; the results do not depend on it."""


class Reference:
    """One deterministic rank that holds every expert once, linear. Not thread-safe."""

    def __init__(self, folder: str | Path) -> None:
        device = torch.device("cpu")
        self.folder = model_dir(str(folder))
        model = load_model(self.folder, self.folder.name, torch.float32, device)
        placement = linear(model.shape.layers, model.shape.experts, 1, model.shape.experts)
        pool = CellPool(model.manifest, placement.layers * placement.slots, device)
        cell_of, _ = fill_cells(pool, model, placement, 0)
        self._table = build_table(placement, 0, cell_of, device=device)
        self._dispatcher = Dispatcher(
            Alone(), pool, model.experts, int(model.network.config.hidden_size), torch.float32, model.shape.top_k,
            lambda headers: None, lambda vector: None, fixed_tiles=True,
        )  # fmt: skip
        pages = pages_for(model.context_tokens)
        self._forward = Forward(model, pages, device, deterministic=True)
        self._pages = tuple(range(pages))
        self._model = model
        self._plain: Any = None
        attach(model, self._dispatcher.layer, self._forward.context)

    def logits(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> NDArray[np.float32]:
        """`[len(output_ids), V]`: the rows from which each output token was chosen."""
        tokens = self._tokens(prompt_ids, output_ids)[:-1]
        first = len(prompt_ids) - 1
        parts: list[torch.Tensor] = []
        for start in range(0, len(tokens), CHUNK_TOKENS):
            part = tokens[start : start + CHUNK_TOKENS]
            self._dispatcher.begin(self._table, start, 0, torch.zeros(len(part), dtype=torch.int64))
            rows = [i for i in range(len(part)) if start + i >= first]
            made = self._forward.logits(part, [Span(start, len(part), self._pages)], rows or [0])
            if rows:
                parts.append(made)
        result: NDArray[np.float32] = torch.cat(parts).numpy()
        return result

    def score(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> tuple[list[int], list[float]]:
        """For each output token: the likeliest token there, and the log probability of the one given."""
        rows = self.logits(prompt_ids, output_ids)
        logs = [float(log_probabilities(row)[token]) for row, token in zip(rows, output_ids, strict=True)]
        return [int(np.argmax(row)) for row in rows], logs

    def plain(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> NDArray[np.float32]:
        """The rows of `logits` as `transformers` itself computes them, eager, in float32."""
        if self._plain is None:
            from transformers import AutoModelForCausalLM

            self._plain = AutoModelForCausalLM.from_pretrained(
                str(self.folder), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager",
                local_files_only=True,
            )  # fmt: skip
        tokens = self._tokens(prompt_ids, output_ids)[:-1]
        with torch.inference_mode():
            out = self._plain(torch.tensor([tokens]), use_cache=False).logits[0, len(prompt_ids) - 1 :]
        result: NDArray[np.float32] = out.float().numpy()
        return result

    def _tokens(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[int]:
        tokens = [*prompt_ids, *output_ids]
        if not prompt_ids or not output_ids:
            raise BadInput("a check needs at least one prompt token and one output token")
        if len(tokens) > self._model.context_tokens:
            raise BadInput(f"{len(tokens)} tokens exceed the context of {self._model.context_tokens}")
        if min(tokens) < 0 or max(tokens) >= self._model.vocabulary:
            raise BadInput(f"a token is outside 0..{self._model.vocabulary - 1}")
        return tokens


@dataclass(frozen=True, slots=True)
class Answered:
    """One line of input: what was asked and what came back. Sampling is greedy unless told."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    sampling: Sampling

    @classmethod
    def from_line(cls, line: str, number: int) -> Answered:
        try:
            given = json.loads(line)
            prompt = tuple(int(t) for t in given["prompt_token_ids"])
            tokens = tuple(int(t) for t in given["token_ids"])
            logprobs = tuple(float(p) for p in given["logprobs"])
            sampling = Sampling(
                float(given.get("temperature", 0.0)), float(given.get("top_p", 1.0)), int(given.get("seed", 0))
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadInput(f"line {number}: not an answer to check: {error!r}") from error
        if len(tokens) != len(logprobs):
            raise BadInput(f"line {number}: {len(tokens)} tokens and {len(logprobs)} log probabilities")
        return cls(prompt, tokens, logprobs, sampling)


def check(reference: Reference, answer: Answered) -> dict[str, object]:
    """A token is wrong unless it is the one chosen here and its log probability is the same, bit for bit."""
    rows = reference.logits(answer.prompt, answer.tokens)
    wrong: list[int] = []
    for i, (row, token, logprob) in enumerate(zip(rows, answer.tokens, answer.logprobs, strict=True)):
        chosen = choose(row, answer.sampling, len(answer.prompt) + i)
        if chosen.token != token or chosen.logprob != logprob:
            wrong.append(i)
    return {"wrong": len(wrong), "first_wrong": wrong[0] if wrong else None, "checked": len(answer.tokens)}


def check_plain(reference: Reference, answer: Answered) -> dict[str, object]:
    """Distance from plain `transformers`: of all logits of our pass, and of the log probabilities that were served."""
    plain = reference.plain(answer.prompt, answer.tokens)
    ours = reference.logits(answer.prompt, answer.tokens)
    logs = [float(log_probabilities(row)[token]) for row, token in zip(plain, answer.tokens, strict=True)]
    apart = max(abs(a - b) for a, b in zip(logs, answer.logprobs, strict=True))
    return {
        "max_abs_diff": float(np.abs(plain - ours).max()),
        "max_logprob_diff": apart,
        "checked": len(answer.tokens),
    }


def score_lines(model: str, lines: Iterable[str], out: TextIO, *, plain: bool = False) -> int:
    """Check JSON lines of answers, one line of result each, in order. Returns the exit code: 0 also if some are wrong."""
    torch.set_num_threads(1)
    reference = Reference(model)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        answer = Answered.from_line(line, number)
        result = (check_plain if plain else check)(reference, answer)
        out.write(json.dumps(result) + "\n")
        out.flush()
    return 0
