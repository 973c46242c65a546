"""What a demo ends with: `out.json`, the picture, and a summary a person understands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from api.demo.chaos import Kill
from api.demo.judge import Judgement
from api.demo.ledger import PhaseBalance
from api.demo.script import QUIET_S, DemoSettings

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """Everything that was counted and checked. `migrations` as in out.json; times in seconds after the start."""

    settings: DemoSettings
    requests_ok: int
    requests_failed: int
    failures: Sequence[str]
    tokens_returned: int
    judgement: Judgement
    migrations: Sequence[Json]
    epochs: int
    kill_log: Sequence[Kill]
    phases: Sequence[PhaseBalance]
    step_ms: Mapping[str, Json]
    loud_stop: str | None

    @property
    def quiet(self) -> bool:
        """No migration ran in the last minute."""
        begin = self.settings.seconds - QUIET_S
        return all(m["ended_s"] is not None and m["ended_s"] <= begin for m in self.migrations)

    @property
    def flawless(self) -> bool:
        checked = self.judgement.tokens_checked == self.tokens_returned and self.judgement.tokens_wrong == 0
        return self.requests_failed == 0 and checked and self.judgement.plain_agrees and self.loud_stop is None

    def to_json(self) -> Json:
        judged = self.judgement
        return {
            "policy": self.settings.policy,
            "seconds": self.settings.seconds,
            "ranks": self.settings.ranks,
            "nodes": self.settings.nodes,
            "controllers": self.settings.controllers,
            "chaos": self.settings.chaos,
            "fault": self.settings.fault,
            "requests_ok": self.requests_ok,
            "requests_failed": self.requests_failed,
            "failures": list(self.failures[:20]),
            "tokens_returned": self.tokens_returned,
            "tokens_checked": judged.tokens_checked,
            "tokens_wrong": judged.tokens_wrong,
            "plain_transformers": {
                "responses": judged.plain_responses,
                "max_logprob_difference": judged.plain_max_difference,
                "agrees": judged.plain_agrees,
            },
            "migrations": list(self.migrations),
            "migrations_in_last_minute": 0 if self.quiet else sum(_late(m, self.settings) for m in self.migrations),
            "epochs": self.epochs,
            "kill_log": [kill.to_json() for kill in self.kill_log],
            "phases": [phase.to_json() for phase in self.phases],
            "step_ms": dict(self.step_ms),
            "loud_stop": self.loud_stop,
            "ok": self.flawless,
        }

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_json(), indent=2) + "\n", encoding="utf-8")

    def summary(self) -> str:
        judged = self.judgement
        lines = [
            f"{self.requests_ok} requests answered, {self.requests_failed} failed.",
            f"{judged.tokens_checked} of {self.tokens_returned} returned tokens checked bit for bit against one rank: "
            f"{judged.tokens_wrong} wrong.",
            f"{judged.plain_responses} responses compared with plain transformers: log probabilities differ by at most "
            f"{judged.plain_max_difference:.1e}.",
            self._moves(),
            "Balancedness (mean over max tokens of a rank; 1 is perfect), token-weighted:",
            *(_phase_line(phase) for phase in self.phases),
            "The figures count tokens per rank, not time: here all ranks share this machine's cores.",
        ]
        if self.kill_log:
            who = ", ".join(f"{kill.actor} in {kill.wave_state} at {kill.t:.0f} s" for kill in self.kill_log)
            lines.insert(4, f"{len(self.kill_log)} processes were killed on the way: {who}.")
        if self.loud_stop:
            lines.insert(0, f"The serving stopped loudly: {self.loud_stop}")
        if self.settings.fault:
            caught = judged.tokens_wrong > 0 or self.loud_stop is not None
            moved = any(m["bytes"] for m in self.migrations)
            missed = "NOT caught" if moved else "never reached, because no bundle moved"
            lines.append(f"The planted fault {self.settings.fault} was {'caught' if caught else missed}.")
        lines.extend(f"failed: {failure}" for failure in self.failures[:3])
        return "\n".join(lines)

    def _moves(self) -> str:
        moved = [m for m in self.migrations if m["bytes"]]
        total = sum(m["bytes"] for m in moved)
        when = "none in the last minute" if self.quiet else "SOME IN THE LAST MINUTE"
        return f"{len(moved)} migrations moved {total / 1e6:.2f} MB in all and made {self.epochs} epochs; {when}."


def _late(migration: Json, settings: DemoSettings) -> bool:
    return migration["ended_s"] is None or migration["ended_s"] > settings.seconds - QUIET_S


def _phase_line(phase: PhaseBalance) -> str:
    def show(value: float | None) -> str:
        return "  -  " if value is None else f"{value:.3f}"

    return (
        f"  {phase.start_s:4.0f} to {phase.end_s:4.0f} s  {phase.domain:<8} start placement {show(phase.static)}"
        f"   before {show(phase.before)}   after {show(phase.after)}"
    )


def step_times(rows: Sequence[Sequence[float]]) -> Json:
    """p50 and p99 of busy steps, in ms, with and without a wave in progress. Rows: (step, ms, own, all, wave)."""
    result: Json = {}
    for name, flag in (("with_wave", 1), ("without_wave", 0)):
        ms = [row[1] for row in rows if int(row[4]) == flag]
        result[name] = {
            "steps": len(ms),
            "p50": round(float(np.percentile(ms, 50)), 2) if ms else None,
            "p99": round(float(np.percentile(ms, 99)), 2) if ms else None,
        }
    return result
