"""Looking back: what a migration truly gained, and how much of the past is kept."""

from __future__ import annotations

from dataclasses import replace

from controller.decide import Decider
from controller.facts import Facts
from controller.gate import Split, nodes_worth
from controller.state import GroupState
from controller.term import Term, put
from eplane.clock import Clock
from eplane.errors import NotFound
from eplane.migration import FINAL
from eplane.plan import PlanState
from eplane.records import HistoryKind, encode
from eplane.store.base import Delete, DeletePrefix, Op
from eplane.transactions import Transaction

# Windows under the new placement before its gain is measured.
LEAST_WINDOWS = 4
_HOUR_S = 3600.0
_OPS_AT_ONCE = 40


async def measure(state: GroupState, term: Term, decider: Decider, facts: Facts) -> float | None:
    """Fill in what the last migration gained: true peaks against those that the same load had had before it.

    Seconds over the horizon, like the prediction, with nodes touched weighed as it weighed them. None while there is nothing to measure yet.
    """
    record = state.histories().get(facts.pointer.epoch)
    if record is None or record.made_by is not HistoryKind.WAVE or record.plan is None:
        return None
    if record.measured_gain_s is not None or record.predicted_gain_s is None:
        return None
    under = tuple(seen for seen in facts.seen if seen.window.digest == record.digest)
    since = replace(facts, seen=under)
    if len(under) < LEAST_WINDOWS or not since.enough():
        return None
    try:
        base = state.placement(state.plan(record.plan).base_epoch)
    except NotFound:
        return None
    # The old placement as it would have gone on: with the split that fitted the traffic before the change.
    earlier = tuple(seen for seen in facts.history if seen.window.last_step <= under[0].window.first_step)
    shares = await decider.shares(replace(facts, seen=earlier), base)
    before = sum(float(base.rank_load(seen.window.total, shares).max(axis=1).sum()) for seen in since.window)
    after = sum(float(seen.rank_load.max(axis=1).sum()) for seen in since.window)
    saved = nodes_worth(
        facts.world, since.load, Split(base, shares), await decider.split(since, facts.placement),
        facts.settings.cross_node_weight, since.routings,
    )  # fmt: skip
    gain = (1 - (after - saved) / before) * facts.settings.horizon_s if before > 0 else 0.0
    key = state.keys.history(record.epoch)
    await term.apply(put(key, encode(replace(record, measured_gain_s=gain)), state.unchanged(key)))
    return gain


async def prune(state: GroupState, term: Term, clock: Clock, kept: int) -> int:
    """Forget what is older than the newest `kept` epochs, plans and migrations; returns how many keys were named.

    The oldest epoch that is kept is one whose placement is stored whole, so that every kept epoch can be rebuilt.
    """
    ops = [*_old_epochs(state, kept), *_old_work(state, kept), *_old_moves(state, clock.now())]
    for at in range(0, len(ops), _OPS_AT_ONCE):
        await term.apply(Transaction((), tuple(ops[at : at + _OPS_AT_ONCE])))
    return len(ops)


def _old_epochs(state: GroupState, kept: int) -> list[Op]:
    pointer, histories = state.epoch(), state.histories()
    if pointer is None or len(histories) <= kept:
        return []
    oldest = max((e for e, h in histories.items() if h.full and e <= pointer.epoch - kept), default=None)
    if oldest is None:
        return []
    ops: list[Op] = [Delete(state.keys.history(epoch)) for epoch in histories if epoch < oldest]
    needed = {h.digest for e, h in histories.items() if e >= oldest and h.full}
    stored = {
        kv.key.removeprefix(state.keys.placements).split("/")[0] for kv in state.mirror.items(state.keys.placements)
    }
    return [*ops, *(DeletePrefix(state.keys.placement(digest)) for digest in sorted(stored - needed))]


def _old_work(state: GroupState, kept: int) -> list[Op]:
    keys = state.keys
    ended = [m for m in state.migrations() if m.state in FINAL]
    gone = ended[: max(0, len(ended) - kept)]
    ops: list[Op] = []
    for migration in gone:
        ops += [
            Delete(keys.migration(migration.id)),
            DeletePrefix(keys.waves(migration.id)),
            DeletePrefix(keys.acks(migration.id)),
        ]
    in_use = {m.plan for m in state.migrations()} - {m.plan for m in gone}
    idle = [p for p in state.plans() if p.id not in in_use and p.state is not PlanState.PROPOSED]
    for plan in idle[: max(0, len(idle) - kept)]:
        ops += [Delete(keys.plan(plan.id)), DeletePrefix(keys.plan_parts(plan.id))]
    return ops


def _old_moves(state: GroupState, now: float) -> list[Op]:
    return [Delete(state.keys.moves(m.migration, m.wave)) for m in state.moves() if m.at < now - _HOUR_S]
