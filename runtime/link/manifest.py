"""The bundle manifest: the tensors of one expert, in the order in which their bytes travel and are digested."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eplane.errors import MessageError

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
}
"""Bytes of one item, for each dtype that a bundle may have (names of torch dtypes)."""

PORTION = 256 * 1024


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a bundle. `dtype` is a name in ITEM_BYTES; `shape` is that of one expert's tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name or self.dtype not in ITEM_BYTES or any(size < 1 for size in self.shape):
            raise MessageError("tensors", f"no tensor of a bundle: {self.name!r} {self.dtype!r} {self.shape}")

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class BundleManifest:
    """Every tensor that belongs to one expert and moves as one unit, in the order of their bytes in the bundle."""

    tensors: tuple[TensorSpec, ...]

    def __post_init__(self) -> None:
        names = [spec.name for spec in self.tensors]
        if not names or len(set(names)) != len(names):
            raise MessageError("tensors", f"must be at least one and have distinct names, got {names}")

    @property
    def bundle_bytes(self) -> int:
        return sum(spec.bytes for spec in self.tensors)


def bundle_digest(parts: Sequence[bytes | memoryview], pace: Callable[[], None] | None = None) -> str:
    """blake2b-128 over the bundle's bytes in manifest order, 32 hexadecimal digits.

    The interpreter lock is released meanwhile. `pace` is called after each portion of PORTION bytes.
    """
    total = hashlib.blake2b(digest_size=16)
    for part in parts:
        view = memoryview(part).cast("B")
        for start in range(0, view.nbytes, PORTION):
            total.update(view[start : start + PORTION])
            if pace is not None:
                pace()
    return total.hexdigest()


def manifest_digest(manifest: BundleManifest, digests: Sequence[Sequence[str]]) -> str:
    """16 digits that name the manifest and the digests of all bundles, so that ranks are compared at a glance."""
    text = json.dumps([[[s.name, s.dtype, list(s.shape)] for s in manifest.tensors], [list(row) for row in digests]])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
