"""A Hugging Face MoE model set up for expert-parallel serving: dense weights in memory, experts in cells.

The model is built on the meta device, so no byte of an expert that this rank does not hold is ever allocated. Its
attention and its experts are replaced through the public interfaces of `transformers`: no code for a single model.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eplane.errors import CheckpointError
from eplane.topology import ModelShape
from runtime.attention import EPLANE, AttentionContext, eplane_attention
from runtime.checkpoint import Bundles, Recipes, TensorFiles, load_dense
from runtime.experts import check_supported
from runtime.link.manifest import BundleManifest, TensorSpec

CONFIG_FILE = "config.json"
EXPERTS_OF_TOKEN = "num_experts_per_tok"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The dense part, ready to run; `experts[layer]` are its expert modules (parameters on meta), in model order."""

    network: Any
    experts: tuple[Any, ...]
    bundles: Bundles
    shape: ModelShape
    manifest: BundleManifest
    vocabulary: int
    context_tokens: int
    end_tokens: frozenset[int]


def load_model(folder: Path, name: str, dtype: torch.dtype, device: torch.device) -> ServedModel:
    """Build and load a model. Raises CheckpointError with one sentence when the folder cannot be served."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = read_config(folder)
    network = _build(folder, config, dtype)
    modules = _expert_modules(network)
    if not modules:
        raise CheckpointError(f"{folder}: model type {config.model_type} has no mixture-of-experts layer to serve")
    names = tuple(modules)
    for module_name, module in modules.items():
        check_supported(module, module_name)
    experts = {int(m.num_experts) for m in modules.values()}
    shapes = {tuple((n, tuple(p.shape[1:])) for n, p in m.named_parameters(recurse=False)) for m in modules.values()}
    if len(experts) != 1 or len(shapes) != 1:
        raise CheckpointError(f"{folder}: MoE layers of different shapes are not supported")
    count, shape = experts.pop(), shapes.pop()
    files = TensorFiles(folder)
    recipes = Recipes(files, network, names, count)
    prefixes = tuple(f"{n}." for n in names)
    load_dense(network, recipes, dtype, lambda key: not key.startswith(prefixes))
    _rebuild_buffers(network, config)
    network.tie_weights()
    _check_loaded(folder, network, prefixes)
    for layer, module in enumerate(modules.values()):
        module.eplane_layer = layer
    network.requires_grad_(False).eval()
    for key, tensor in list(network.named_parameters()) + list(network.named_buffers()):
        if not key.startswith(prefixes):
            tensor.data = tensor.data.to(device)
    manifest = BundleManifest(tuple(TensorSpec(n, str(dtype).removeprefix("torch."), s) for n, s in shape))
    return ServedModel(
        network,
        tuple(modules.values()),
        Bundles(recipes, dtype, shape),
        ModelShape(name, len(names), count, int(config.num_experts_per_tok), manifest.bundle_bytes),
        manifest,
        int(config.vocab_size),
        int(config.max_position_embeddings),
        _end_tokens(folder, config),
    )


def read_config(folder: Path) -> Any:
    """The model's configuration. Raises CheckpointError when it is missing, broken or of an unknown model type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    file = folder / CONFIG_FILE
    if not file.is_file():
        raise CheckpointError(f"{folder}: no {CONFIG_FILE} is there")
    _check_known(file)
    try:
        config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, StrictDataclassError) as error:
        sentence = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{file}: {sentence}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise CheckpointError(f"{file}: quantized checkpoints are not supported yet")
    if not getattr(config, EXPERTS_OF_TOKEN, None):
        raise CheckpointError(f"{file}: model type {config.model_type} is not a mixture of experts")
    _check_attention(file, config)
    return config


def _check_known(file: Path) -> None:
    """Refuse a model type that the installed transformers does not know, with those that could be served."""
    from transformers import CONFIG_MAPPING

    try:
        kind = json.loads(file.read_text()).get("model_type")
    except (OSError, ValueError, AttributeError):
        return  # Broken in another way, which the library tells in a sentence.
    if kind is None or kind in CONFIG_MAPPING:
        return
    known = ", ".join(served_types())
    raise CheckpointError(f"{file}: model type {kind!r:.80} is not known; mixtures of experts that are: {known}")


def served_types() -> list[str]:
    """Model types of the installed transformers that are mixtures of experts and generate text."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = []
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        with contextlib.suppress(KeyError, ImportError, AttributeError):
            config = CONFIG_MAPPING[kind]
            if hasattr(config, EXPERTS_OF_TOKEN) or EXPERTS_OF_TOKEN in config.attribute_map:
                found.append(kind)
    return sorted(found)


def _check_attention(file: Path, config: Any) -> None:
    """Refuse what would mix sequences that lie side by side: their tokens meet only in our attention, and only there
    are they kept apart."""
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise CheckpointError(f"{file}: layers of type {kind} are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    for entry in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if entry.get("rope_type") in ("dynamic", "longrope"):
            raise CheckpointError(f"{file}: rotary embedding of type {entry['rope_type']} is not supported")


def _build(folder: Path, config: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(EPLANE, eplane_attention)
    ALL_EXPERTS_FUNCTIONS.register(EPLANE, eplane_experts)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, attn_implementation=EPLANE, experts_implementation=EPLANE, dtype=dtype
            )
    except (ValueError, KeyError, ImportError) as error:
        raise CheckpointError(f"{folder}: model type {config.model_type} cannot be built: {error}") from error


def eplane_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The function that `transformers` calls for a layer's experts; the rank's dispatcher hangs on the module."""
    result: torch.Tensor = module.eplane_dispatch(hidden_states, top_k_index, top_k_weights)
    return result


def attach(model: ServedModel, dispatch: Any, context: AttentionContext) -> None:
    """Hang a rank's dispatcher and attention context on the model. `dispatch(layer, hidden, index, weights)`."""
    for layer, module in enumerate(model.experts):
        object.__setattr__(module, "eplane_dispatch", _Bound(dispatch, layer))
    for module in model.network.modules():
        if hasattr(module, "layer_idx"):
            object.__setattr__(module, "eplane_attention_context", context)


@dataclass(frozen=True, slots=True)
class _Bound:
    dispatch: Any
    layer: int

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.dispatch(self.layer, hidden, index, weights)
        return result


def _expert_modules(network: Any) -> dict[str, Any]:
    """Modules that the library marks as experts, by name, in the order of the layers."""
    return {name: m for name, m in network.named_modules() if hasattr(m, "_is_expert_parallel")}


def _rebuild_buffers(network: Any, config: Any) -> None:
    """Buffers that no checkpoint holds (rotary frequencies) are computed again off the meta device."""
    for name, module in list(network.named_modules()):
        lost = [b for b in module._non_persistent_buffers_set if module._buffers[b] is not None]
        if lost and module._buffers[lost[0]].is_meta:
            network.set_submodule(name, type(module)(config=getattr(module, "config", config)))


def _check_loaded(folder: Path, network: Any, prefixes: tuple[str, ...]) -> None:
    for name, tensor in list(network.named_parameters()) + list(network.named_buffers()):
        if tensor.is_meta and not name.startswith(prefixes):
            raise CheckpointError(f"{folder}: tensor {name} is not in the checkpoint")


def _end_tokens(folder: Path, config: Any) -> frozenset[int]:
    from transformers import GenerationConfig

    ends: Any = config.eos_token_id
    if (folder / "generation_config.json").is_file():
        given = GenerationConfig.from_pretrained(str(folder)).eos_token_id
        ends = ends if given is None else given
    if ends is None:
        return frozenset()
    return frozenset(int(e) for e in (ends if isinstance(ends, list) else [ends]))
