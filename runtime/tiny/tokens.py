"""The byte tokenizer of the shipped model: token i < 256 is byte i, three specials follow.

No torch here: servers, tests and load generators use it without the runtime's heavy imports.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

BYTES = 256
BOS = 256
EOS = 257
PAD = 258
VOCAB = 260
"""Rows of the embedding: 256 bytes, three specials, one unused row that keeps the width a multiple of four."""


def encode(text: str, *, bos: bool = True) -> list[int]:
    """UTF-8 bytes of ``text`` as token ids, led by BOS unless told otherwise.

    Lone surrogates (what ``surrogateescape`` makes of broken input) become the bytes that they stand for.
    """
    data = text.encode("utf-8", errors="surrogateescape")
    return [BOS, *data] if bos else list(data)


def to_bytes(ids: Iterable[int]) -> bytes:
    """The bytes among ``ids``; specials carry no text and are dropped."""
    return bytes(i for i in ids if 0 <= i < BYTES)


def decode(ids: Iterable[int]) -> str:
    """Text of ``ids``; bytes that are no UTF-8 become U+FFFD, specials vanish."""
    return to_bytes(ids).decode("utf-8", errors="replace")


class StreamDecoder:
    """Decodes token by token: text comes out only when its last byte is in, so no half character is ever shown.

    The pieces joined are equal to :func:`decode` of all the ids at once.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._decoder.decode(to_bytes(ids))

    def finish(self) -> str:
        """What is left: U+FFFD where the stream ended inside a character, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text
