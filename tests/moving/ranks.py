"""Rank processes of the moving tests: a step loop over gloo, with numbered bundles for weights.

Started from a forkserver that has torch loaded, so that a test with several real processes costs little.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from eplane.errors import GenerationEnded, WorldEnded
from eplane.placement import linear
from runtime.faults import Faults
from runtime.link.server import LinkServer
from runtime.tables import HEADER_ARMED, HEADER_TOKENS, LiveTable
from runtime.transfer import PairedTransfer
from tests.moving.rig import RealRank, number_of

STOP = -1


@dataclass(frozen=True, slots=True)
class Setting:
    """What a rank process is started with. `late`: the rank that switches a step late, if any."""

    folder: str
    world: str
    ranks: int
    layers: int
    experts: int
    slots: int
    spare: int
    late: int | None = None
    trust_headers: bool = False


def context() -> ForkServerContext:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.moving.ranks"])
    return made


def start(target: Callable[..., None], ranks: int, *args: Any) -> list[ForkServerProcess]:
    """One process a rank, each calling `target(rank, *args)`."""
    made = context()
    processes = [made.Process(target=target, args=(rank, *args), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    return processes


def join(processes: list[ForkServerProcess], seconds: float = 60.0) -> list[int | None]:
    """Exit codes; whoever does not end in time is killed."""
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def join_group(folder: str, rank: int, ranks: int, seconds: float = 30.0) -> None:
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=seconds))


def serve(rank: int, setting: Setting) -> None:
    """Steps until the file `stop` is there, then writes result{rank}.json: what was checked and what was wrong."""
    torch.set_num_threads(1)
    join_group(setting.folder, rank, setting.ranks)
    placement = linear(setting.layers, setting.experts, setting.ranks, setting.slots)
    faults = Faults(switch_late=rank == setting.late, trust_headers=setting.trust_headers)
    mine = RealRank(setting.world, rank, placement, setting.spare, faults=faults)
    folder = Path(setting.folder)
    server = LinkServer(mine.port, folder / f"rank{rank}.sock")
    result: dict[str, Any] = {"steps": 0, "ticks": 0, "checked": 0, "wrong": 0, "ended": None}
    try:
        _steps(mine, setting, folder, result)
    except WorldEnded as error:
        result["ended"] = str(error)
    result["digest"] = mine.switch.live.digest
    result["epoch"] = mine.switch.live.epoch
    (folder / f"result{rank}.json").write_text(json.dumps(result))
    server.close()
    mine.close()
    dist.destroy_process_group()


def _steps(mine: RealRank, setting: Setting, folder: Path, result: dict[str, Any]) -> None:
    rng = np.random.default_rng(mine.rank)
    idle, busy = (folder / "idle").exists(), (folder / "busy").exists()
    step = 0
    while True:
        table = mine.switch.begin_step(step)
        # Traffic comes and goes: of every 40 steps, 15 find the whole group idle, and ranks differ in the others.
        tokens = 20 if busy else 0 if idle or step % 40 >= 25 else int(rng.integers(0, 5))
        if mine.rank == 0 and (folder / "stop").exists():
            tokens = STOP
        header = torch.tensor([table.digest64, mine.switch.sample(), tokens, step], dtype=torch.int64)
        headers = _gather(header, setting.ranks)
        mine.switch.check(headers)
        mine.switch.agree(headers[:, HEADER_ARMED].tolist())
        counts = headers[:, HEADER_TOKENS].tolist()
        if counts[0] == STOP:
            return
        if sum(counts) == 0:
            result["ticks"] += 1
            time.sleep(0.001 if mine.switch.armed is not None else 0.002)
        else:
            _exchange(mine, setting, table, counts, rng, result)
        mine.switch.end_step(step)
        result["steps"] += 1
        step += 1


def _gather(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """`[ranks, *shape]`: the tensor of every rank."""
    parts = [torch.zeros_like(tensor) for _ in range(ranks)]
    dist.all_gather(parts, tensor)
    return torch.stack(parts)


def _exchange(
    mine: RealRank,
    setting: Setting,
    table: LiveTable,
    counts: list[int],
    rng: np.random.Generator,
    result: dict[str, Any],
) -> None:
    """All ranks ask all slots that their tokens go to; each rank answers for its own slots; askers check."""
    most = max(counts)
    asked = torch.full((setting.layers, most, 2), -1, dtype=torch.int64)  # (slot, expert)
    own = counts[mine.rank]
    for layer in range(setting.layers):
        experts = torch.from_numpy(rng.integers(setting.experts, size=own))
        asked[layer, :own, 0] = table.choose(layer, experts)
        asked[layer, :own, 1] = experts
    everything = _gather(asked, setting.ranks)
    answers = torch.zeros(everything.shape[:3], dtype=torch.float64)
    for rank, layer, token in torch.nonzero(everything[..., 0] // setting.slots == mine.rank).tolist():
        slot = int(everything[rank, layer, token, 0])
        if slot >= 0:
            answers[rank, layer, token] = mine.answer(table, layer, slot % setting.slots)
    dist.all_reduce(answers)
    for layer in range(setting.layers):
        for token in range(own):
            result["checked"] += 1
            expected = number_of(layer, int(asked[layer, token, 1]))
            result["wrong"] += float(answers[mine.rank, layer, token]) != expected


def paired(rank: int, folder: str, script: str) -> None:
    """Two ranks try PairedTransfer; rank r writes what it saw to paired{r}.json."""
    torch.set_num_threads(1)
    join_group(folder, rank, 2)
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2), backend="gloo")
    transfer = PairedTransfer(group, 1, timeout_s=1.5)
    result = _SCRIPTS[script](rank, transfer)
    Path(folder, f"paired{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def _bundles(value: float) -> list[torch.Tensor]:
    return [torch.full((4, 300), value), torch.full((7,), int(value), dtype=torch.int8)]


def _values(tensors: list[torch.Tensor]) -> list[float]:
    return [float(tensor.double().mean()) for tensor in tensors]


def _good(rank: int, transfer: PairedTransfer) -> object:
    """Ten bundles each way, with fresh tags."""
    got = []
    for turn in range(10):
        source, value = turn % 2, float(turn + 1)
        tags = 1 + 2 * (turn // 2)
        if rank == source:
            if transfer.fresh_tags(2) != tags:
                return "the tag was not fresh"
            transfer.send(1 - rank, tags, _bundles(value))
        else:
            into = _bundles(0.0)
            transfer.receive(source, tags, into)
            got.append(_values(into))
    return got


def _after_an_orphan(rank: int, transfer: PairedTransfer, tag: int) -> object:
    """An old send was given up by its receiver and still lies there under tag 5; now a new bundle goes under `tag`."""
    if rank == 0:
        orphans = [dist.isend(tensor, 1, transfer._group, tag=5 + i) for i, tensor in enumerate(_bundles(1.0))]
        try:
            transfer.send(1, tag, _bundles(2.0))
        except GenerationEnded as error:
            return str(error)
        return f"sent beside {len(orphans)} orphans"
    time.sleep(0.3)
    into = _bundles(0.0)
    transfer.receive(0, tag, into)
    return _values(into)


def _fresh_tag(rank: int, transfer: PairedTransfer) -> object:
    return _after_an_orphan(rank, transfer, 7)


def _reused_tag(rank: int, transfer: PairedTransfer) -> object:
    return _after_an_orphan(rank, transfer, 5)


def _timed_out(rank: int, transfer: PairedTransfer) -> object:
    """Rank 1 waits for what is never sent: its generation ends for good."""
    if rank == 0:
        time.sleep(2.0)
        return "silent"
    said = []
    for _ in range(2):
        try:
            transfer.receive(0, 9, _bundles(0.0))
        except GenerationEnded as error:
            said.append(str(error))
    return {"said": said, "ended": transfer.ended}


_SCRIPTS: dict[str, Callable[[int, PairedTransfer], object]] = {
    "good": _good,
    "fresh tag": _fresh_tag,
    "reused tag": _reused_tag,
    "timed out": _timed_out,
}
