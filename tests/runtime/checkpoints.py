"""Tiny random checkpoints of architectures that the runtime serves without code of their own, in a realistic layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

KINDS = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3")
EXPERTS = 8
LAYERS = 3

_COMMON: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "initializer_range": 0.3,
}

_CONFIGS: dict[str, Callable[[], Any]] = {
    # Tied embeddings, grouped-query attention, norms on heads.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_COMMON, num_key_value_heads=2, head_dim=16, intermediate_size=96, moe_intermediate_size=32,
        num_experts=EXPERTS, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **_COMMON, num_key_value_heads=4, intermediate_size=32, num_experts=EXPERTS, num_experts_per_tok=2
    ),
    # Other tensor names on disk, a sliding window shorter than the test's texts.
    "mixtral": lambda: transformers.MixtralConfig(
        **_COMMON, num_key_value_heads=2, intermediate_size=48, num_local_experts=EXPERTS, num_experts_per_tok=2,
        sliding_window=40,
    ),
    # A dense first layer, a shared expert, routing limited to groups, latent attention.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_COMMON, num_key_value_heads=4, intermediate_size=96, moe_intermediate_size=32, n_routed_experts=EXPERTS,
        num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1, q_lora_rank=24, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16, n_shared_experts=1,
    ),
}  # fmt: skip


def make_checkpoint(kind: str, folder: Path, *, shard: str = "5GB") -> Path:
    """A random model of `kind` saved as users save theirs. Returns the folder."""
    torch.manual_seed(KINDS.index(kind))
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_config(_CONFIGS[kind](), dtype=torch.float32)
    model.save_pretrained(str(folder), max_shard_size=shard)
    return folder


def plain_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """`[len(tokens), V]`: what `transformers` alone computes, eager, in float32."""
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits
