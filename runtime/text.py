"""Text to tokens and back, without torch: the shipped model's bytes, or a checkpoint's own `tokenizer.json`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from eplane.errors import BadInput
from runtime.tiny import tokens as tiny

TOKENIZER_FILE = "tokenizer.json"
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
        return _Growing(self._tokenizer)


class _Growing:
    """Decodes all tokens anew and hands out what is new, holding back a character that is not complete."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = ""

    def push(self, ids: Iterable[int]) -> str:
        self._ids.extend(ids)
        text = str(self._tokenizer.decode(self._ids))
        if text.endswith(_BROKEN) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        self._shown = text
        return piece

    def finish(self) -> str:
        text = str(self._tokenizer.decode(self._ids))
        return text[len(self._shown) :]


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
