"""Experts move between the ranks of a real world under traffic, and not one bit of one answer changes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from eplane.errors import LinkRefused
from runtime.reference import Reference
from tests.runtime.moves import LEADER, Mover, random_wave
from tests.runtime.serving import Serve, serving

Get = Callable[[str], Path]
WAVES_BUSY = 12
WAVES_IDLE = 5
OPTIONS = ("--slots", "6", "--spare-cells", "4", "--window-steps", "8", "--max-tokens-per-step", "24")


class Traffic:
    """Requests without end until `stop`, each answer kept."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.answers = url, list[dict[str, Any]]()
        self._rng = np.random.default_rng(seed)
        self._stop = asyncio.Event()

    async def run(self, clients: int) -> None:
        async with httpx.AsyncClient(timeout=60) as http:
            await asyncio.gather(*(self._client(http) for _ in range(clients)))

    async def _client(self, http: httpx.AsyncClient) -> None:
        while not self._stop.is_set():
            prompt = [int(t) for t in self._rng.integers(0, 256, int(self._rng.integers(1, 60)))]
            body = {
                "prompt": prompt, "max_tokens": int(self._rng.integers(4, 24)), "logprobs": 0,
                "return_token_ids": True, "ignore_eos": True,
            }  # fmt: skip
            answer = await http.post(f"{self.url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            self.answers.append(answer.json()["choices"][0])

    def stop(self) -> None:
        self._stop.set()


def wrong_tokens(reference: Reference, answers: list[dict[str, Any]]) -> int:
    wrong = 0
    for choice in answers:
        likeliest, logs = reference.score(choice["prompt_token_ids"], choice["token_ids"])
        given = zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True)
        wrong += sum((t, p) != (a, b) for (t, p), a, b in zip(given, likeliest, logs, strict=True))
    return wrong


async def _walk(mover: Mover, waves: int, seed: int) -> int:
    """Random waves, some of them aborted first. Returns how many bundles moved."""
    rng, moved = np.random.default_rng(seed), 0
    for number in range(waves):
        target = random_wave(mover.placement, rng, 2)
        if target.digest == mover.placement.digest:
            continue
        if number % 4 == 3:
            given_up = random_wave(mover.placement, rng, 2)
            identity = await mover.stage(given_up)
            for link in mover.links:
                await link.abort(identity, LEADER)
            await mover.until(lambda s: s.clean)
            with pytest.raises(LinkRefused):
                await mover.links[0].arm(identity, LEADER)
        moved += len(mover.placement.moves(target))
        await mover.move(target)
    return moved


async def test_random_waves_under_traffic_and_idle_change_no_bit(tmp_path: Path, checkpoint: Get) -> None:
    folder = checkpoint("qwen3_moe")
    with serving(str(folder), tmp_path, 2, *OPTIONS, "--state-dir", str(tmp_path / "state")) as serve:
        mover = await Mover.connect(serve)
        traffic = Traffic(serve.url, 1)
        running = asyncio.create_task(traffic.run(6))
        moved = await _walk(mover, WAVES_BUSY, 2)
        traffic.stop()
        await running
        moved += await _walk(mover, WAVES_IDLE, 3)
        after = Traffic(serve.url, 4)
        running = asyncio.create_task(after.run(3))
        await asyncio.sleep(0.3)
        after.stop()
        await running
        async with httpx.AsyncClient() as http:
            seen = (await http.get(f"{serve.url}/v1/world")).json()
        assert seen["digest"] == mover.placement.digest
        assert seen["epoch"] == mover.epoch
        assert seen["ranks"][0]["switches"] == mover.epoch - 1
        kept = json.loads((tmp_path / "state" / "default.placement.json").read_text())
        assert kept["digest"] == mover.placement.digest
        await mover.close()
        if serve.process is not None:
            serve.process.kill()  # However the launcher ends, its ranks end with it.
        serve.wait()
        for _ in range(400):
            if not serve.descendants():
                break
            await asyncio.sleep(0.05)
        assert serve.descendants() == []
    answers = traffic.answers + after.answers
    assert moved > WAVES_BUSY
    assert len(answers) > 10
    assert wrong_tokens(Reference(folder), answers) == 0


async def _with_fault(folder: Path, at: Path, fault: str) -> tuple[int, Serve, int | None]:
    """Wrong tokens while and after waves under a planted fault, and how the launcher ended by itself, if it did."""
    with serving(str(folder), at, 2, *OPTIONS, "--fault", fault) as serve:
        mover = await Mover.connect(serve)
        traffic = Traffic(serve.url, 1)
        running = asyncio.create_task(traffic.run(4))
        await _walk(mover, 4, 2)
        traffic.stop()
        await running
        await mover.close()
        ended = None if serve.process is None else serve.process.poll()
    return wrong_tokens(Reference(folder), traffic.answers), serve, ended


@pytest.mark.parametrize("fault", ["wrong-bundle", "mixed-epoch"])
async def test_the_check_sees_a_planted_fault(tmp_path: Path, checkpoint: Get, fault: str) -> None:
    """The teeth of the test above: it would have seen a wrong bundle or two versions in one step."""
    wrong, serve, ended = await _with_fault(checkpoint("qwen3_moe"), tmp_path, fault)
    assert ended is None, serve.log
    assert wrong > 0
