"""Checkpoints: a Hugging Face folder read tensor by tensor, and the bundles (one expert's weights) made from it.

Which tensors make up an expert, and how they are laid out, is public in `transformers` itself (its checkpoint
conversion mapping). Reading that mapping makes bundles of any mixture-of-experts model it knows, with no code for a
single model: the library's own conversion runs on the tensors of one expert at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eplane.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
TINY = "tiny"
TINY_DIR = Path(__file__).parent / "tiny" / "model"


def model_dir(name: str) -> Path:
    """The folder of a model: the one that ships with the project for `tiny`, else the path itself."""
    return TINY_DIR if name == TINY else Path(name)


@dataclass(frozen=True, slots=True)
class Source:
    """Where one part of a parameter comes from: `key` in `file`, matched by the converter's pattern (None: as is).

    `index` selects along dimension 0 when the checkpoint holds all experts in one tensor.
    """

    file: Path
    key: str
    pattern: str | None
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to make one tensor: its sources in order, and the library's converter that joins them (None: a copy)."""

    target: str
    sources: tuple[Source, ...]
    converter: Any


class TensorFiles:
    """The safetensors files of one checkpoint folder, opened once and read tensor by tensor (memory mapped)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[Path, Any] = {}  # Never closed: tensors that were read may still lie in the mapped files.
        self.file_of: dict[str, Path] = {}
        for file in _weight_files(folder):
            for key in self._handle(file).keys():  # noqa: SIM118 (not a dict)
                self.file_of[key] = file

    def read(self, source: Source) -> torch.Tensor:
        """The tensor a source names. Raises CheckpointError naming file and tensor if it cannot be read."""
        handle = self._handle(source.file)
        try:
            whole = source.index is None
            tensor: torch.Tensor = (
                handle.get_tensor(source.key) if whole else handle.get_slice(source.key)[source.index]
            )
            return tensor
        except (SafetensorError, ValueError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"{source.file}: tensor {source.key} cannot be read: {error}") from error

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                opened: Any = safe_open(str(file), framework="pt", device="cpu")
                self._open[file] = opened.__enter__()
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{file}: not a readable safetensors file: {error}") from error
        return self._open[file]


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{index}: not a safetensors index: {error}") from error
        missing = [name for name in names if not (folder / str(name)).is_file()]
        if missing:
            raise CheckpointError(f"{folder}: the index names {missing[0]}, which is not there")
        return tuple(folder / str(name) for name in names)
    if (folder / SINGLE_FILE).is_file():
        return (folder / SINGLE_FILE,)
    raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


class Recipes:
    """Every parameter of a model, and the checkpoint tensors it is made of.

    `dense`: by parameter name. `experts[layer][expert]`: by bundle tensor name, layers in model order.
    """

    def __init__(self, files: TensorFiles, model: Any, expert_modules: Sequence[str], experts: int) -> None:
        self.files = files
        self._model = model
        self._modules = tuple(expert_modules)
        self._experts = experts
        self.bundle_names = _bundle_names(model, expert_modules)
        self.dense, self.experts = self._sort()

    def make(self, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
        """Read the sources and convert them, as the library would for the whole tensor."""
        parts: dict[str, list[torch.Tensor]] = {}
        for source in recipe.sources:
            tensor = self.files.read(source)
            parts.setdefault(source.pattern or source.key, []).append(tensor)
        if recipe.converter is None:
            return _as(parts[recipe.sources[0].key][0], dtype)
        lacking = [p for p in recipe.converter.source_patterns if p not in parts]
        if lacking:
            first = recipe.sources[0]
            raise CheckpointError(f"{first.file}: tensor {_sibling(first, lacking[0])} is not in the checkpoint")
        collected: dict[str, Any] = dict(parts)
        try:
            for operation in recipe.converter.operations:
                collected = operation.convert(
                    collected,
                    source_patterns=recipe.converter.source_patterns,
                    target_patterns=recipe.converter.target_patterns,
                    full_layer_name=recipe.target,
                    model=self._model,
                    config=self._model.config,
                    missing_keys=None,
                )
        except (RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{recipe.sources[0].file}: tensor {recipe.sources[0].key} does not convert: {error}"
            ) from error
        wanted = [value for name, value in collected.items() if name in recipe.target]
        result = wanted[0] if wanted else next(iter(collected.values()))
        return _as(result[0] if isinstance(result, list) else result, dtype)

    def _sort(self) -> tuple[dict[str, Recipe], list[list[dict[str, Recipe]]]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, dot_natural_key, rename_source_key

        transforms = get_model_conversion_mapping(self._model)
        converters = [t for t in transforms if isinstance(t, WeightConverter)]
        renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        known = self._model.state_dict()
        prefix = self._model.base_model_prefix
        expert_params = {f"{m}.{n}": (i, n) for i, m in enumerate(self._modules) for n in self.bundle_names}
        dense: dict[str, Recipe] = {}
        experts: list[list[dict[str, Recipe]]] = [[{} for _ in range(self._experts)] for _ in self._modules]
        for key in sorted(self.files.file_of, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, known)
            source = Source(self.files.file_of[key], key, pattern)
            converter = by_pattern[pattern] if pattern is not None else None
            if target not in expert_params:
                if target in known:
                    dense[target] = _extended(dense.get(target), target, source, converter)
                continue
            layer, name = expert_params[target]
            for expert, part in self._per_expert(source, pattern):
                row = experts[layer][expert]
                row[name] = _extended(row.get(name), target, part, converter)
        return dense, experts

    def _per_expert(self, source: Source, pattern: str | None) -> Iterator[tuple[int, Source]]:
        if pattern is None:
            for expert in range(self._experts):
                yield expert, Source(source.file, source.key, None, expert)
            return
        expert = _expert_in(source.key, pattern)
        if not 0 <= expert < self._experts:
            raise CheckpointError(
                f"{source.file}: tensor {source.key} is of expert {expert}; the model has {self._experts}"
            )
        yield expert, source


def _extended(recipe: Recipe | None, target: str, source: Source, converter: Any) -> Recipe:
    return Recipe(target, ((recipe.sources if recipe else ()) + (source,)), converter)


def _expert_in(key: str, pattern: str) -> int:
    """The number that stands at the pattern's star: `mlp.experts.*.up_proj.weight` -> the expert."""
    at = re.search(r"(\d+)".join(re.escape(part) for part in pattern.split("*")), key)
    if at is None or at.lastindex is None:
        raise CheckpointError(f"tensor {key}: no expert number where the pattern {pattern} has its star")
    return int(at.group(1))


def _sibling(source: Source, pattern: str) -> str:
    """The name of the tensor that stands beside `source` and matches another pattern of the same converter."""
    own = (source.pattern or "").split("*")
    tail, number = own[-1], re.search(r"(\d+)" + re.escape(own[-1]) + "$", source.key)
    if len(own) != 2 or number is None:
        return f"{pattern} beside {source.key}"
    head = source.key[: len(source.key) - len(tail) - len(number.group(1))].removesuffix(own[0])
    return head + pattern.replace("*", number.group(1))


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _bundle_names(model: Any, expert_modules: Sequence[str]) -> tuple[str, ...]:
    module = model.get_submodule(expert_modules[0])
    return tuple(name for name, _ in module.named_parameters(recurse=False))


def as_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's bytes in memory order (little endian, as all the machines this runs on are)."""
    return bytes(tensor.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes())


@dataclass(frozen=True, slots=True)
class Bundles:
    """The bundles of one checkpoint: for each (layer, expert) the tensors that move as one unit.

    `shapes`: `(name, shape)` in manifest order, for instance `gate_up_proj [2I, D]`, `down_proj [D, I]`.
    """

    recipes: Recipes
    dtype: torch.dtype
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def layers(self) -> int:
        return len(self.recipes.experts)

    def tensors(self, layer: int, expert: int) -> dict[str, torch.Tensor]:
        """The bundle's tensors. Raises CheckpointError when one is missing or has another shape than the model's."""
        row = self.recipes.experts[layer][expert]
        made: dict[str, torch.Tensor] = {}
        for name, shape in self.shapes:
            if name not in row:
                raise CheckpointError(
                    f"{self.recipes.files.folder}: nothing for {name} of expert {expert} in MoE layer {layer}"
                )
            tensor = self.recipes.make(row[name], self.dtype)
            if tuple(tensor.shape) == (1, *shape):
                tensor = tensor[0]
            if tuple(tensor.shape) != shape:
                first = row[name].sources[0]
                raise CheckpointError(
                    f"{first.file}: tensor {first.key} makes {name} of shape {tuple(tensor.shape)}, not {shape}"
                )
            made[name] = tensor.contiguous()
        return made

    def bundle_bytes(self, layer: int, expert: int) -> bytes:
        """The bundle as it lies in a cell: its tensors in manifest order, without gaps."""
        made = self.tensors(layer, expert)
        return b"".join(as_bytes(made[name]) for name, _ in self.shapes)


def load_dense(model: Any, recipes: Recipes, dtype: torch.dtype, wanted: Callable[[str], bool]) -> None:
    """Give `model` (on the meta device) every tensor for which `wanted(name)`. Missing ones raise CheckpointError."""
    state: dict[str, torch.Tensor] = {}
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for name, recipe in recipes.dense.items():
        if not wanted(name):
            continue
        tensor = recipes.make(recipe, dtype)
        if tuple(tensor.shape) != shapes[name]:
            first = recipe.sources[0]
            raise CheckpointError(
                f"{first.file}: tensor {first.key} has shape {tuple(tensor.shape)}, the model wants {shapes[name]}"
            )
        state[name] = tensor.contiguous()
    missing, _ = model.load_state_dict(state, strict=False, assign=True)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    lacking = [n for n in missing if wanted(n) and not (n in tied and model.config.tie_word_embeddings)]
    if lacking:
        raise CheckpointError(f"{recipes.files.folder}: tensor {lacking[0]} is not in the checkpoint")
