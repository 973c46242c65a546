"""Text of tokens as they come: the pieces joined are the whole text, for work that is linear in it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from runtime.text import Vocabulary, _Tail

# A token is a byte, and some are two; 300 is skipped in every text, as an end token is.
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
PAIRS = [a + b for a, b in zip(LETTERS[:40], LETTERS[40:80], strict=True)]
END = len(LETTERS) + len(PAIRS)


def by_bytes() -> Tokenizer:
    vocabulary = {text: at for at, text in enumerate([*LETTERS, *PAIRS])}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def id_of(tokenizer: Tokenizer, text: str) -> int:
    found = tokenizer.token_to_id(text)
    if found is None:
        raise KeyError(text)
    return int(found)


def by_words() -> Tokenizer:
    """Words with a mark for the space before them; the space of the first is taken off the text."""
    words = ["▁", "▁a", "▁bc", "d", "▁▁", "e▁", ".", "<0xE2>", "<0x82>", "<0xAC>"]
    made = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


# Of words the bytes of a character come together: what ends within one is no text in any decoder.
TOKENIZERS = {
    "bytes": (by_bytes(), [[at] for at in range(END + 1)]),
    "words": (by_words(), [*([at] for at in range(7)), [7, 8, 9]]),
}


class Counted:
    """Counts the tokens that are decoded."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.tokens = 0

    def decode(self, ids: list[int]) -> str:
        self.tokens += len(ids)
        return str(self._tokenizer.decode(ids))


def joined(tokenizer: Any, ids: list[int]) -> str:
    decoder = _Tail(tokenizer)
    return "".join([decoder.push([one]) for one in ids] + [decoder.finish()])


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_pieces_are_the_whole_text(name: str, data: st.DataObject) -> None:
    tokenizer, units = TOKENIZERS[name]
    ids = [one for unit in data.draw(st.lists(st.sampled_from(units), max_size=60)) for one in unit]
    assert joined(tokenizer, ids) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_comes_whole() -> None:
    tokenizer, _ = TOKENIZERS["words"]
    decoder = _Tail(tokenizer)
    assert [decoder.push([one]) for one in (1, 7, 8, 9, 2)] == ["a", "", "", "€", " bc"]


@pytest.mark.parametrize("kind", ["text", "bytes that are no character", "tokens without a text"])
def test_work_is_linear_in_the_output(kind: str) -> None:
    tokenizer, _ = TOKENIZERS["bytes"]
    broken = id_of(tokenizer, LETTERS[-1])
    letters = [id_of(tokenizer, c) for c in "abcdefgh"]
    rng = random.Random(0)
    ids: list[int] = {
        "text": [rng.choice(letters) for _ in range(2000)],
        "bytes that are no character": [broken] * 2000,
        "tokens without a text": [letters[0], *[END] * 2000, letters[1]],
    }[kind]
    counted = Counted(tokenizer)
    assert joined(counted, ids) == tokenizer.decode(ids)
    assert counted.tokens < 300 * len(ids), "all of it anew with each token would be 1000 a token"


def test_the_tokenizer_of_a_checkpoint_decodes_so(tmp_path: Path) -> None:
    tokenizer, _ = TOKENIZERS["bytes"]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    decoder = Vocabulary(tmp_path / "tokenizer.json").decoder()
    ids = [id_of(tokenizer, c) for c in "abc"]
    assert decoder.push(ids) == "abc"
    assert isinstance(decoder, _Tail)
