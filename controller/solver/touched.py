"""Nodes that a token touches, measured on sampled routings. Vectorised numpy; imports no compiled kernel."""

from __future__ import annotations

import numpy as np

from controller.solver.problem import EMPTY, Floats, Ints, Problem

LEAST_TUPLES = 64
"""A layer with fewer sampled tuples says too little of which experts fire together: solver and gate leave it alone."""


def counts_nodes(problem: Problem) -> bool:
    """Is there anything to know of nodes touched: several nodes and a sample?"""
    return problem.routing_sample is not None and problem.nodes > 1


def fitted(sample: Ints) -> Ints:
    """[n, K] the half of a layer's tuples that a search may look at."""
    return sample[0::2]


def judged(sample: Ints) -> Ints:
    """[n, K] the other half: what was found is judged, and reported, on tuples that the search has not seen."""
    return sample[1::2]


def touched(problem: Problem, ids: Ints, row: Ints, shares: Floats) -> Floats:
    """[n] expected nodes that each tuple of `ids [n, K]` touches under one layer's `row [P]` and its `shares [P]`.

    Each expert of a tuple picks its replica by the shares, on its own: a node is missed when all of them miss it.
    """
    used = row != EMPTY
    node = problem.node_of_rank[problem.rank_of_slot()]
    # The last row takes the pads: an expert that lies nowhere.
    size = (problem.experts + 1) * problem.nodes
    part = np.bincount(row[used] * problem.nodes + node[used], weights=shares[used], minlength=size)
    part = part.reshape(problem.experts + 1, problem.nodes)
    return np.asarray((1.0 - np.prod(1.0 - part[ids], axis=1)).sum(axis=1))


def experts_of_token(problem: Problem, layer: int) -> float:
    """Mean experts of a sampled token; the layer must have some."""
    sample = () if problem.routing_sample is None else problem.routing_sample[layer]
    return float((np.asarray(sample) != EMPTY).sum(axis=1).mean())


def nodes_of_layers(problem: Problem, placement: Ints, shares: Floats) -> Floats:
    """[L] mean nodes a token touches on the judged half; NaN for a layer without such tuples, or without a sample."""
    out = np.full(problem.layers, np.nan)
    for layer, sample in enumerate(problem.routing_sample or ()):
        ids = judged(sample)
        if len(ids):
            out[layer] = touched(problem, ids, placement[layer], shares[layer]).mean()
    return out


def nodes_per_token(problem: Problem, placement: Ints, shares: Floats) -> float | None:
    """The mean over layers that have judged tuples; None on one node, without a sample or without such tuples."""
    if not counts_nodes(problem):
        return None
    layers = nodes_of_layers(problem, placement, shares)
    return None if np.isnan(layers).all() else float(np.nanmean(layers))
