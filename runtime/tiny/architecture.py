"""The shipped model's shape, as the Hugging Face architecture Qwen3-MoE."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from runtime.tiny.tokens import BOS, EOS, PAD, VOCAB

LAYERS = 8
EXPERTS = 32
TOP_K = 4
CONTEXT = 1024


def build_config(*, aux_loss: float = 0.001, layers: int = LAYERS, experts: int = EXPERTS) -> Qwen3MoeConfig:
    """``aux_loss`` weighs the load-balancing loss: small, so that experts specialise and real skew remains."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=experts,
        num_experts_per_tok=TOP_K,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        router_aux_loss_coef=aux_loss,
        output_router_logits=False,
        tie_word_embeddings=True,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
        dtype="bfloat16",
    )


def build_model(config: Qwen3MoeConfig, seed: int) -> Qwen3MoeForCausalLM:
    """A freshly initialised fp32 model; experts as grouped matmuls, measured as the fastest way on one CPU thread."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM._from_config(
        config, attn_implementation="sdpa", experts_implementation="grouped_mm", dtype=torch.float32
    )
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, max_new_tokens=64, do_sample=False
    )
    return model
