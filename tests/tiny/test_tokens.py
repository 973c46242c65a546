"""The byte tokenizer: nothing is lost, and a stream never shows half a character."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplane.errors import BadInput
from runtime.tiny import DOMAINS, load_prompts
from runtime.tiny.tokens import BOS, EOS, PAD, StreamDecoder, decode, encode, to_bytes


@given(st.text())
def test_text_comes_back(text: str) -> None:
    ids = encode(text)
    assert ids[0] == BOS
    assert all(i < 256 for i in ids[1:])
    assert decode([*ids, EOS, PAD]) == text
    assert encode(text, bos=False) == ids[1:]


@given(st.binary())
def test_any_bytes_come_back(data: bytes) -> None:
    text = data.decode("utf-8", errors="surrogateescape")
    assert to_bytes(encode(text)) == data


@given(st.binary(), st.lists(st.integers(0, 40)))
def test_a_stream_in_pieces_reads_as_the_whole(data: bytes, cuts: list[int]) -> None:
    decoder, shown, at = StreamDecoder(), "", 0
    for size in [*cuts, len(data)]:
        shown += decoder.push(data[at : at + size])
        at += size
    shown += decoder.push(data[at:]) + decoder.finish()
    assert shown == data.decode("utf-8", errors="replace")


def test_a_character_appears_with_its_last_byte() -> None:
    decoder = StreamDecoder()
    first, second, third = "中".encode()
    assert decoder.push([first]) == ""
    assert decoder.push([second]) == ""
    assert decoder.push([third, EOS]) == "中"
    assert decoder.push([first]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts_ship_with_sizes_sources_and_licences(domain: str) -> None:
    short, long = load_prompts(domain, "short"), load_prompts(domain, "long")
    assert len(short) == 48
    assert len(long) == 8
    assert all(64 <= len(p.text.encode()) <= 200 for p in short)
    assert all(500 <= len(p.text.encode()) <= 800 for p in long)
    everything = load_prompts(domain)
    assert everything == (*short, *long)
    assert len({p.id for p in everything}) == len({p.text for p in everything}) == len(everything)
    assert all(p.domain == domain and p.source and p.licence for p in everything)


def test_an_unknown_domain_is_named() -> None:
    with pytest.raises(BadInput, match="no domain 'poems'"):
        load_prompts("poems")


def test_tokens_prompts_and_traces_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from runtime.tiny import SHIFT_TRACE, load_prompts, load_trace\n"
        "import runtime.tiny.tokens, runtime.tiny.sources, runtime.tiny.corpus, runtime.tiny.choose_prompts\n"
        "load_prompts('python'); load_trace(SHIFT_TRACE)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
