"""Faults that a demo plants on purpose, to show that the checks catch them. None by default, and one at a time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from eplane.errors import BadInput


class FaultName(StrEnum):
    """The names `--fault` takes."""

    WRONG_BUNDLE = "wrong-bundle"
    SKIP_DIGEST = "skip-digest"
    MIXED_EPOCH = "mixed-epoch"


@dataclass(frozen=True, slots=True)
class Faults:
    """What is broken on purpose in this rank.

    `corrupt_verified`: a received bundle is spoiled after it was verified.
    `corrupt_received`: it is spoiled on its way; `trust_bundles`: and its digest is not compared.
    `switch_late`: this rank switches one step after the others; `trust_headers`: and no rank looks at the headers.
    """

    corrupt_verified: bool = False
    corrupt_received: bool = False
    trust_bundles: bool = False
    switch_late: bool = False
    trust_headers: bool = False

    @staticmethod
    def named(name: str | None, rank: int) -> Faults:
        """The faults of `rank` when `--fault name` was given. Raises BadInput for an unknown name."""
        if name is None:
            return Faults()
        if name == FaultName.WRONG_BUNDLE:
            return Faults(corrupt_verified=True)
        if name == FaultName.SKIP_DIGEST:
            return Faults(corrupt_received=True, trust_bundles=True)
        if name == FaultName.MIXED_EPOCH:
            return Faults(switch_late=rank == 0, trust_headers=True)
        raise BadInput(f"unknown fault {name!r}; known are {', '.join(FaultName)}")


NO_FAULTS = Faults()
