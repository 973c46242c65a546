"""Checks every returned token against a run of one rank, in a process of its own, when the serving has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from api.demo.traffic import Answered
from eplane.errors import StackError

PLAIN_SAMPLES = 20
# Plain transformers sums in another order: its log probabilities differ in the last bits.
PLAIN_TOLERANCE = 1e-3


@dataclass(frozen=True, slots=True)
class Judgement:
    """tokens: chosen token and log probability compared bit for bit. plain_*: against plain `transformers`."""

    tokens_checked: int
    tokens_wrong: int
    plain_responses: int
    plain_max_difference: float

    @property
    def plain_agrees(self) -> bool:
        return self.plain_max_difference <= PLAIN_TOLERANCE


def judge(answers: Sequence[Answered], model: str) -> Judgement:
    checked = wrong = 0
    for verdict in _score(answers, model):
        checked += verdict["checked"]
        wrong += verdict["wrong"]
    step = max(1, len(answers) // PLAIN_SAMPLES)
    sample = list(answers[::step][:PLAIN_SAMPLES])
    differences = [verdict["max_logprob_diff"] for verdict in _score(sample, model, "--plain")]
    return Judgement(checked, wrong, len(differences), max(differences, default=0.0))


def _score(answers: Sequence[Answered], model: str, *options: str) -> list[dict[str, Any]]:
    if not answers:
        return []
    lines = "".join(json.dumps(answer.to_json()) + "\n" for answer in answers)
    command = [sys.executable, "-m", "runtime", "score", "--model", model, *options]
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise StackError(f"the check of the returned tokens did not run: {done.stderr.strip()[-800:]}")
    verdicts = [json.loads(line) for line in done.stdout.splitlines()]
    if len(verdicts) != len(answers):
        raise StackError(f"{len(answers)} responses were to be checked, {len(verdicts)} verdicts came back")
    return verdicts
