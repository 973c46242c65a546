"""The training corpus: documents of each domain, split into trained-on and held out by the hash of their text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eplane.errors import CorpusMissing
from runtime.tiny import DOMAINS
from runtime.tiny.sources import SOURCES, Document, Source
from runtime.tiny.tokens import BOS, EOS

HELD_OUT_PER_256 = 13
"""Documents whose hash starts with a byte below this are held out: about 5 %."""


@dataclass(frozen=True, slots=True)
class Split:
    """Documents of one domain, each list in an order that depends on their texts alone."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def text_hash(document: Document) -> bytes:
    return hashlib.sha256(document.text.encode()).digest()


def is_held_out(document: Document) -> bool:
    """By the text alone: the same document falls on the same side on every machine and in every run."""
    return text_hash(document)[0] < HELD_OUT_PER_256


def split_documents(documents: Iterable[Document], caps: Mapping[str, int]) -> Split:
    """Splits, drops duplicates and keeps at most ``caps[source]`` bytes of each source to train on."""
    unique = {text_hash(d): d for d in documents}
    train, held_out, used = list[Document](), list[Document](), dict[str, int]()
    for _, document in sorted(unique.items()):
        if is_held_out(document):
            held_out.append(document)
            continue
        size = len(document.text.encode())
        if used.get(document.source, 0) + size <= caps[document.source]:
            used[document.source] = used.get(document.source, 0) + size
            train.append(document)
    return Split(tuple(train), tuple(held_out))


def load_corpus(sources: Iterable[Source] = SOURCES) -> dict[str, Split]:
    """Reads every source that is installed. Raises :class:`CorpusMissing` if a domain stays empty."""
    by_domain: dict[str, list[Source]] = {domain: [] for domain in DOMAINS}
    for source in sources:
        by_domain[source.domain].append(source)
    corpus = dict[str, Split]()
    for domain, members in by_domain.items():
        documents = [document for source in members for document in source.read()]
        corpus[domain] = split_documents(documents, {source.name: source.cap for source in members})
        if not corpus[domain].train:
            wanted = "; ".join(sorted({source.package for source in members}))
            raise CorpusMissing(f"no {domain} text found on this machine: install one of: {wanted}")
    return corpus


def token_stream(documents: Iterable[Document]) -> NDArray[np.int16]:
    """All documents in a row, each between BOS and EOS. [tokens], int16."""
    pieces = list[NDArray[np.int16]]()
    for document in documents:
        data = np.frombuffer(document.text.encode(), dtype=np.uint8).astype(np.int16)
        pieces.append(np.concatenate([[BOS], data, [EOS]]).astype(np.int16))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int16)


def stream_digest(streams: Mapping[str, NDArray[np.int16]]) -> str:
    """Identifies the exact training data, so that a run is not resumed on another."""
    digest = hashlib.sha256()
    for domain in sorted(streams):
        digest.update(domain.encode())
        digest.update(streams[domain].astype("<i2").tobytes())
    return digest.hexdigest()[:16]


def batch(streams: Mapping[str, NDArray[np.int16]], seed: int, step: int, rows: int, length: int) -> NDArray[np.int64]:
    """Rows of step ``step``: a function of (streams, seed, step) alone, so a resumed run sees what it would have seen.

    Row i comes from domain (step + i) mod the number of domains, at a random offset. [rows, length]
    """
    rng = np.random.default_rng((seed, step))
    domains = sorted(streams)
    out = np.empty((rows, length), dtype=np.int64)
    for row in range(rows):
        stream = streams[domains[(step + row) % len(domains)]]
        if len(stream) < length:
            stream = np.tile(stream, -(-length // len(stream)))
        start = int(rng.integers(0, len(stream) - length + 1))
        out[row] = stream[start : start + length]
    return out
