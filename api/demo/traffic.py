"""The clients: they send held-out text of the phase's domain, as many requests at a time as there are clients."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import httpx

from api.demo.script import DOMAINS, Phase
from eplane.errors import StackError

MAX_TOKENS = 48
# Sampled a little colder than the model's own distribution: text that reads like its domain, and no endless loops.
TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class Answered:
    """One finished request, with all that is needed to check each of its tokens."""

    at_s: float
    phase: int
    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    temperature: float
    seed: int

    def to_json(self) -> dict[str, object]:
        return {
            "prompt_token_ids": list(self.prompt_token_ids),
            "token_ids": list(self.token_ids),
            "logprobs": list(self.logprobs),
            "temperature": self.temperature,
            "top_p": 1.0,
            "seed": self.seed,
        }


@dataclass(slots=True)
class Tally:
    """What the clients have seen so far."""

    answered: list[Answered] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(answer.token_ids) for answer in self.answered)


def held_out_prompts() -> dict[str, list[str]]:
    """The prompts that ship with the model, by domain, as its own process tells them."""
    command = [sys.executable, "-m", "runtime.tiny", "prompts"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise StackError(f"the held-out prompts cannot be read: {done.stderr.strip()}")
    result: dict[str, list[str]] = {domain: [] for domain in DOMAINS}
    for line in done.stdout.splitlines():
        prompt = json.loads(line)
        result[prompt["domain"]].append(prompt["text"])
    return result


class Traffic:
    """`clients` loops; each sends its next request when the last one is answered. Prefill and decode of all mix."""

    def __init__(
        self, urls: Sequence[str], clients: int, seed: int, phase: Callable[[], Phase], seconds: Callable[[], float]
    ) -> None:
        self._urls = urls
        self._clients = clients
        self._seed = seed
        self._phase = phase
        self._seconds = seconds
        self._stopping = asyncio.Event()
        self.tally = Tally()

    async def run(self) -> None:
        """Until `stop`: then the requests under way are answered, and no new ones are sent."""
        prompts = await asyncio.to_thread(held_out_prompts)
        async with httpx.AsyncClient(timeout=120, trust_env=False) as http, asyncio.TaskGroup() as group:
            for number in range(self._clients):
                group.create_task(self._client(http, number, prompts))

    def stop(self) -> None:
        self._stopping.set()

    async def _client(self, http: httpx.AsyncClient, number: int, prompts: dict[str, list[str]]) -> None:
        chance = random.Random(f"{self._seed}/{number}")
        sent = 0
        while not self._stopping.is_set():
            phase = self._phase()
            text = chance.choice(prompts[phase.domain])
            # One in four is greedy; the rest are sampled from their seed, which the check repeats.
            temperature = 0.0 if sent % 4 == 0 else TEMPERATURE
            seed = chance.randrange(2**31)
            url = self._urls[(number + sent) % len(self._urls)]
            sent += 1
            try:
                self.tally.answered.append(await self._ask(http, url, text, temperature, seed, phase.number))
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                self.tally.failed.append(f"{self._seconds():.1f} s: {type(error).__name__}: {error}")
                await asyncio.sleep(0.2)

    async def _ask(
        self, http: httpx.AsyncClient, url: str, text: str, temperature: float, seed: int, phase: int
    ) -> Answered:
        body = {
            "prompt": text,
            "max_tokens": MAX_TOKENS,
            "temperature": temperature,
            "seed": seed,
            "logprobs": 1,
            "return_token_ids": True,
        }
        reply = await http.post(f"{url}/v1/completions", json=body)
        if reply.status_code != 200:
            raise ValueError(f"status {reply.status_code}: {reply.text[:200]}")
        choice = reply.json()["choices"][0]
        return Answered(
            self._seconds(),
            phase,
            choice["prompt_token_ids"],
            choice["token_ids"],
            choice["logprobs"]["token_logprobs"],
            temperature,
            seed,
        )
