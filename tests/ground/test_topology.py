"""Topology: impossible worlds are refused with a sentence that says what would fit."""

from __future__ import annotations

from itertools import product

import pytest

from eplane.errors import TopologyError
from eplane.fields import Fields
from eplane.topology import Capabilities, ModelShape, World

SHAPE = ModelShape("tiny", 2, 8, 2, 1000)
NODES = ("n0", "n0", "n1", "n1")


def test_a_world() -> None:
    world = World("g", "a" * 16, NODES, SHAPE, 3, 8)
    assert (world.ranks, world.nodes, world.spare_cells) == (4, ("n0", "n1"), 2)
    assert world.ranks_of("n1") == (2, 3)
    assert world.ranks_of("n9") == ()


@pytest.mark.parametrize(
    ("nodes", "slots", "cells", "says"),
    [
        ((), 3, 8, "at least one rank"),
        (NODES, 0, 8, "at least one rank"),
        (NODES, 1, 8, "at least 2 slots"),
        (NODES, 3, 5, "cells"),
    ],
)
def test_an_impossible_world(nodes: tuple[str, ...], slots: int, cells: int, says: str) -> None:
    with pytest.raises(TopologyError, match=says):
        World("g", "a" * 16, nodes, SHAPE, slots, cells)


@pytest.mark.parametrize("numbers", [(0, 8, 2, 1), (2, 0, 2, 1), (2, 8, 0, 1), (2, 8, 2, 0), (2, 8, 9, 1)])
def test_an_impossible_model(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(TopologyError):
        ModelShape("tiny", *numbers)


def test_common_capabilities_are_those_of_all() -> None:
    for a, b in product(product((True, False), repeat=5), repeat=2):
        common = Capabilities(*a).common(Capabilities(*b))
        assert common == Capabilities(*(x and y for x, y in zip(a, b, strict=True)))


def test_an_engine_that_does_not_know_of_samples_does_not_sample() -> None:
    said = dict.fromkeys(("weighted_shares", "free_slot_order", "live_apply", "phases_known"), True)
    assert Capabilities.read(Fields(said, "can")) == Capabilities()
    assert Capabilities.read(Fields({**said, "routing_sample": True}, "can")) == Capabilities(routing_sample=True)
