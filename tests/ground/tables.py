"""Random shapes, placements and shares for property tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eplane.placement import EMPTY, FloatTable, Placement

Shape = tuple[int, int, int, int]


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Layers, experts, ranks, slots that can hold every expert."""
    layers, ranks, slots = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return layers, draw(st.integers(1, min(ranks * slots, 12))), ranks, slots


@st.composite
def placements(draw: st.DrawFn, shape: Shape | None = None) -> Placement:
    """Any valid placement: each expert somewhere, then copies and empty slots as they come."""
    layers, experts, ranks, slots = shape or draw(shapes())
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    table = np.full((layers, ranks, slots), EMPTY, dtype=np.int32)
    for layer in range(layers):
        places = rng.permutation(ranks * slots)[:experts]
        table[layer].reshape(-1)[places] = rng.permutation(experts)
        for rank in range(ranks):
            for k in range(slots):
                free = np.setdiff1d(np.arange(experts), table[layer, rank])
                if table[layer, rank, k] == EMPTY and free.size and rng.random() < 0.7:
                    table[layer, rank, k] = rng.choice(free)
    return Placement(table.reshape(layers, -1), ranks, experts)


@st.composite
def shares_for(draw: st.DrawFn, placement: Placement) -> FloatTable:
    """Any valid shares of `placement`."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shares = np.zeros(placement.p2l.shape)
    for layer in range(placement.layers):
        for expert in range(placement.experts):
            slots = list(placement.replicas(layer, expert))
            shares[layer, slots] = rng.dirichlet(np.ones(len(slots)))
    return shares
