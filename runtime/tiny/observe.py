"""Runs a model by plain ``transformers`` and writes down what each token cost and which experts it went to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Observation:
    """``loss[r, t]`` in nats: of token t+1 of row r given what came before. ``chosen[l, r, t, k]``: expert ids."""

    loss: NDArray[np.float64]
    chosen: NDArray[np.int16]


def load_model(folder: Path) -> Any:
    """The checkpoint in fp32 on the CPU, ready to run; whatever MoE architecture ``transformers`` finds in it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="grouped_mm")
    return model.eval()


def expert_modules(model: Any) -> list[Any]:
    """The routed experts of each MoE layer, in layer order."""
    return [layer.mlp.experts for layer in model.model.layers if hasattr(layer.mlp, "experts")]


@contextmanager
def _routing(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the expert ids that each layer's experts are called with: [tokens, k] a layer."""
    seen = list[torch.Tensor]()

    def note(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
        seen.append(args[1].to(torch.int16))

    hooks = [module.register_forward_pre_hook(note) for module in expert_modules(model)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def observe(model: Any, rows: NDArray[np.int64]) -> Observation:
    """Teacher-forced over ``rows`` [R, T], all of equal length."""
    ids = torch.from_numpy(rows)
    with _routing(model) as seen:
        logits = model(input_ids=ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].double().transpose(1, 2), ids[:, 1:], reduction="none")
    chosen = torch.stack([one.view(*ids.shape, -1) for one in seen])
    return Observation(loss.numpy(), chosen.numpy())


def expert_counts(chosen: NDArray[np.int16], experts: int) -> NDArray[np.int64]:
    """Assignments per layer and expert. ``chosen`` [L, ...] -> [L, E]."""
    return np.stack([np.bincount(layer.ravel(), minlength=experts) for layer in chosen])


def observe_texts(model: Any, texts: Iterable[list[int]]) -> tuple[float, int, NDArray[np.int64]]:
    """Token sequences of any lengths, one by one. Returns (nats in all, bytes predicted, counts [L, E])."""
    nats, predicted = 0.0, 0
    counts = np.zeros((len(expert_modules(model)), model.config.num_experts), dtype=np.int64)
    for ids in texts:
        seen = observe(model, np.array([ids], dtype=np.int64))
        nats += float(seen.loss.sum())
        predicted += seen.loss.size
        counts += expert_counts(seen.chosen, model.config.num_experts)
    return nats, predicted, counts
