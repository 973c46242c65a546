"""Predicted seconds: what a step costs under a placement, and what a move costs. Whether acting pays, the gate says.

A MoE layer takes the time of its slowest rank: for each slot max(read the expert's weights, compute its tokens), then
dispatch and combine over the links by an alpha-beta model. Decode at small batches reads weights whatever the tokens, so
balance gains nothing there; the gate says so. Sources of the presets stand beside them; where a vendor figure is soft,
it is said. None of these numbers is a measurement of this product.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from controller.solver.measure import slot_loads
from controller.solver.problem import Floats, Ints
from controller.solver.touched import experts_of_token, nodes_of_layers
from eplane.errors import ProblemError

if TYPE_CHECKING:
    from controller.solver.problem import Problem

TOKEN_BYTES_OUT = 7168
"""Bytes of one routed token in dispatch: one 8-bit value for each of 7,168 hidden channels."""
TOKEN_BYTES_BACK = 14336
"""Bytes of one routed token in combine: 16-bit values."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One rank's device and its links.

    ops_s: operations a second on expert weights; read_s: bytes a second from device memory; near_s, far_s: bytes a
    second one way to ranks of the same and of other nodes; alpha_s: fixed seconds of a dispatch or a combine;
    bytes_a_parameter: 1 for 8-bit, 2 for 16-bit weights; tokens_a_rank: routed tokens a rank, step and layer where the
    problem does not say; once_a_node: a token crosses to each node once, whatever experts it has there, and is handed on
    inside; else each of its copies travels by itself.
    """

    name: str
    ops_s: float
    read_s: float
    near_s: float
    far_s: float
    alpha_s: float
    bytes_a_parameter: float
    tokens_a_rank: float
    note: str = ""
    once_a_node: bool = False

    def expert_s(self, tokens: Floats, bundle_bytes: int) -> Floats:
        """Seconds of one expert's matmuls for `tokens`; 0 where no token comes."""
        read = bundle_bytes / self.read_s
        compute = tokens * self.token_s(bundle_bytes)
        return np.where(tokens > 0, np.maximum(read, compute), 0.0)

    def token_s(self, bundle_bytes: int) -> float:
        """Seconds that one more token costs an expert bound by compute: two operations a parameter."""
        return 2.0 * bundle_bytes / self.bytes_a_parameter / self.ops_s

    def crossover_tokens(self, bundle_bytes: int) -> float:
        """Tokens an expert needs before they cost more than reading its weights."""
        return bundle_bytes / self.read_s / self.token_s(bundle_bytes)

    def move_s(self, bundle_bytes: int, across_nodes: bool = True) -> float:
        """Seconds that one bundle holds a link."""
        return bundle_bytes / (self.far_s if across_nodes else self.near_s)


_PRESETS = (
    Hardware(
        "cloudmatrix384", 752e12, 1.6e12, 196e9, 196e9, 60e-6, 1, 432.0,
        "910C die, 8-bit: half of a 1,504 TOPS, 3.2 TB/s module; unified bus 196 GB/s a die, one way, on all nodes",
    ),
    Hardware(
        "atlas800i-a2", 512e12, 1.6e12, 56e9, 25e9, 60e-6, 1, 648.0,
        "910B, 8-bit 512 TOPS; HCCS full mesh 7 x 56 GB/s (a pair's link here), RoCE 200 Gb/s; soft vendor figures",
    ),
    Hardware(
        "h800", 1979e12, 3.35e12, 160e9, 50e9, 40e-6, 1, 1024.0,
        "8-bit dense peak; NVLink 160 GB/s as DeepEP reaches it, 400 Gb/s NIC a GPU; alpha as fitted to DeepEP's table",
    ),
    Hardware(
        "h800-prefill", 1979e12, 3.35e12, 160e9, 50e9, 40e-6, 1, 32768.0,
        "as h800, 4,096 tokens x top-8 a rank, sent once to each node and handed on over NVLink, as DeepEP's normal kernels do",
        once_a_node=True,
    ),
    Hardware("h200", 1979e12, 4.8e12, 360e9, 50e9, 40e-6, 1, 1024.0, "8-bit dense peak; NVLink 450 GB/s nominal, 80 % of it"),
    Hardware("cpu", 50e9, 10e9, 2e9, 1e9, 1e-3, 4, 64.0, "one core of a small server over loopback, 32-bit weights"),
    Hardware(
        "demo", 1e9, 1e12, 1e9, 1e9, 0.0, 2, 64.0,
        "each rank taken as a device of its own, bound by its tokens: for ranks that share one machine's cores",
    ),
)  # fmt: skip
PRESETS: dict[str, Hardware] = {h.name: h for h in _PRESETS}


def hardware_named(name: str) -> Hardware:
    """Raises ProblemError that lists the presets."""
    if name not in PRESETS:
        raise ProblemError("hardware", f"is {name!r}, must be one of {', '.join(PRESETS)}")
    return PRESETS[name]


def step_scale(problem: Problem, load: Floats, hardware: Hardware) -> Floats:
    """[L] factor from the window's tokens to the tokens of one step."""
    total = load.sum(axis=1)
    a_step = problem.step_tokens or hardware.tokens_a_rank * float((~problem.drained).sum())
    return np.where(total > 0, a_step / np.where(total > 0, total, 1.0), 0.0)


def layer_s(
    problem: Problem,
    load: Floats,
    placement: Ints,
    shares: Floats,
    hardware: Hardware,
    crossing: Floats | None = None,
) -> Floats:
    """[L] predicted seconds of each MoE layer in one step: the slowest rank, then its dispatch and combine.

    `crossing`: the `crossing_part` of each layer, None: that of this placement.
    """
    if crossing is None:
        crossing = crossing_part(problem, placement, shares, hardware)
    tokens = slot_loads(load * step_scale(problem, load, hardware)[:, None], placement, shares)
    shape = (problem.layers, problem.ranks, -1)
    matmul = hardware.expert_s(tokens, problem.bundle_bytes).reshape(shape).sum(axis=2) / problem.capacity
    arriving = tokens.reshape(shape).sum(axis=2)
    wire = 2 * hardware.alpha_s + arriving * _wire_s(problem, hardware, crossing)
    return np.where(load.sum(axis=1) > 0, (matmul + wire).max(axis=1), 0.0)


def _wire_s(problem: Problem, hardware: Hardware, crossing: Floats) -> Floats:
    """[L, R] link seconds of one routed token of a rank, there and back."""
    peers = np.bincount(problem.node_of_rank, minlength=problem.nodes)[problem.node_of_rank]
    near, far = (peers - 1) / problem.ranks, 1 - peers / problem.ranks
    across = far * crossing[:, None]
    seconds_a_byte = (near + far - across) / hardware.near_s + across / hardware.far_s
    return np.asarray(seconds_a_byte * (TOKEN_BYTES_OUT + TOKEN_BYTES_BACK))


def mean_load_s(problem: Problem, hardware: Hardware, crossing: Floats) -> Floats:
    """[L] seconds that the mean load of a rank takes, matmuls and links without their fixed part: what one unit of a
    layer's max / mean is worth in a step."""
    wire = _wire_s(problem, hardware, crossing).mean(axis=1)
    return np.asarray(_balanced_s(problem, hardware) + _tokens_a_rank(problem, hardware) * wire)


def crossing_part(problem: Problem, placement: Ints, shares: Floats, hardware: Hardware) -> Floats:
    """[L] part of the copies for other nodes that cross by themselves: nodes touched over experts of a token where a token
    crosses once to each node (the rest is handed on inside), as far as sampled routings tell; else all."""
    part = np.ones(problem.layers)
    if hardware.once_a_node and problem.nodes > 1:
        nodes = nodes_of_layers(problem, placement, shares)
        for layer in np.flatnonzero(~np.isnan(nodes)).tolist():
            part[layer] = nodes[layer] / experts_of_token(problem, layer)
    return part


def node_price(problem: Problem, hardware: Hardware) -> float:
    """Price of one node more that each token touches, in units of a layer's max / mean, as `crossing_part` has it.

    Link seconds of a rank's tokens for that node, over the matmul seconds of a perfectly balanced layer.
    """
    layers = [layer for layer, ids in enumerate(problem.routing_sample or ()) if len(ids)]
    if not hardware.once_a_node or not layers:
        return 0.0
    peers = np.bincount(problem.node_of_rank, minlength=problem.nodes)[problem.node_of_rank]
    tokens = _tokens_a_rank(problem, hardware) / float(np.mean([experts_of_token(problem, layer) for layer in layers]))
    crossing = tokens * float((1 - peers / problem.ranks).mean()) * (TOKEN_BYTES_OUT + TOKEN_BYTES_BACK)
    return crossing * max(1 / hardware.far_s - 1 / hardware.near_s, 0.0) / _balanced_s(problem, hardware)


def step_us(problem: Problem, load: Floats, placement: Ints, shares: Floats) -> float:
    """Predicted microseconds of all MoE layers of one step."""
    hardware = hardware_named(problem.hardware or "demo")
    return float(layer_s(problem, load, placement, shares, hardware).sum() * 1e6)


def move_price(problem: Problem, hardware: Hardware) -> float:
    """Price of one move in units of a layer's max / mean: link seconds of a bundle over the MoE seconds it can save on.

    The denominator is the perfectly balanced matmul time of one layer times the steps until the next decision.
    """
    across = problem.nodes > 1
    layer = _balanced_s(problem, hardware)
    return hardware.move_s(problem.bundle_bytes, across) / (layer * problem.horizon_steps)


def _tokens_a_rank(problem: Problem, hardware: Hardware) -> float:
    """Routed tokens of a rank, step and layer."""
    tokens = problem.step_tokens or hardware.tokens_a_rank * float((~problem.drained).sum())
    return tokens / float((~problem.drained).sum())


def _balanced_s(problem: Problem, hardware: Hardware) -> float:
    """Matmul seconds of a perfectly balanced layer."""
    compute = _tokens_a_rank(problem, hardware) * hardware.token_s(problem.bundle_bytes)
    return max(compute, problem.experts / problem.ranks * problem.bundle_bytes / hardware.read_s)


@dataclass(frozen=True, slots=True)
class Latency:
    """Latency of a collective over `ranks`: alpha_us + (1 - ranks_a_node / ranks) * bytes / bytes_us."""

    alpha_us: float
    bytes_us: float
    ranks_a_node: int

    def us(self, ranks: int, size: float) -> float:
        return self.alpha_us + (1 - self.ranks_a_node / ranks) * size / self.bytes_us


def fit_latency(ranks: Sequence[int], us: Sequence[float], size: float, ranks_a_node: int = 8) -> Latency:
    """Least squares of alpha and bandwidth on measured latencies of `size` bytes a rank."""
    far = np.array([1 - ranks_a_node / r for r in ranks]) * size
    design = np.stack([np.ones(len(ranks)), far], axis=1)
    alpha, slope = np.linalg.lstsq(design, np.asarray(us, dtype=np.float64), rcond=None)[0].tolist()
    return Latency(alpha, 1 / slope, ranks_a_node)
