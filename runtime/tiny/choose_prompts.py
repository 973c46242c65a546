"""Chooses the shipped prompts from held-out documents: ``python -m runtime.tiny.choose_prompts --out DIR``.

Only from sources whose texts may be redistributed, and only pieces of which no 47 bytes in a row occur in the
training text of their domain (windows of 40 bytes are looked up, every 8 bytes).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path

import numpy as np

from eplane.errors import BadInput
from runtime.tiny import PROMPTS_DIR, Prompt
from runtime.tiny.corpus import Split, load_corpus
from runtime.tiny.sources import SOURCES, Document

WINDOW = 40
STRIDE = 8
SIZES = {"short": (64, 200, 48), "long": (500, 800, 8)}
"""kind -> least bytes, most bytes, prompts a domain."""


def seen_in_training(piece: bytes, training: bytes) -> bool:
    """Whether any of the piece's 40-byte windows (every 8 bytes) occurs in the training text."""
    starts = range(0, max(1, len(piece) - WINDOW + 1), STRIDE)
    return any(piece[start : start + WINDOW] in training for start in starts)


def merged(documents: Sequence[Document], least: int) -> list[str]:
    """Texts of at least ``least`` bytes: short documents of a source are joined with their neighbours."""
    texts, waiting = list[str](), ""
    for document in documents:
        waiting += document.text
        if len(waiting.encode()) >= least:
            texts.append(waiting)
            waiting = ""
    return texts


def pieces(text: str, least: int, most: int, rng: np.random.Generator) -> Iterator[str]:
    """Pieces that start at a line and end anywhere, ``least`` to ``most`` bytes, without overlap, in text order."""
    data, at = text.encode(), 0
    while at < len(data):
        size = int(rng.integers(least, most + 1))
        piece = data[at : at + size].decode("utf-8", errors="ignore").rstrip()
        if len(piece.encode()) >= least and piece.strip():
            yield piece
        following = data.find(b"\n", at + size + int(rng.integers(0, most)))
        if following < 0:
            return
        at = following + 1


def choose(domain: str, split: Split, seed: int) -> list[Prompt]:
    """Takes from all sources and documents in turn, so that no single text fills a domain."""
    licences = {source.name: source.licence for source in SOURCES if source.domain == domain and source.prompts}
    training = b"\n".join(document.text.encode() for document in split.train)
    chosen = list[Prompt]()
    for kind, (least, most, wanted) in SIZES.items():
        rng = np.random.default_rng((seed, least))
        by_source = list[list[tuple[str, Iterator[str]]]]()
        for name in licences:
            texts = merged([d for d in split.held_out if d.source == name], 2 * most)
            by_source.append([(name, pieces(texts[int(i)], least, most, rng)) for i in rng.permutation(len(texts))])
        order = [queue for turn in zip_longest(*by_source) for queue in turn if queue is not None]
        taken = 0
        while order and taken < wanted:
            name, queue = order.pop(0)
            piece = next((p for p in queue if not seen_in_training(p.encode(), training)), None)
            if piece is None:
                continue
            order.append((name, queue))
            taken += 1
            chosen.append(Prompt(f"{domain}-{kind}-{taken:02d}", domain, kind, piece, name, licences[name]))
        if taken < wanted:
            raise BadInput(f"{domain}: only {taken} {kind} prompts could be found in the held-out text, not {wanted}")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m runtime.tiny.choose_prompts", description=__doc__)
    parser.add_argument("--out", type=Path, default=PROMPTS_DIR)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args(argv)
    try:
        prompts = {domain: choose(domain, split, args.seed) for domain, split in load_corpus().items()}
    except BadInput as error:
        print(str(error), file=sys.stderr)
        return error.exit_code
    args.out.mkdir(parents=True, exist_ok=True)
    for domain, lines in prompts.items():
        text = "".join(json.dumps(asdict(p), ensure_ascii=False) + "\n" for p in lines)
        (args.out / f"{domain}.jsonl").write_text(text, encoding="utf-8")
        print(f"{domain}: {len(lines)} prompts")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
