"""Routed tuples: which experts single tokens went to together, as a small random sample beside the counts.

A count says how many tokens an expert got, not with which others it got them; a tuple of top-k experts says that. An
engine that can keeps a few tuples for each sub-window. They are logical experts, so no placement matters to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplane.errors import LoadReportError
from eplane.fields import MAX_INT, Fields, pack
from eplane.load import MAX_COUNT, MAX_RANKS, Refusal
from eplane.topology import ModelShape

# Expert ids in the sample of one rank and sub-window, and in all samples that come with one report (44 to 64 kB).
MAX_SAMPLE_IDS = 16384
MAX_REPORT_IDS = 32768
MAX_REPORT_SAMPLES = 4096
MAX_EXPERT = 2**16 - 1

Tuples = NDArray[np.integer[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class TokenSample:
    """Some of `tokens` tokens, each as likely as any other: `tuples [n, L, K]`, the K experts of each in each layer.

    Their order is random, so that the first few are a sample, too. uint16, read-only. Raises LoadReportError.
    """

    tokens: int
    tuples: Tuples

    def __post_init__(self) -> None:
        given = np.asarray(self.tuples)
        if given.ndim != 3 or 0 in given.shape:
            raise LoadReportError("tuples", f"must be [tokens, layers, experts of a token], got shape {given.shape}")
        if given.dtype.kind not in "iu":
            raise LoadReportError("tuples", f"must hold whole numbers, got {given.dtype}")
        if given.min() < 0 or given.max() > MAX_EXPERT:
            wrong = given.min() if given.min() < 0 else given.max()
            raise LoadReportError("tuples", f"names expert {int(wrong)}, 0 to {MAX_EXPERT} can be")
        if not len(given) <= self.tokens <= MAX_INT:
            raise LoadReportError("tokens", f"{len(given)} of {self.tokens} tokens can not have been drawn")
        ordered = np.sort(given, axis=2)
        if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
            raise LoadReportError("tuples", "names an expert twice for one token")
        table = np.array(given, dtype=np.uint16)
        table.setflags(write=False)
        object.__setattr__(self, "tuples", table)

    def __len__(self) -> int:
        return len(self.tuples)

    @property
    def ids(self) -> int:
        return self.tuples.size

    def first(self, count: int) -> TokenSample:
        """The sample with at most `count` tuples, at least one."""
        return self if count >= len(self) else TokenSample(self.tokens, self.tuples[: max(1, count)])


@dataclass(frozen=True, slots=True)
class RankSample:
    """What `rank` sampled of its own tokens in steps `first_step <= s < last_step`: those of one of its sub-windows."""

    rank: int
    first_step: int
    last_step: int
    sample: TokenSample

    def __post_init__(self) -> None:
        if not 0 <= self.first_step < self.last_step <= MAX_INT:
            raise LoadReportError("last_step", f"steps {self.first_step} to {self.last_step} are no span")
        if not 0 <= self.rank < MAX_RANKS:
            raise LoadReportError("rank", f"rank {self.rank} can not be")
        if self.sample.tokens > MAX_COUNT:
            raise LoadReportError("tokens", f"{self.sample.tokens} tokens of one rank overflow {MAX_COUNT}")
        if self.sample.ids > MAX_SAMPLE_IDS:
            raise LoadReportError("tuples", f"hold {self.sample.ids} ids, {MAX_SAMPLE_IDS} are allowed")

    @property
    def key(self) -> tuple[int, int, int]:
        """What it shares with its sub-window."""
        return self.rank, self.first_step, self.last_step

    def check(self, shape: ModelShape) -> None:
        """Raises LoadReportError unless tokens of this model can have been routed so."""
        expected = (shape.layers, shape.top_k)
        if self.sample.tuples.shape[1:] != expected:
            raise LoadReportError("tuples", f"are of {self.sample.tuples.shape[1:]}, this model routes {expected}")
        most = int(self.sample.tuples.max())
        if most >= shape.experts:
            raise LoadReportError("tuples", f"name expert {most}, there are {shape.experts}")

    def to_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "first_step": self.first_step,
            "last_step": self.last_step,
            "tokens": self.sample.tokens,
            "tuples": pack(self.sample.tuples.astype(np.int32)),
        }

    @classmethod
    def read(cls, fields: Fields) -> RankSample:
        head = (fields.integer("rank", high=MAX_RANKS - 1), fields.integer("first_step"), fields.integer("last_step"))
        tokens, tuples = fields.integer("tokens"), fields.packed("tuples", (-1, -1, -1))
        fields.done()
        try:
            return cls(*head, TokenSample(tokens, tuples))
        except LoadReportError as error:
            raise fields.wrong(error.field, error.reason) from error


def read_samples(data: object) -> tuple[tuple[RankSample, ...], tuple[Refusal, ...]]:
    """The samples of a report that can be read, and a refusal for each that can not. None at all is an empty list."""
    if data is None:
        return (), ()
    if not isinstance(data, list) or len(data) > MAX_REPORT_SAMPLES:
        return (), (Refusal(-1, -1, f"samples: must be a list of at most {MAX_REPORT_SAMPLES}"),)
    good: dict[tuple[int, int, int], RankSample] = {}
    bad: list[Refusal] = []
    room = MAX_REPORT_IDS
    for at, item in enumerate(data):
        path = f"samples[{at}]"
        try:
            one = RankSample.read(Fields(item, path, LoadReportError))
            if one.key in good:
                raise LoadReportError(f"{path}.first_step", f"is told twice for rank {one.rank}")
            if one.sample.ids > room:
                raise LoadReportError(f"{path}.tuples", f"overflow the {MAX_REPORT_IDS} ids that a report may hold")
            good[one.key] = one
            room -= one.sample.ids
        except LoadReportError as error:
            bad.append(Refusal(-1, -1, str(error)))
    return tuple(good.values()), tuple(bad)


def fitted(samples: Sequence[RankSample], ids: int = MAX_REPORT_IDS) -> tuple[RankSample, ...]:
    """The samples (newest last), each cut to its part of `ids`; the oldest are left out where not all can have one."""
    held: list[RankSample] = []
    left = ids
    for waiting, one in zip(range(len(samples), 0, -1), reversed(samples), strict=True):
        wide = one.sample.ids // len(one.sample)
        count = min(len(one.sample), max(1, left // waiting // wide))
        if count * wide > left:
            break
        held.append(RankSample(*one.key, one.sample.first(count)))
        left -= count * wide
    return tuple(reversed(held))


def merge(samples: Sequence[TokenSample], most: int, seed: Sequence[int]) -> TokenSample | None:
    """One sample of at most `most` tuples of all their tokens together; None of none. The same seed, the same sample.

    Each gives tuples in proportion to its tokens, so the one with fewest for its tokens bounds the whole. Fractions are
    rounded by systematic sampling (Madow 1949): every token keeps the same chance, and no part is off by a whole tuple.
    """
    if not samples:
        return None
    tokens = np.array([s.tokens for s in samples], dtype=np.float64)
    sizes = np.array([len(s) for s in samples])
    ends = np.cumsum(tokens) / tokens.sum()
    size = min(float(most), float((sizes / (tokens / tokens.sum())).min()) * (1 + 1e-9))
    rng = np.random.default_rng(list(seed))
    edges = np.floor(ends * np.floor(size) + rng.random())
    counts = np.minimum(np.diff(edges, prepend=0.0).astype(np.int64), sizes)
    parts = [s.tuples[rng.permutation(len(s))[:n]] for s, n in zip(samples, counts, strict=True)]
    drawn = np.concatenate(parts)
    return TokenSample(sum(s.tokens for s in samples), drawn[rng.permutation(len(drawn))])
