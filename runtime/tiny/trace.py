"""Records the model's own routing over a long shifting stream: ``python -m runtime.tiny.trace``.

The stream is held-out text. Domains follow one another, with ramps between them, mixtures, and a stretch where they
change every few windows (on which moving experts at each change would be thrashing).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from eplane.errors import BadInput
from runtime.tiny import DOMAINS, MODEL_DIR, SHIFT_TRACE
from runtime.tiny.corpus import load_corpus, token_stream
from runtime.tiny.observe import expert_counts, load_model, observe
from runtime.tiny.recorded import LoadTrace, save_trace

ROWS, LENGTH = 8, 256
MIXED = "mixed"
RAMP = 6
PHASES: tuple[tuple[str, int], ...] = (
    ("python", 40),
    ("english", 40),
    ("chinese", 40),
    (MIXED, 24),
    ("chinese", 24),
    ("python", 24),
    *((domain, 4) for _ in range(4) for domain in ("english", "chinese")),
    (MIXED, 16),
    ("english", 40),
    ("python", 40),
)
"""(domain, windows) in order; between phases of 16 windows or more the text blends over the last RAMP windows."""


def mixture(phases: Sequence[tuple[str, int]] = PHASES) -> NDArray[np.float32]:
    """Share of each domain in each window. [W, domains], rows sum to 1."""
    pure = {domain: np.eye(len(DOMAINS))[i] for i, domain in enumerate(DOMAINS)}
    pure[MIXED] = np.full(len(DOMAINS), 1 / len(DOMAINS))
    rows = list[NDArray[np.float64]]()
    for number, (domain, windows) in enumerate(phases):
        following = phases[number + 1] if number + 1 < len(phases) else None
        ramp = RAMP if following is not None and min(windows, following[1]) >= 16 else 0
        rows += [pure[domain]] * (windows - ramp)
        if following is not None:
            target = pure[following[0]]
            rows += [pure[domain] + (target - pure[domain]) * (i + 1) / (ramp + 1) for i in range(ramp)]
    return np.array(rows, dtype=np.float32)


def label(mix: NDArray[np.float32]) -> str:
    return DOMAINS[int(mix.argmax())] if float(mix.max()) > 0.999 else MIXED


def record(model: Any, streams: Mapping[str, NDArray[np.int16]], mix: NDArray[np.float32], seed: int) -> LoadTrace:
    """One window of ROWS x LENGTH tokens for each row of ``mix``; each text row comes from one domain."""
    rng = np.random.default_rng(seed)
    experts = model.config.num_experts
    load = list[NDArray[np.int64]]()
    for window, shares in enumerate(mix):
        probabilities = shares.astype(np.float64) / float(shares.astype(np.float64).sum())
        rows = np.empty((ROWS, LENGTH), dtype=np.int64)
        # Systematic sampling: the drawn rows follow the shares as closely as whole rows can.
        points = (np.arange(ROWS) + rng.random()) / ROWS
        for row, index in enumerate(np.searchsorted(np.cumsum(probabilities), points).clip(0, len(DOMAINS) - 1)):
            stream = streams[DOMAINS[int(index)]]
            start = int(rng.integers(0, len(stream) - LENGTH + 1))
            rows[row] = stream[start : start + LENGTH]
        load.append(expert_counts(observe(model, rows).chosen, experts))
        if window % 50 == 49:
            print(f"{window + 1} of {len(mix)} windows", flush=True)
    return LoadTrace(
        load=np.stack(load).astype(np.int32),
        domain=tuple(label(shares) for shares in mix),
        mix=mix,
        domains=DOMAINS,
        tokens=ROWS * LENGTH,
        top_k=model.config.num_experts_per_tok,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.tiny.trace", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--out", type=Path, default=SHIFT_TRACE)
    parser.add_argument("--seed", type=int, default=11)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        streams = {domain: token_stream(split.held_out) for domain, split in load_corpus().items()}
        short = [domain for domain, stream in streams.items() if len(stream) < LENGTH]
        if short:
            raise BadInput(f"too little held-out text on this machine: {', '.join(short)}")
        save_trace(args.out, record(load_model(args.model), streams, mixture(), args.seed))
    except BadInput as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    print(f"{args.out}: {args.out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
