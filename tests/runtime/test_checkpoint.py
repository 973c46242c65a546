"""Bundles come out of checkpoints as the library would load them, and every broken folder gets one clear sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eplane.errors import CheckpointError
from runtime.model import load_model
from tests.runtime.checkpoints import EXPERTS, KINDS, make_checkpoint

CPU = torch.device("cpu")
Get = Callable[[str], Path]


@pytest.mark.parametrize("kind", KINDS)
def test_bundles_are_what_the_library_loads(kind: str, checkpoint: Get) -> None:
    folder = checkpoint(kind)
    served = load_model(folder, kind, torch.float32, CPU)
    transformers.utils.logging.disable_progress_bar()
    whole = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    modules = [m for m in whole.modules() if hasattr(m, "_is_expert_parallel")]
    assert served.shape.layers == len(modules)
    assert served.shape.experts == EXPERTS
    for layer, module in enumerate(modules):
        for expert in range(EXPERTS):
            made = served.bundles.tensors(layer, expert)
            assert list(made) == ["gate_up_proj", "down_proj"]
            for name, tensor in made.items():
                assert torch.equal(tensor, module.get_parameter(name)[expert])
            raw = served.bundles.bundle_bytes(layer, expert)
            assert len(raw) == served.shape.bundle_bytes
            head = torch.frombuffer(bytearray(raw), dtype=torch.float32)[: made["gate_up_proj"].numel()]
            assert torch.equal(head, made["gate_up_proj"].flatten())


def test_no_expert_weight_is_loaded_with_the_dense_part(checkpoint: Get) -> None:
    served = load_model(checkpoint("qwen3_moe"), "q", torch.float32, CPU)
    assert all(p.is_meta for module in served.experts for p in module.parameters())
    assert served.network.lm_head.weight is served.network.model.embed_tokens.weight


def test_a_sharded_checkpoint_is_read_through_its_index(tmp_path: Path, checkpoint: Get) -> None:
    whole = load_model(checkpoint("olmoe"), "o", torch.float32, CPU)
    parts = make_checkpoint("olmoe", tmp_path / "parts", shard="100KB")
    assert len(list(parts.glob("*.safetensors"))) > 1
    sharded = load_model(parts, "o", torch.float32, CPU)
    assert sharded.bundles.bundle_bytes(1, 3) == whole.bundles.bundle_bytes(1, 3)
    next(iter(sorted(parts.glob("*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"the index names model-00001\S+, which is not there"):
        load_model(parts, "o", torch.float32, CPU)


def _copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def _config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_truncated_file(tmp_path: Path, checkpoint: Get) -> None:
    folder = _copy(checkpoint("qwen3_moe"), tmp_path / "c")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a readable safetensors file"):
        load_model(folder, "c", torch.float32, CPU)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("model.layers.1.mlp.experts.3.up_proj.weight", "tensor model.layers.1.mlp.experts.3.up_proj.weight is not in"),
        (
            "model.layers.1.mlp.experts.3.gate_proj.weight",
            "tensor model.layers.1.mlp.experts.3.gate_proj.weight is not in",
        ),
        ("model.layers.1.mlp.experts.3.down_proj.weight", "nothing for down_proj of expert 3 in MoE layer 1"),
        ("model.layers.1.self_attn.q_proj.weight", "tensor model.layers.1.self_attn.q_proj.weight is not in"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, checkpoint: Get, broken: str, sentence: str) -> None:
    folder = _copy(checkpoint("qwen3_moe"), tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    del tensors[broken]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=sentence):
        load_model(folder, "c", torch.float32, CPU).bundles.tensors(1, 3)


@pytest.mark.parametrize("broken", ["model.layers.0.mlp.experts.2.down_proj.weight", "model.norm.weight"])
def test_a_tensor_of_a_wrong_shape_is_named(tmp_path: Path, checkpoint: Get, broken: str) -> None:
    folder = _copy(checkpoint("qwen3_moe"), tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    tensors[broken] = tensors[broken][..., :-1].contiguous()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=broken):
        load_model(folder, "c", torch.float32, CPU).bundles.tensors(0, 2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "never_heard_of"},
            r"config\.json: model type 'never_heard_of' is not known; mixtures of experts that are: .*, olmoe, .*qwen3_moe",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized checkpoints are not supported"),
        ({"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "of type linear_attention"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rotary embedding of type dynamic is not supported",
        ),
        ({"num_experts_per_tok": None}, "not a mixture of experts|num_experts_per_tok"),
    ],
)
def test_a_model_that_cannot_be_served(
    tmp_path: Path, checkpoint: Get, changes: dict[str, object], sentence: str
) -> None:
    folder = _copy(checkpoint("qwen3_moe"), tmp_path / "c")
    _config(folder, **changes)
    with pytest.raises(CheckpointError, match=sentence) as raised:
        load_model(folder, "c", torch.float32, CPU)
    assert raised.value.exit_code == 2
    assert "\n" not in str(raised.value)


def test_a_dense_model_is_no_mixture_of_experts(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.LlamaForCausalLM(config).save_pretrained(str(tmp_path / "dense"))
    with pytest.raises(CheckpointError, match="model type llama is not a mixture of experts"):
        load_model(tmp_path / "dense", "d", torch.float32, CPU)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json is there"):
        load_model(tmp_path, "x", torch.float32, CPU)
