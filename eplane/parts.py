"""A whole placement as values of the store: int16, zlib, in parts of at most 256 KiB.

Each part starts with one line of JSON that says what it is; the rest is its piece of the compressed table. Parts lie
under the placement's digest and are written before anything that names it, so half a placement is never believed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence

import numpy as np

from eplane.errors import PlacementError, RecordError
from eplane.fields import MAX_UNPACKED_BYTES, Fields, inflate
from eplane.placement import Placement
from eplane.plan import DIGEST_DIGITS

PART_BYTES = 240 * 1024
MAX_PARTS = 512
MAX_EXPERT = 2**15 - 1


def encode_placement(placement: Placement) -> tuple[bytes, ...]:
    """The parts, in order. Raises RecordError for a table that is too large to be stored."""
    if placement.experts - 1 > MAX_EXPERT or placement.p2l.size * 2 > MAX_UNPACKED_BYTES:
        raise RecordError(
            "placement", f"{placement.p2l.shape} of {placement.experts} experts is too large to be stored"
        )
    body = zlib.compress(placement.p2l.astype("<i2").tobytes(), 9)
    chunks = [body[at : at + PART_BYTES] for at in range(0, len(body), PART_BYTES)]
    return tuple(_head(placement, at, len(chunks)) + chunk for at, chunk in enumerate(chunks))


def decode_placement(parts: Sequence[bytes], digest: str) -> Placement:
    """The placement named `digest`, from all its parts in order. Raises RecordError for anything else."""
    if not parts:
        raise RecordError("placement", f"no part of {digest} is there")
    chunks: list[bytes] = []
    shape: tuple[int, ...] | None = None
    for at, raw in enumerate(parts):
        line, found, chunk = raw.partition(b"\n")
        fields = _fields(line if found else b"", at)
        sizes = tuple(fields.integer(n, low=1, high=1 << 20) for n in ("layers", "ranks", "slots", "experts"))
        if fields.hexes("digest", DIGEST_DIGITS) != digest:
            raise fields.wrong("digest", f"is not {digest}")
        if fields.integer("part") != at or fields.integer("parts", high=MAX_PARTS) != len(parts):
            raise fields.wrong("part", f"is not part {at} of {len(parts)}")
        fields.done()
        if shape not in (None, sizes):
            raise fields.wrong("layers", "the parts are of different tables")
        shape = sizes
        chunks.append(chunk)
    return _table(b"".join(chunks), shape or (), digest)


def _table(body: bytes, shape: tuple[int, ...], digest: str) -> Placement:
    layers, ranks, slots, experts = shape
    size = layers * ranks * slots * 2
    if size > MAX_UNPACKED_BYTES:
        raise RecordError("placement.layers", f"the table unfolds to {size} bytes, {MAX_UNPACKED_BYTES} are allowed")
    try:
        raw = inflate(body, size)
        placement = Placement(np.frombuffer(raw, dtype="<i2").reshape(layers, -1).astype(np.int32), ranks, experts)
    except (ValueError, PlacementError) as error:
        raise RecordError("placement", f"{digest} {error}") from None
    if placement.digest != digest:
        raise RecordError("placement.digest", f"the table is {placement.digest}, not {digest}")
    return placement


def _head(placement: Placement, part: int, parts: int) -> bytes:
    head = {
        "v": 1,
        "record": "placement",
        "digest": placement.digest,
        "layers": placement.layers,
        "ranks": placement.ranks,
        "slots": placement.slots,
        "experts": placement.experts,
        "part": part,
        "parts": parts,
    }
    return json.dumps(head, separators=(",", ":")).encode() + b"\n"


def _fields(line: bytes, part: int) -> Fields:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        raise RecordError(f"placement[{part}]", "has no head of JSON") from None
    fields = Fields(data, f"placement[{part}]")
    fields.version()
    if fields.text("record", most=40) != "placement":
        raise fields.wrong("record", "is not a placement")
    return fields
