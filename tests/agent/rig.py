"""An agent in this process, on a store in memory, linked over real sockets to a model engine that steps in a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from agent.daemon import build
from agent.settings import AgentSettings
from eplane.election import Election
from eplane.keys import AckKind, GroupKeys
from eplane.placement import Placement
from eplane.plan import LeaderEpoch, Load, WavePlan
from eplane.records import AckRecord, ActiveRecord, EpochPointer, LeaderRecord, decode, encode, new_nonce
from eplane.store.base import Exists, Missing, Put, Store
from eplane.store.memory import MemoryStore
from eplane.wave import Wave, WaveState
from eplane.work import WaveRecord
from tests.link.model_engine import MANIFEST, ModelGroup, serve

NODE = "n0"
KEYS = GroupKeys("g")


class Engine:
    """A model group that steps in a thread until `close`; `restart` is a new life of its processes."""

    def __init__(self, folder: Path, nodes: tuple[str, ...] = (NODE, NODE)) -> None:
        self.folder = folder
        self.nodes = nodes
        self.group = ModelGroup(nodes, layers=2, experts=6, slots=4, spare=3)
        self._start()

    def _start(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=serve, args=(self.group, self.folder, 4, 0.005, self._ended.is_set), daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def restart(self) -> None:
        self.close()
        self.group = ModelGroup(self.nodes, layers=2, experts=6, slots=4, spare=3)
        self._start()


class Leader:
    """Writes what a controller would write, fenced by nothing: the tests are the only writer."""

    def __init__(self, store: Store, engine: Engine) -> None:
        self.store = store
        self.engine = engine
        self.epoch = LeaderEpoch(1, 1)
        self._election: Election | None = None

    async def lead(self, url: str) -> None:
        if self._election is not None:
            await self._election.resign()
        self._election = Election(self.store, KEYS.leader, encode(LeaderRecord("c", url)), 30.0)
        won = await self._election.campaign()
        self.epoch = LeaderEpoch(won.cluster, won.revision)

    async def put(self, key: str, value: bytes) -> None:
        guard = Exists(key) if await self.store.get(key) else Missing(key)
        assert (await self.store.transact([guard], [Put(key, value)])).succeeded

    async def adopt(self, epoch: int = 1) -> None:
        group = self.engine.group
        await self.put(KEYS.epoch, encode(EpochPointer(epoch, group.start.digest, group.world, epoch, new_nonce())))

    def wave(self, base: Placement, target: Placement, number: int = 1, migration: str = "m1") -> WaveRecord:
        moves = base.moves(target)
        loads = []
        for layer, expert, rank in moves:
            row = target.by_rank()[layer, rank].tolist()
            source = base.rank_of(base.replicas(layer, expert)[0])
            loads.append(Load(layer, rank * target.slots + row.index(expert), expert, source))
        work = WavePlan(
            number, base.delta(target), tuple(loads), base.digest, target.digest, len(loads) * MANIFEST.bundle_bytes
        )
        nodes = tuple(dict.fromkeys(self.engine.nodes))
        wave = Wave(number, 1 + number, base.digest, target.digest, nodes, state=WaveState.STAGING)
        return WaveRecord(self.engine.group.world, migration, wave, work, None, None, 1.0, self.epoch, new_nonce())

    async def order(self, record: WaveRecord) -> None:
        await self.put(KEYS.wave(record.migration, record.wave.number), encode(record))
        if await self.store.get(KEYS.active) is None:
            await self.put(KEYS.active, encode(ActiveRecord(record.migration, new_nonce())))

    async def ack(self, record: WaveRecord, kind: AckKind, node: str = NODE) -> AckRecord | None:
        found = await self.store.get(KEYS.ack(record.migration, record.wave.number, kind, node))
        return None if found is None else decode(AckRecord, found.value)


def exchanged(base: Placement) -> Placement:
    """`base` with the first expert of rank 0 and the last of rank 1 exchanged in layer 0."""
    table = base.p2l.copy()
    mine, theirs = set(table[0, : base.slots].tolist()), set(table[0, base.slots :].tolist())
    a = next(i for i in range(base.slots) if table[0, i] not in theirs)
    b = next(i for i in range(base.slots, 2 * base.slots) if table[0, i] not in mine)
    table[0, a], table[0, b] = table[0, b], table[0, a]
    return Placement(table, base.ranks, base.experts)


@asynccontextmanager
async def running_agent(store: Store, folder: Path, **options: float) -> AsyncIterator[asyncio.Task[int]]:
    """A life of the agent; yields the task that ends with its exit code."""
    settings = AgentSettings("g", NODE, folder / NODE, report_every_s=0.03, move_every_s=0.02, **options)  # type: ignore[arg-type]
    stop = asyncio.Event()
    task = asyncio.create_task(build(settings, store).run(stop))
    try:
        yield task
    finally:
        stop.set()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 10)


async def until(what: Callable[[], object], limit_s: float = 15.0) -> None:
    async with asyncio.timeout(limit_s):
        while not what():
            await asyncio.sleep(0.01)


def new_store() -> MemoryStore:
    return MemoryStore()
