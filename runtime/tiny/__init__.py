"""The tiny byte-level MoE language model that ships with EPlane, its prompts and its recorded loads. No torch here."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from eplane.errors import BadInput
from runtime.tiny.recorded import LoadTrace, load_trace

_HERE = Path(__file__).parent
MODEL_DIR = _HERE / "model"
"""A Hugging Face folder (Qwen3-MoE, bf16): config.json, generation_config.json, model.safetensors, report.json."""
PROMPTS_DIR = _HERE / "prompts"
SHIFT_TRACE = _HERE / "traces" / "shift.npz"
DOMAINS = ("python", "english", "chinese")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Held-out text: never seen in training. ``kind`` is "short" (64 to 200 bytes) or "long" (500 to 800)."""

    id: str
    domain: str
    kind: str
    text: str
    source: str
    licence: str


def load_prompts(domain: str, kind: str | None = None) -> tuple[Prompt, ...]:
    """The shipped prompts of a domain, in a fixed order; of one kind if named."""
    if domain not in DOMAINS:
        raise BadInput(f"no domain {domain!r}: there are {', '.join(DOMAINS)}")
    lines = (PROMPTS_DIR / f"{domain}.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = tuple(Prompt(**json.loads(line)) for line in lines)
    return tuple(p for p in prompts if kind is None or p.kind == kind)


__all__ = ["DOMAINS", "MODEL_DIR", "PROMPTS_DIR", "SHIFT_TRACE", "LoadTrace", "Prompt", "load_prompts", "load_trace"]
