"""Plays the demo: starts the stack, sends the traffic, looks on, kills if asked to, checks every token, tells the result."""

from __future__ import annotations

import asyncio
import contextlib
import math
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live

from api.client import Client, ClientSettings, path_of
from api.demo import view
from api.demo.chaos import Chaos, Kill
from api.demo.judge import Judgement, judge
from api.demo.ledger import Ledger
from api.demo.picture import draw
from api.demo.result import Result, step_times
from api.demo.script import DemoSettings, Phase, phase_at, phases
from api.demo.traffic import Traffic
from api.demo.watch import Watcher
from api.stack import Stack, StackSettings
from api.supervise import EventKind, ProcessEvent
from controller.solver import policies
from controller.solving import SolverProcess
from eplane.errors import BadInput, StackError

GROUP = "demo"
MODEL = "tiny"
LOOK_EVERY_S = 0.5
# A wave of the demo is made to last long enough to be seen: bundles are small, the machine is one.
BYTES_PER_S = 2_000_000.0
EXIT_WORLD_LOST = 70
# After the traffic: the time in which the last windows come in.
SETTLE_S = 2.0
WARM_S = 300.0


def run(settings: DemoSettings) -> Result:
    """The whole demo. Leaves no process and no file behind but the two results, also after Ctrl-C."""
    known = sorted(policies())
    if settings.policy not in known:
        raise BadInput(f"--policy {settings.policy}: must be one of {', '.join(known)}")
    with _run_dir(settings) as folder:
        chaos = Chaos(folder / "kills") if settings.chaos else None
        stops: list[ProcessEvent] = []

        def note(event: ProcessEvent) -> None:
            if event.kind is EventKind.ENDED and event.name.startswith("runtime"):
                stops.append(event)

        _say("getting the solver ready (the first time it is compiled, which takes a while) ...")
        asyncio.run(_warm_solver())
        stack = Stack(_stack_settings(settings, folder, chaos), note)
        _say("starting etcd, controllers, ranks and agents ...")
        with stack:
            played = asyncio.run(_Play(settings, stack, chaos, stops).play())
        _say(f"checking {played.traffic.tally.tokens} returned tokens against one rank ...")
        judgement = judge(played.traffic.tally.answered, MODEL)
        # The kill log lies in the folder, so it is read before that goes.
        return played.result(judgement)


class _Play:
    """One performance. All that happens between the start and the stop of the stack."""

    def __init__(
        self, settings: DemoSettings, stack: Stack, chaos: Chaos | None, stops: Sequence[ProcessEvent]
    ) -> None:
        self._settings = settings
        self._stack = stack
        self._chaos = chaos
        self._stops = stops
        self._script = phases(settings.seconds)
        self._ledger = Ledger(still=settings.policy == "static")
        self._watcher = Watcher(GROUP, stack.controller_urls, stack.runtime_urls, self._ledger)
        self._stops_before = 0
        self._asked = False
        self._loud_stop: str | None = None
        self.traffic = Traffic(
            stack.runtime_urls, settings.clients, settings.seed, self._phase, lambda: self._watcher.seconds
        )

    def _phase(self) -> Phase:
        return phase_at(self._script, self._watcher.seconds)

    async def play(self) -> _Play:
        await self._ready()
        # A world that was lost before the first request harmed nobody.
        self._stops_before = len(self._stops)
        self._watcher.start()
        clients = asyncio.create_task(self.traffic.run())
        try:
            await self._look_on(clients)
        finally:
            self.traffic.stop()
            if self._loud_stop is not None:
                clients.cancel()
            await asyncio.gather(clients, return_exceptions=True)
        await asyncio.sleep(SETTLE_S)
        await self._watcher.look()
        await self._watcher.close()
        return self

    async def _ready(self) -> None:
        """Until the world is adopted: from then on the controller sees all there is to see."""
        for _ in range(240):
            await self._watcher.look()
            if self._watcher.seen.status.get("epoch") and self._ledger.start is None:
                self._ledger.start = await self._watcher.start_placement()
            if self._ledger.start is not None:
                return
            await asyncio.sleep(0.25)
        trouble = self._watcher.seen.status.get("trouble") or "no controller answers"
        raise StackError(f"the world of the ranks was not adopted within a minute: {trouble}")

    async def _look_on(self, clients: asyncio.Task[None]) -> None:
        screen = Console()
        live = Live(console=screen, screen=False, auto_refresh=False) if screen.is_terminal else None
        said = -math.inf
        with live or contextlib.nullcontext():
            while (seconds := self._watcher.seconds) < self._settings.seconds:
                await asyncio.sleep(LOOK_EVERY_S)
                await self._watcher.look()
                if clients.done():
                    clients.result()
                if self._world_lost():
                    return
                await self._reach_fault()
                frame = self._frame()
                if live is not None:
                    live.update(view.render(frame), refresh=True)
                elif seconds - said >= 5:
                    said = seconds
                    screen.print(view.line(frame), highlight=False, soft_wrap=True)

    async def _reach_fault(self) -> None:
        """A planted fault needs a bundle that moves: if nothing has moved by half-time, a person asks for it."""
        late = self._watcher.seconds > self._settings.seconds / 2
        if self._settings.fault is None or self._asked or not late or self._watcher.seen.migrations:
            return
        self._asked = True
        await asyncio.to_thread(_ask_for_moves, self._stack.controller_urls)

    def _world_lost(self) -> bool:
        """Whether the ranks ended their world themselves. Without a planted fault that is a failure; with one, a catch."""
        if len(self._stops) <= self._stops_before:
            return False
        event = self._stops[self._stops_before]
        tail = self._stack.supervisor.log_tail(event.name, 3).strip().splitlines()
        self._loud_stop = f"{event.name} ended with code {event.code}: {tail[-1] if tail else 'no word'}"
        return True

    def _frame(self) -> view.Frame:
        tally = self.traffic.tally
        return view.Frame(
            self._watcher.seconds,
            self._settings.seconds,
            self._phase(),
            self._watcher.seen,
            self._ledger.timed(),
            len(tally.answered),
            len(tally.failed),
            tally.tokens,
            self._kills(),
        )

    def _kills(self) -> Sequence[Kill]:
        return self._chaos.kills(self._watcher.started_at) if self._chaos else ()

    def result(self, judgement: Judgement) -> Result:
        tally = self.traffic.tally
        migrations = [self._migration(m) for m in self._watcher.seen.migrations.values()]
        migrations.sort(key=lambda m: m["started_s"])
        retired = [at for m in migrations for at in m["retired_s"]]
        balance = [self._ledger.phase(phase, retired) for phase in self._script]
        rows = [row for rows in self._watcher.seen.steps.values() for row in rows]
        result = Result(
            self._settings,
            len(tally.answered),
            len(tally.failed),
            tally.failed,
            tally.tokens,
            judgement,
            migrations,
            max(0, int(self._watcher.seen.status.get("epoch") or 1) - 1),
            self._kills(),
            balance,
            step_times(rows),
            self._loud_stop,
        )
        result.write(self._settings.json_path)
        timed = [t for t in self._ledger.timed() if t.at_s <= self._settings.seconds]
        draw(self._settings.png_path, timed, self._ledger.start, balance, retired, result.kill_log)
        return result

    def _migration(self, seen: dict[str, Any]) -> dict[str, Any]:
        start = self._watcher.started_at
        ended = seen["ended_at"]
        retired = [w["since"] - start for w in seen["waves"] if w["state"] == "RETIRED" and w["since"]]
        return {
            "id": seen["id"],
            "waves": len(seen["waves"]),
            "moves": seen["moves"],
            "bytes": seen["bytes"],
            "predicted_gain": seen["predicted"],
            "measured_gain_s": seen["measured_gain_s"],
            "started_s": round(seen["created_at"] - start, 2),
            "ended_s": None if ended is None else round(ended - start, 2),
            "seconds": None if ended is None else round(ended - seen["created_at"], 2),
            "retired_s": [round(at, 2) for at in retired],
            "outcome": seen["outcome"] or seen["state"],
            "sentence": seen["sentence"],
        }


async def _warm_solver() -> None:
    """Compile its kernels now, once for all controllers, rather than in the first phase of the traffic."""
    solver = SolverProcess()
    try:
        await solver.warm(WARM_S)
    finally:
        await solver.close()


def _ask_for_moves(controllers: Sequence[str]) -> None:
    """Propose a placement from scratch, and execute it."""
    with Client(ClientSettings(tuple(controllers))) as client:
        group = path_of("v1", "groups", GROUP)
        wish = {"policy": "eplb", "reason": "reach the planted fault", "options": {"anyway": True}}
        proposed = client.change("POST", f"{group}/plans", wish)
        plan = proposed["plan"]
        if plan is not None:
            body = {"reason": "reach the planted fault"}
            client.change("POST", f"{group}/plans/{plan['id']}/execute", body, if_match=plan["base_epoch"])


def _stack_settings(settings: DemoSettings, folder: Path, chaos: Chaos | None) -> StackSettings:
    still = settings.policy == "static"
    return StackSettings(
        run_dir=folder,
        group=GROUP,
        model=MODEL,
        ranks=settings.ranks,
        nodes=settings.nodes,
        controllers=settings.controllers,
        slots=settings.slots,
        mode="auto",
        ttl_s=3.0,
        window_steps=8,
        fault=settings.fault,
        env=chaos.environment() if chaos else {},
        group_settings={
            "policy": settings.policy,
            "hardware": "demo",
            "shares": not still,
            "interval_s": 1.0,
            "cooldown_s": 2.0,
            "window": 8,
            "min_gain": 0.02,
            "min_window_tokens": 6000,
            # Dearer than the loopback link alone would make them: fewer moves, and hardly less balance.
            "move_weight": 0.005,
            "bytes_per_s": BYTES_PER_S,
        },
    )


@contextlib.contextmanager
def _run_dir(settings: DemoSettings) -> Iterator[Path]:
    """Where the stack lives: a folder that is removed again, or the one that was asked for, which stays.

    SIGTERM ends the demo as Ctrl-C does, so that it stops what it started.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    folder = settings.run_dir or Path(tempfile.mkdtemp(prefix="eplane-demo-"))
    try:
        yield folder
    finally:
        signal.signal(signal.SIGTERM, before)
        if settings.run_dir is None:
            shutil.rmtree(folder, ignore_errors=True)


def _say(sentence: str) -> None:
    sys.stderr.write(sentence + "\n")
    sys.stderr.flush()
