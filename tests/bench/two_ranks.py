"""A real world of two ranks under constant traffic, and what moves its bundles: the ground of the migration benchmark."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np

from eplane.placement import Placement
from eplane.plan import Identity, LeaderEpoch, Load
from runtime.link.client import LinkClient
from runtime.link.messages import Describe, RankStatus, StageCommand, StagedState
from tests.runtime.serving import Serve

RANKS, EXPERTS, TOP_K, VOCABULARY = 2, 8, 2, 260
LEADER = LeaderEpoch(7, 3)
POLL_S = 0.05
PATIENCE_S = 300.0


@dataclass(frozen=True, slots=True)
class Size:
    """The model and its traffic. A bundle has 3 x hidden x width float32 items; `moved`: bundles each rank receives."""

    hidden: int
    width: int
    layers: int
    clients: int
    pairs: int

    @property
    def bundle_bytes(self) -> int:
        return 12 * self.hidden * self.width

    @property
    def moved(self) -> int:
        return self.layers * self.pairs


def write_checkpoint(size: Size, folder: Path) -> None:
    """A random Qwen3-MoE whose expert has `size.bundle_bytes` bytes."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=size.hidden, num_hidden_layers=size.layers, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, intermediate_size=size.width, moe_intermediate_size=size.width,
        num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True, tie_word_embeddings=True,
        max_position_embeddings=512, bos_token_id=256, eos_token_id=257, pad_token_id=258, initializer_range=0.05,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(str(folder))


class Traffic:
    """A constant number of requests in flight; `hold` lets those in flight end and starts no more."""

    def __init__(self, url: str, clients: int) -> None:
        self._url, self._clients = url, clients
        self._rng = np.random.default_rng(0)
        self._open, self._stopped = asyncio.Event(), False
        self._running: set[asyncio.Task[None]] = set()
        self.in_flight = 0
        self.answered = 0

    async def __aenter__(self) -> Traffic:
        self._http = httpx.AsyncClient(timeout=PATIENCE_S)
        self._open.set()
        self._running = {asyncio.create_task(self._client()) for _ in range(self._clients)}
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopped = True
        self._open.set()
        await asyncio.gather(*self._running)
        await self._http.aclose()

    async def hold(self) -> None:
        self._open.clear()
        while self.in_flight:
            self._check()
            await asyncio.sleep(0.005)

    def release(self) -> None:
        self._open.set()

    def _check(self) -> None:
        """A client that failed must not be waited for in vain."""
        for task in self._running:
            if task.done():
                task.result()

    async def _client(self) -> None:
        while True:
            await self._open.wait()
            if self._stopped:
                return
            self.in_flight += 1
            try:
                # Sampled, for a random model that is asked for its likeliest token soon repeats one and its experts.
                body = {
                    "prompt": [int(t) for t in self._rng.integers(0, 256, 8)], "max_tokens": 120, "temperature": 1.0,
                    "seed": int(self._rng.integers(2**31)), "ignore_eos": True,
                }  # fmt: skip
                (await self._http.post(f"{self._url}/v1/completions", json=body)).raise_for_status()
            finally:
                self.in_flight -= 1
            self.answered += 1


@dataclass
class Mover:
    """Moves bundles through the engine link as an agent and a controller do."""

    links: list[LinkClient]
    facts: list[Describe]
    placement: Placement
    epoch: int = 1

    @classmethod
    async def connect(cls, serve: Serve) -> Mover:
        links = [LinkClient(serve.link(rank)) for rank in range(RANKS)]
        facts = [await link.connect(f"{rank:016x}") for rank, link in enumerate(links)]
        told = await links[0].placement()
        placement = Placement(told.p2l, RANKS, facts[0].experts)
        for link in links:
            await link.adopt(facts[0].world, 1, placement.digest, LEADER)
        return cls(links, facts, placement)

    async def close(self) -> None:
        for link in self.links:
            await link.close()

    async def wave(self, target: Placement, bytes_per_s: float | None) -> float:
        """Stage, arm, switch, let go. Returns seconds from the stage command to the last acknowledgement."""
        start = time.monotonic()
        identity = Identity(self.facts[0].world, f"{self.epoch:032x}", 1, self.epoch + 1, target.digest)
        await asyncio.gather(*(self._stage(rank, identity, target, bytes_per_s) for rank in range(RANKS)))
        await self._until(identity, verified=True)
        await asyncio.gather(*(link.arm(identity, LEADER) for link in self.links))
        await self._until(identity, verified=False)
        self.placement, self.epoch = target, self.epoch + 1
        return time.monotonic() - start

    async def _stage(self, rank: int, identity: Identity, target: Placement, bytes_per_s: float | None) -> None:
        base = self.placement
        peers = {other: fact.transfer_address for other, fact in enumerate(self.facts)}
        loads = []
        for layer, expert, to in base.moves(target):
            if to == rank:
                slot = next(s for s in target.replicas(layer, expert) if target.rank_of(s) == rank)
                loads.append(Load(layer, slot, expert, base.rank_of(base.replicas(layer, expert)[0])))
        command = StageCommand(
            identity, LEADER, base.digest, base.delta(target), None, tuple(loads), peers, bytes_per_s
        )
        await self.links[rank].stage(command)

    async def _until(self, identity: Identity, *, verified: bool) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                statuses = [await link.status() for link in self.links]
                if all(_verified(s) if verified else s.last_switched == identity and s.clean for s in statuses):
                    return
                await asyncio.sleep(POLL_S)


def _verified(status: RankStatus) -> bool:
    staged = status.staged
    if staged is not None and staged.state is StagedState.FAILED:
        raise RuntimeError(f"staging failed: {staged.reason}")
    return staged is not None and staged.state is StagedState.VERIFIED


def swapped(base: Placement, pairs: int) -> Placement:
    """`pairs` experts of each layer trade places between the two ranks: each rank receives as many bundles."""
    table = base.by_rank().copy()
    table[:, [0, 1], :pairs] = table[:, [1, 0], :pairs]
    return Placement(table.reshape(base.layers, -1), RANKS, EXPERTS)
