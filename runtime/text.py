"""Text to tokens and back, without torch: the shipped model's bytes, or a checkpoint's own `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from eplane.errors import BadInput
from runtime.tiny import tokens as tiny

TOKENIZER_FILE = "tokenizer.json"
# Tokens that wait for the rest of a character, at most; a character has 4 bytes.
MOST_HELD = 32
_BROKEN = "�"


class Decoder(Protocol):
    """Turns tokens into text as they come; the pieces joined are the text of all of them."""

    def push(self, ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class Text(Protocol):
    """A model's tokenizer, or what stands for one."""

    def encode(self, text: str) -> list[int]: ...

    def decoder(self) -> Decoder: ...


class Bytes:
    """The shipped model: a token is a byte."""

    def encode(self, text: str) -> list[int]:
        return tiny.encode(text)

    def decoder(self) -> Decoder:
        return tiny.StreamDecoder()


class Vocabulary:
    """A tokenizer of the `tokenizers` library (it comes with transformers)."""

    def __init__(self, file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decoder(self) -> Decoder:
        return _Tail(self._tokenizer)


class _Tail:
    """Decodes the last tokens anew with each that comes, and hands out what is new, holding back a character that is not
    complete.

    What a token adds depends on the one before it (a leading space, half a character), so the tail begins with the tokens
    of the last piece that was handed out: work is linear in the output, and the pieces joined are the text of all tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._seen = 0
        self._shown = ""

    def push(self, ids: Iterable[int]) -> str:
        self._ids.extend(ids)
        text = self._decoded(self._ids)
        if not text.endswith(_BROKEN) and text.startswith(self._shown) and len(text) > len(self._shown):
            return self._hand_out(len(self._ids), text)
        return "" if len(self._ids) - self._seen <= MOST_HELD else self._hand_out_some(text)

    def finish(self) -> str:
        return self._decoded(self._ids)[len(self._shown) :]

    def _hand_out(self, count: int, text: str) -> str:
        """`text` of the first `count` tokens; those of it that are new are where the next tail begins."""
        piece = text[len(self._shown) :]
        new = self._ids[self._seen : count]
        self._ids, self._seen, self._shown = self._ids[self._seen :], len(new), self._decoded(new)
        return piece

    def _hand_out_some(self, text: str) -> str:
        """The tail is long: tokens without a text go, and of bytes that make no character all but the last few."""
        if text == self._shown:
            del self._ids[self._seen :]
            return ""
        for count in range(len(self._ids) - 4, len(self._ids) - 9, -1):
            part = self._decoded(self._ids[:count])
            if text.startswith(part) and len(part) > len(self._shown) and part.startswith(self._shown):
                return self._hand_out(count, part)
        return ""

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids))


class NoText:
    """A checkpoint without a tokenizer serves token ids only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def encode(self, text: str) -> list[int]:
        raise BadInput(f"{self._folder} has no {TOKENIZER_FILE}: give the prompt as a list of token ids")

    def decoder(self) -> Decoder:
        return _Silent()


class _Silent:
    def push(self, ids: Iterable[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


def text_of(model: str, folder: Path) -> Text:
    """The tokenizer of a model folder; bytes for the shipped model and for others of its vocabulary (260 rows)."""
    if (folder / TOKENIZER_FILE).is_file():
        return Vocabulary(folder / TOKENIZER_FILE)
    return Bytes() if _is_bytes(folder) else NoText(folder)


def _is_bytes(folder: Path) -> bool:
    import json

    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return (
        isinstance(config, dict) and config.get("vocab_size") == tiny.VOCAB and config.get("bos_token_id") == tiny.BOS
    )


class StopText:
    """Cuts a growing text at the first stop string; holds back what may turn out to begin one."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """What may be shown now that `piece` has come."""
        if self.stopped:
            return ""
        text = self._held + piece
        ends = [at for at in (text.find(s) for s in self._stops) if at >= 0]
        if ends:
            self.stopped = True
            self._held = ""
            return text[: min(ends)]
        keep = max((_overlap(text, s) for s in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return "" if self.stopped else held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
