"""Why is it so? One expert told in sentences, and everything that is out of order."""

from __future__ import annotations

from typing import Any

import numpy as np

from controller.group import Group
from eplane.errors import NotFound, RecordError
from eplane.migration import MigrationState
from eplane.records import HistoryKind
from eplane.wave import WaveState

Json = dict[str, Any]
WINDOWS = 16
LEAST_COMPLETENESS = 0.9


def explain(group: Group, layer: int, expert: int) -> Json:
    """Where an expert lives, what it gets, and how it came there. NotFound for one that does not exist."""
    state = group.state
    placement = state.placement()
    if not (0 <= layer < placement.layers and 0 <= expert < placement.experts):
        raise NotFound(
            f"layer {layer}, expert {expert}: there are {placement.layers} layers of {placement.experts} experts"
        )
    slots = placement.replicas(layer, expert)
    ranks = [placement.rank_of(slot) for slot in slots]
    seen = group.book.newest(WINDOWS)
    load = np.sum([s.window.total for s in seen], axis=0)[layer] if seen else None
    hint = group.hint
    shares = hint.shares if hint is not None and hint.digest == placement.digest else placement.even_shares()
    moved = _moved(group, layer, slots)
    sentences = [f"expert {expert} of layer {layer} has {len(slots)} replicas, on ranks {', '.join(map(str, ranks))}"]
    body: Json = {"layer": layer, "expert": expert, "slots": list(slots), "ranks": ranks, "epochs": moved}
    body["shares"] = [float(shares[layer, slot]) for slot in slots]
    if load is not None and load.sum() > 0:
        mean_rank = load.sum() / placement.ranks
        part = float(load[expert] / load.sum())
        hotter = int((load > load[expert]).sum())
        body.update(tokens=float(load[expert]), part=part, place=hotter + 1)
        sentences.append(f"it gets {part:.1%} of the layer's tokens, place {hotter + 1} of {placement.experts}")
        if load[expert] > mean_rank:
            needed = int(np.ceil(load[expert] / mean_rank))
            sentences.append(
                f"that is more than an even rank's load, so it takes at least {needed} replicas to level the layer"
            )
    if moved:
        last = moved[-1]
        sentences.append(f"a replica last moved in epoch {last['epoch']}: {last['reason']}")
    else:
        sentences.append("its replicas have not moved in the epochs that are kept")
    body["sentences"] = sentences
    body["sentence"] = ". ".join(sentences)
    return body


def _moved(group: Group, layer: int, slots: tuple[int, ...]) -> list[Json]:
    """The waves that wrote one of the slots that hold the expert now."""
    result: list[Json] = []
    for epoch, record in sorted(group.state.histories().items()):
        if record.made_by is HistoryKind.WAVE and record.changes is not None:
            hits = [c.slot for c in record.changes if c.layer == layer and c.slot in slots]
            if hits:
                result.append(
                    {"epoch": epoch, "slots": hits, "plan": record.plan, "reason": record.reason, "at": record.at}
                )
    return result[-16:]


def anomalies(group: Group, trouble: str | None) -> list[Json]:
    """Everything that a person should look at, worst first; each with its sentence."""
    found = [*_of_control(group, trouble), *_of_work(group), *_of_cells(group), *_of_load(group)]
    order = {"error": 0, "warning": 1, "notice": 2}
    return sorted(found, key=lambda item: order[item["level"]])


def _item(level: str, kind: str, sentence: str, **more: Any) -> Json:
    return {"level": level, "kind": kind, "sentence": sentence, **more}


def _of_control(group: Group, trouble: str | None) -> list[Json]:
    state, result = group.state, []
    if trouble:
        result.append(_item("error", "trouble", trouble))
    if state.mirror.stale_for_s > 1:
        result.append(_item("warning", "stale", "the store can not be watched: what is shown may be old"))
    if state.leader() is None:
        result.append(_item("warning", "no_leader", "no controller leads the group: nothing is decided"))
    pause = state.pause()
    if pause is not None:
        result.append(_item("notice", "paused", f"paused by {pause.actor}: {pause.reason}"))
    result += [_item("warning", "setting", sentence) for sentence in _idle_settings(group)]
    absent = list(state.absent())
    if absent:
        result.append(
            _item("warning", "agent_absent", f"no agent on {', '.join(absent)}: no wave can go on there", nodes=absent)
        )
    return result


def _idle_settings(group: Group) -> list[str]:
    """Settings that name what the adopted world does not have: a slip of the pen that would otherwise do nothing."""
    world = group.state.world()
    if world is None:
        return []
    try:
        settings = group.state.settings()
    except RecordError:
        return []  # The verdict tells it.
    shape, nodes = world.world.shape, world.world.nodes
    strange = [node for node in settings.drained if node not in nodes]
    told = [f"drained names {node}, which is no node of this world: {', '.join(nodes)}" for node in strange]
    for layer, expert, rank in settings.pinned:
        if layer >= shape.layers or expert >= shape.experts or rank >= world.world.ranks:
            told.append(f"the pin [{layer}, {expert}, {rank}] names what this world does not have")
    return told


def _of_work(group: Group) -> list[Json]:
    active = group.state.active()
    if active is None:
        return []
    journey = group.state.journey(active.migration)
    if journey.record.state is MigrationState.DEAD:
        return [
            _item("error", "dead", f"migration {active.migration} is dead, restart the group: {journey.record.reason}")
        ]
    stalled = [w for w in journey.stored.waves if w.stalled]
    return [
        _item(
            "warning",
            "stalled",
            f"wave {w.number} of migration {active.migration} is STALLED: {w.reason}",
            wave=w.number,
        )
        for w in stalled
        if w.state in (WaveState.SWITCHING, WaveState.ABORTED)
    ]


def _of_cells(group: Group) -> list[Json]:
    world = group.state.world()
    waiting = {} if world is None else group.roster.live(world.world.world)
    return [
        _item("notice", "cells_wait", f"rank {rank}: {live.waits}", rank=rank)
        for rank, live in sorted(waiting.items())
        if live.waits
    ]


def _of_load(group: Group) -> list[Json]:
    book, result = group.book, []
    if book.completeness is not None and book.completeness < LEAST_COMPLETENESS:
        missing = sorted({rank for _, ranks in book.pending() for rank in ranks})
        sentence = f"{book.completeness:.0%} of the last windows were complete; missing now: ranks {missing}"
        result.append(_item("warning", "incomplete", sentence))
    strange = {cause: n for cause, n in book.refused.items() if n and cause not in ("duplicate", "late", "world")}
    if strange:
        sentence = "reports of load were refused: " + ", ".join(
            f"{n} for {cause}" for cause, n in sorted(strange.items())
        )
        result.append(_item("notice", "refused", sentence))
    seen = book.newest(WINDOWS)
    if seen:
        result += _too_hot(group, np.sum([s.window.total for s in seen], axis=0))
    return result


def _too_hot(group: Group, load: np.ndarray) -> list[Json]:
    """Layers that no number of moves can level with the replicas that the hottest expert has."""
    if group.state.epoch() is None:
        return []
    placement = group.state.placement()
    if load.shape != (placement.layers, placement.experts):
        return []
    each = load / placement.replica_count
    even = load.sum(axis=1) / placement.ranks
    hot = [int(layer) for layer in np.flatnonzero(each.max(axis=1) > 1.5 * np.maximum(even, 1))]
    return [
        _item(
            "notice",
            "hot_expert",
            f"layer {layer}: one replica of expert {int(each[layer].argmax())} alone gets "
            f"{each[layer].max() / even[layer]:.1f} times an even rank's load",
            layer=layer,
            expert=int(each[layer].argmax()),
        )
        for layer in hot[:8]
    ]
