"""What must be true once a group has come to rest, whatever happened before; told from etcd and the engine's diary."""

from __future__ import annotations

import time
from itertools import pairwise

from eplane.records import HistoryKind
from tests.cluster.rig import CONTROLLERS, NODES, Cluster, Stored, until


def at_rest(cluster: Cluster) -> Stored:
    """Wait until nothing moves and everyone is back, then check everything. Returns what etcd held at that moment."""
    until(lambda: _all_back(cluster), f"all processes back: {cluster.supervisor.states()}")
    until(lambda: _agree(cluster), "ranks, agents and store agree, and all cells are clean")
    seen = cluster.see()
    linear(seen)
    one_at_a_time(seen)
    serving(cluster)
    return seen


def _all_back(cluster: Cluster) -> bool:
    seen = cluster.now()
    states = cluster.supervisor.states()
    running = all(states[name].running and not cluster.is_stopped(name) for name in CONTROLLERS)
    return running and seen is not None and seen.leader is not None and set(seen.agents) == set(NODES)


def _agree(cluster: Cluster) -> bool:
    """No migration is active; every rank serves what the pointer names, knows its number, and has nothing to clean."""
    seen = cluster.now()
    pointer = None if seen is None else seen.pointer
    if seen is None or pointer is None or any(key.endswith("/active") for key in seen.values):
        return False
    ranks = cluster.engine()["ranks"]
    for rank in ranks:
        status = rank["status"]
        live = status["live"]
        if (status["world"], live["digest"], live["epoch"]) != (pointer.world, pointer.digest, pointer.epoch):
            return False
        if not status["clean"] or status["cells_free"] != rank["cells"] - rank["held"]:
            return False
    told = [(agent.world, agent.digest, agent.epoch) for agent in seen.agents.values()]
    return told == [(pointer.world, pointer.digest, pointer.epoch)] * len(NODES)


def linear(seen: Stored) -> None:
    """Epochs grow by one from 1, each has one record, each follows from the one before; the last is the pointer's."""
    history, pointer = seen.history, seen.pointer
    assert pointer is not None
    assert [record.epoch for record in history] == list(range(1, pointer.epoch + 1))
    assert (history[-1].digest, history[-1].world) == (pointer.digest, pointer.world)
    for before, after in pairwise(history):
        assert after.base_digest == before.digest
    made = [(r.migration, r.wave) for r in history if r.made_by is HistoryKind.WAVE]
    assert len(made) == len(set(made))
    for migration in seen.migrations:
        live = [wave for wave in seen.waves(migration.id) if wave.wave.cut]
        assert sorted(w.wave.number for w in live) == sorted(
            n for name, n in made if name == migration.id and n is not None
        )


def one_at_a_time(seen: Stored) -> None:
    """A migration begins only after the one before has ended, and its epochs stand together."""
    migrations = sorted(seen.migrations, key=lambda m: m.created_at)
    for before, after in pairwise(migrations):
        assert before.ended_at is not None
        assert before.ended_at <= after.created_at + 0.001
    order = [r.migration for r in seen.history if r.migration is not None]
    blocks = [name for name, before in zip(order, [None, *order], strict=False) if name != before]
    assert len(blocks) == len(set(blocks))


def serving(cluster: Cluster) -> None:
    """The engine never ended, and steps on."""
    state = cluster.supervisor.state("engine")
    assert (state.running, state.restarts) == (True, 0)
    step = cluster.engine()["step"]
    limit = time.monotonic() + 30
    while cluster.engine()["step"] <= step:
        assert time.monotonic() < limit
        time.sleep(0.02)
