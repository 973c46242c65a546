"""What people and the API are shown of a group: plain JSON, made from records and load, without side effects."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from controller.group import Group
from controller.observe import balancedness, mean_balancedness
from controller.state import GroupState, Journey
from eplane.errors import NotFound
from eplane.migration import FINAL
from eplane.plan import LeaderEpoch, Plan
from eplane.records import HistoryRecord
from eplane.wave import Wave
from eplane.work import MigrationRecord

Json = dict[str, Any]
# Windows that the figures of `status` and `load` are taken over.
SHOWN_WINDOWS = 16
# More than a group's settings let it keep.
EVERY_WINDOW = 1 << 20
# Numbers of load in one recording: more would hold the controller up. Who wants the rest asks again.
RECORDED_AT_ONCE = 1 << 22


def status(group: Group, term: LeaderEpoch | None, trouble: str | None) -> Json:
    """Everything at a glance. `term`: this controller's own, if it leads."""
    state, leading = group.state, term is not None
    world, pointer, leader = state.world(), state.epoch(), state.leader()
    present = {a.node for a in state.agents()}
    wanted = set(world.world.nodes) if world else present
    return {
        "group": group.name,
        "mode": state.mode().value,
        "paused": state.pause() is not None,
        "leader": leader
        and {
            "id": leader[0].id,
            "url": leader[0].url,
            "epoch": term.to_json() if term else {"revision": leader[1]},
        },
        "leads_here": leading,
        "world": world and world_view(group),
        "epoch": pointer.epoch if pointer else None,
        "digest": pointer.digest if pointer else None,
        "balancedness": balance(group),
        "verdict": verdict(group, leading),
        "trouble": trouble,
        "migration": active(state),
        "nodes": nodes(group),
        "agents": f"{len(present & wanted)}/{len(wanted)}",
        "stale_for_s": state.mirror.stale_for_s if np.isfinite(state.mirror.stale_for_s) else None,
    }


def verdict(group: Group, leading: bool) -> Json | None:
    if not leading:
        leader = group.state.leader()
        where = f"the leader at {leader[0].url} decides" if leader else "no controller leads the group now"
        return {"at": group.clock.now(), "kind": "following", "sentence": where}
    return dict(group.verdicts[-1].to_json()) if group.verdicts else None


def world_view(group: Group) -> Json | None:
    record = group.state.world()
    if record is None:
        return None
    world = record.world
    return {
        "world": world.world,
        "ranks": world.ranks,
        "nodes": list(world.nodes),
        "model": world.shape.model,
        "layers": world.shape.layers,
        "experts": world.shape.experts,
        "slots": world.slots,
        "cells": world.cells,
        "bundle_bytes": world.shape.bundle_bytes,
        "adopted_at": record.at,
    }


def balance(group: Group) -> Json:
    """Balancedness as it truly fell on the ranks: of the newest window, over the newest few, and per layer of those."""
    seen = group.book.newest(SHOWN_WINDOWS)
    if not seen:
        return {"now": None, "mean": None, "per_layer": []}
    per_layer = balancedness(np.sum([s.rank_load for s in seen], axis=0))
    tokens = np.array([s.window.tokens for s in seen])
    each = np.array([_or_nan(mean_balancedness(s.balancedness)) for s in seen])
    counted = np.isfinite(each) & (tokens > 0)
    mean = float((each * tokens)[counted].sum() / tokens[counted].sum()) if counted.any() else None
    return {
        "now": mean_balancedness(seen[-1].balancedness),
        "mean": mean,
        "per_layer": [None if np.isnan(x) else float(x) for x in per_layer],
    }


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def load(group: Group) -> Json:
    """The newest windows summed: per expert, and per rank as it truly fell. `recent`: one entry a window, oldest first."""
    seen = group.book.newest(SHOWN_WINDOWS)
    book = group.book
    body: Json = {
        "windows": len(seen),
        "complete": bool(seen),
        "completeness": book.completeness,
        "incomplete": book.incomplete,
        "accepted": book.accepted,
        "refused": dict(book.refused),
        "waiting": [{"first_step": s[0], "last_step": s[1], "missing_ranks": list(m)} for s, m in book.pending()[-4:]],
        "load": [],
        "rank_load": [],
        "sampled": sum(s.sampled for s in seen),
        "balancedness": balance(group),
        "history": [{"at": at, "balancedness": value} for at, value in list(group.balance)[-512:]],
    }
    if not seen:
        return body
    body["world"], body["digest"] = seen[-1].window.world, seen[-1].window.digest
    body["first_step"], body["last_step"] = seen[0].window.first_step, seen[-1].window.last_step
    body["load"] = np.sum([s.window.total for s in seen], axis=0).tolist()
    body["prefill_part"] = float(
        sum(s.window.prefill.sum() for s in seen) / max(1.0, sum(s.window.tokens for s in seen))
    )
    body["rank_load"] = np.sum([s.rank_load for s in seen], axis=0).tolist()
    body["recent"] = [
        {
            "first_step": s.window.first_step,
            "last_step": s.window.last_step,
            "digest": s.window.digest,
            "tokens": s.window.tokens,
            "sampled": s.sampled,
            "balancedness": mean_balancedness(s.balancedness),
        }
        for s in seen
    ]
    return body


def windows(group: Group, since_step: int) -> list[Json]:
    """Each newest complete window by itself, oldest first, of those that end after `since_step`."""
    return [
        {
            "world": s.window.world,
            "digest": s.window.digest,
            "first_step": s.window.first_step,
            "last_step": s.window.last_step,
            "load": s.window.total.tolist(),
            "rank_load": s.rank_load.tolist(),
            "sampled": s.sampled,
        }
        for s in group.book.newest(SHOWN_WINDOWS)
        if s.window.last_step > since_step
    ]


def recording(group: Group, since_step: int, world: str | None) -> dict[str, NDArray[Any]] | None:
    """The oldest complete windows that are kept and end after `since_step`, as arrays with one row a window.

    As many as fit one answer. `world`: the one that `since_step` counts in; in another world all windows are new. None
    where there is none.
    """
    seen = group.book.newest(EVERY_WINDOW)
    mine = group.book.world
    if mine is not None and world in (None, mine.world):
        seen = tuple(s for s in seen if s.window.last_step > since_step)
    if not seen:
        return None
    seen = seen[: max(1, RECORDED_AT_ONCE // seen[0].window.prefill.size)]
    load = np.stack([s.window.total for s in seen])
    # Tokens are counted, so their sums are whole numbers.
    whole = np.int32 if load.max() <= np.iinfo(np.int32).max else np.int64
    return {
        "load": np.rint(load).astype(whole),
        "first_step": np.array([s.window.first_step for s in seen], dtype=np.int64),
        "last_step": np.array([s.window.last_step for s in seen], dtype=np.int64),
        "digest": np.array([s.window.digest for s in seen]),
        "world": np.array([s.window.world for s in seen]),
    }


def placement(group: Group, epoch: int | None) -> Json:
    state = group.state
    pointer = state.epoch()
    found = state.placement(epoch)
    at = pointer.epoch if epoch is None and pointer else epoch
    hint = group.hint
    live = hint is not None and hint.digest == found.digest
    return {
        "epoch": at,
        "digest": found.digest,
        "ranks": found.ranks,
        "slots": found.slots,
        "experts": found.experts,
        "p2l": found.p2l.tolist(),
        "replicas": found.replica_count.tolist(),
        "shares": hint.json["shares"] if live and hint is not None else None,
    }


def plan_view(plan: Plan, state: GroupState, whole: bool) -> Json:
    """A plan; `whole` shows the moves of its waves."""
    raw = plan.to_json()
    waves: list[Json] = []
    for wave in plan.waves:
        item: Json = {
            "number": wave.number,
            "epoch": plan.base_epoch + wave.number,
            "bytes": wave.bytes,
            "moves": len(wave.loads),
            "changes": len(wave.changes),
            "overlaps": wave.overlaps,
            "target_digest": wave.target_digest,
        }
        if whole:
            item["loads"] = [[x.layer, x.slot, x.expert, x.source_rank] for x in wave.loads]
            item["delta"] = [[c.layer, c.slot, c.expert] for c in wave.changes]
        waves.append(item)
    decisions = [{"goal": d.goal, "ruling": d.ruling.value, "sentence": d.sentence} for d in plan.decisions]
    run_by = next((m.id for m in state.migrations() if m.plan == plan.id), None)
    return {**raw, "waves": waves, "decisions": decisions, "migration": run_by}


def migration_line(record: MigrationRecord) -> Json:
    return {
        "id": record.id,
        "plan": record.plan,
        "state": record.state.value,
        "waves": record.waves,
        "base_epoch": record.base_epoch,
        "world": record.world,
        "actor": record.actor,
        "reason": record.reason,
        "created_at": record.created_at,
        "ended_at": record.ended_at,
        "outcome": record.state.value if record.state in FINAL else None,
    }


def migration_view(state: GroupState, journey: Journey) -> Json:
    """A migration with its waves; predicted and measured gain once known."""
    record, plan = journey.record, journey.plan
    last = state.histories().get(record.base_epoch + len(plan.waves))
    mine = last if last is not None and last.migration == record.id else None
    waves = [wave_view(journey, wave) for wave in journey.stored.waves]
    live = journey.stored.live
    return {
        **migration_line(record),
        "waves": waves,
        "live": live,
        "moves": sum(len(plan.waves[i].loads) for i in range(live)),
        "bytes": sum(plan.waves[i].bytes for i in range(live)),
        "planned_moves": plan.moves,
        "planned_bytes": plan.bytes,
        "predicted": plan.predicted.to_json(),
        "measured_gain_s": mine.measured_gain_s if mine else None,
        "sentence": record.reason or f"{live} of {len(waves)} waves live",
    }


def wave_view(journey: Journey, wave: Wave) -> Json:
    stored, work = journey.waves.get(wave.number), journey.plan.waves[wave.number - 1]
    return {
        "number": wave.number,
        "epoch": wave.epoch,
        "state": wave.state.value,
        "bytes": work.bytes,
        "moves": len(work.loads),
        "verified": sorted(wave.verified),
        "switched": sorted(wave.switched),
        "clean": sorted(wave.clean),
        "stalled": wave.stalled,
        "reason": wave.reason,
        "since": stored.since if stored else None,
    }


def active(state: GroupState) -> Json | None:
    record = state.active()
    if record is None:
        return None
    try:
        journey = state.journey(record.migration)
    except NotFound:
        return None
    view = migration_view(state, journey)
    open_ = next((w for w in view["waves"] if w["state"] not in ("RETIRED", "PENDING")), None)
    return {**view, "wave": open_["number"] if open_ else view["live"]}


def nodes(group: Group) -> list[Json]:
    state = group.state
    world, present = state.world(), {a.node: a for a in state.agents()}
    names = list(world.world.nodes) if world else []
    result: list[Json] = []
    for node in [*names, *sorted(set(present) - set(names))]:
        agent = present.get(node)
        result.append(
            {
                "node": node,
                "ranks": list(world.world.ranks_of(node)) if world else list(agent.ranks) if agent else [],
                "agent": "present" if agent else "absent",
                "incarnation": agent.incarnation if agent else None,
                "world": agent.world if agent else None,
                "epoch": agent.epoch if agent else None,
                "digest": agent.digest if agent else None,
                "drained": node in state.settings().drained,
            }
        )
    return result


def history_view(record: HistoryRecord) -> Json:
    body = record.body()
    body["changes"] = len(record.changes or ())
    body["kind"] = body.pop("made_by")
    return body
