"""Held-out text stays held out, and the batches are a function of seed and step alone."""

from __future__ import annotations

import numpy as np
import pytest

from eplane.errors import CorpusMissing
from runtime.tiny.choose_prompts import choose, pieces, seen_in_training
from runtime.tiny.corpus import Split, batch, is_held_out, load_corpus, split_documents, stream_digest, token_stream
from runtime.tiny.sources import SOURCES, Document, Source, plain_roff
from runtime.tiny.tokens import BOS, EOS


def documents(source: str, count: int, lines: int = 30) -> list[Document]:
    rng = np.random.default_rng(count)
    words = [f"w{int(n)}" for n in rng.integers(0, 100_000, size=count * lines * 8)]
    rows = [" ".join(words[i : i + 8]) for i in range(0, len(words), 8)]
    return [Document(source, str(i), "\n".join(rows[i * lines : (i + 1) * lines]) + "\n") for i in range(count)]


def test_a_document_falls_on_the_same_side_whatever_stands_beside_it() -> None:
    everything = documents("s", 400)
    split = split_documents(everything, {"s": 10**9})
    again = split_documents(reversed(everything[:200]), {"s": 10**9})
    assert 5 < len(split.held_out) < 40
    assert len(split.train) + len(split.held_out) == 400
    assert all(is_held_out(d) for d in split.held_out)
    assert not any(is_held_out(d) for d in split.train)
    assert set(again.train) <= set(split.train)
    assert set(again.held_out) <= set(split.held_out)


def test_duplicates_count_once_and_a_cap_holds() -> None:
    everything = documents("s", 50)
    twins = [Document("s", "twin of " + d.name, d.text) for d in everything]
    once, twice = (split_documents(d, {"s": 10**9}) for d in (everything, everything + twins))
    assert [d.text for d in once.train] == [d.text for d in twice.train]
    capped = split_documents(everything, {"s": 5_000})
    assert 0 < sum(len(d.text.encode()) for d in capped.train) <= 5_000
    assert capped.held_out == once.held_out


def test_a_domain_without_text_is_an_error_that_names_packages() -> None:
    sources = [Source(s.name, s.domain, s.package, s.licence, s.cap, s.prompts, lambda: iter(())) for s in SOURCES]
    with pytest.raises(CorpusMissing, match="no python text found"):
        load_corpus(sources)


def test_every_machine_that_runs_this_has_python_text() -> None:
    source = next(s for s in SOURCES if s.domain == "python")
    some = [d for d, _ in zip(source.read(), range(5), strict=False)]
    assert len(some) == 5
    assert all(d.text for d in some)


def test_batches_depend_on_seed_and_step_alone() -> None:
    streams = {d: token_stream(documents(d, 6 + i)) for i, d in enumerate("abc")}
    rows = batch(streams, seed=3, step=7, rows=5, length=64)
    assert rows.shape == (5, 64)
    assert (rows == batch(dict(reversed(streams.items())), seed=3, step=7, rows=5, length=64)).all()
    assert (rows != batch(streams, seed=3, step=8, rows=5, length=64)).any()
    assert (rows != batch(streams, seed=4, step=7, rows=5, length=64)).any()
    for i, row in enumerate(rows):
        text = streams["abc"[(7 + i) % 3]].tobytes()
        assert row.astype(np.int16).tobytes() in text
    assert stream_digest(streams) != stream_digest({**streams, "a": streams["b"]})


def test_documents_stand_between_markers_and_short_streams_repeat() -> None:
    stream = token_stream([Document("s", "1", "é"), Document("s", "2", "b")])
    assert stream.tolist() == [BOS, 0xC3, 0xA9, EOS, BOS, ord("b"), EOS]
    assert batch({"a": stream}, seed=0, step=0, rows=1, length=20).shape == (1, 20)


def test_prompts_hold_nothing_that_was_trained_on() -> None:
    name = next(s.name for s in SOURCES if s.domain == "python" and s.prompts)
    train, held_out = documents(name, 40), documents(name, 41)
    quoting = [Document(name, d.name, d.text + train[0].text) for d in held_out]
    prompts = choose("python", Split(tuple(train), tuple(quoting)), seed=1)
    training = "".join(d.text for d in train).encode()
    assert prompts
    assert not any(seen_in_training(p.text.encode(), training) for p in prompts)
    assert seen_in_training(b"x" * 24 + training[100:180], training)
    with pytest.raises(Exception, match="only 0 short prompts"):
        choose("python", Split(tuple(train), tuple(train)), seed=1)


def test_pieces_start_at_lines_and_never_cut_a_character() -> None:
    text = "\n".join("诗歌" * n for n in range(1, 60))
    found = list(pieces(text, 64, 200, np.random.default_rng(0)))
    assert len(found) > 5
    assert all(64 <= len(p.encode()) <= 200 and "\ufffd" not in p for p in found)
    assert all(text.startswith(p) or "\n" + p in text for p in found)


def test_man_pages_become_prose() -> None:
    roff = '.TH X 2\n.SH NAME\nx \\- does\n.PP\nThe \\fBcall\\fP of\n.BR open (2)\n.I "a file"\n.\\" comment\n.nf\n'
    assert plain_roff(roff) == "NAME\nx - does\n\nThe call of\nopen(2)\na file\n"
