"""The solver's process: answers as the solver itself, typed errors, a hard time-out, and no survivor."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from controller.solver import Problem, solve
from controller.solving import SolverProcess, decode, encode
from eplane.errors import Infeasible, ProblemError, SolverFailed
from eplane.placement import Placement, check_shares, linear


@pytest.fixture
async def solver() -> AsyncIterator[SolverProcess]:
    process = SolverProcess()
    yield process
    await process.close()


def problem(policy: str = "eplb") -> dict[str, object]:
    load = np.random.default_rng(1).integers(0, 100, size=(2, 3, 8)).astype(np.float64)
    return {"loads": load, "ranks": 4, "slots_per_rank": 3, "prior": linear(3, 8, 4, 3).p2l, "policy": policy}


async def test_the_child_answers_as_the_solver_does_and_is_kept(solver: SolverProcess) -> None:
    first = await solver.solve(problem(), 60)
    second = await solver.solve(problem("static"), 60)
    here = solve(Problem.from_dict(problem()))
    assert (first.placement == here.placement).all()
    assert (first.shares == here.shares).all()
    assert first.decisions == here.decisions
    assert second.moves == 0
    assert solver.started == 1


async def test_shares_level_what_a_split_can_level(solver: SolverProcess) -> None:
    # Expert 0 is hot and has a replica on both ranks; rank 1 is busier by its own expert 2.
    placement = Placement(np.array([[0, 1, 0, 2]]), 2, 3)
    load = np.array([[100.0, 0.0, 40.0]])
    shares = check_shares(placement, await solver.shares(placement.p2l, 2, load, 60))
    assert placement.rank_load(load, shares)[0] == pytest.approx([70.0, 70.0], abs=0.1)
    assert placement.rank_load(load)[0].max() == 90.0


async def test_refusals_keep_their_type_and_sentence(solver: SolverProcess) -> None:
    with pytest.raises(ProblemError, match="policy: is 'nonsense'"):
        await solver.solve(problem("nonsense"), 60)
    with pytest.raises(Infeasible, match="goal drained cannot be met"):
        await solver.solve({**problem(), "drained": [0, 1, 2]}, 60)
    assert (await solver.solve(problem(), 60)).policy == "eplb"
    assert solver.started == 1


async def test_a_late_answer_ends_the_child_and_the_next_gets_a_new_one(solver: SolverProcess) -> None:
    await solver.solve(problem(), 60)
    child = solver._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(SolverFailed, match="no answer in"):
        await solver.solve(problem(), 0.2)
    assert child.returncode == -signal.SIGKILL
    assert (await solver.solve(problem(), 60)).policy == "eplb"
    assert solver.started == 2


async def test_a_child_that_dies_is_an_error_and_not_the_end(solver: SolverProcess) -> None:
    await solver.solve(problem(), 60)
    child = solver._child
    assert child is not None
    os.kill(child.pid, signal.SIGSTOP)
    asking = asyncio.create_task(solver.solve(problem(), 60))
    await asyncio.sleep(0.05)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(SolverFailed, match="ended while it solved"):
        await asking
    assert (await solver.solve(problem(), 60)).policy == "eplb"


async def test_a_cancelled_solve_leaves_no_half_read_answer(solver: SolverProcess) -> None:
    await solver.solve(problem(), 60)
    asking = asyncio.create_task(solver.solve(problem("static"), 60))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await solver.solve(problem(), 60)).policy == "eplb"


def test_the_child_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = textwrap.dedent(
        f"""
        import asyncio, os, signal, sys
        sys.path.insert(0, {os.getcwd()!r})
        from controller.solving import SolverProcess
        from tests.controller.test_solving import problem
        async def main():
            solver = SolverProcess()
            await solver.solve(problem(), 60)
            print(solver._child.pid, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
        """
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120, check=False)
    child = int(done.stdout)
    for _ in range(200):
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        asyncio.run(asyncio.sleep(0.05))
    raise AssertionError(f"the solver {child} outlived its parent")


def test_frames_refuse_what_they_can_not_hold() -> None:
    frame = encode({"a": np.arange(6).reshape(2, 3), "b": "x"})
    head = int.from_bytes(frame[:4], "big")
    back = decode(frame[8 : 8 + head], frame[8 + head :])
    assert back["b"] == "x"
    assert (back["a"] == np.arange(6).reshape(2, 3)).all()
    with pytest.raises(SolverFailed, match="shorter"):
        decode(frame[8 : 8 + head], frame[8 + head : -1])
    with pytest.raises(SolverFailed, match="can not be read"):
        decode(b"{", b"")
    with pytest.raises(SolverFailed, match="kind"):
        decode(b'{"plain": {}, "arrays": [["a", "|O", [1]]]}', b"")
