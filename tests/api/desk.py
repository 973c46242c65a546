"""A small desk of one group, as the contract of the API describes it: state that changes and refuses as the real one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eplane.errors import Conflict, Invalid, NotFound, NotLeader, RefusedByGoal, StoreUnavailable

MODES = ("off", "observe", "propose", "auto")
LEADER_URL = "http://127.0.0.1:7071"


class SmallDesk:
    """Two ranks, one layer, three experts; one plan `p1` at epoch 3. Writes down every change it makes."""

    def __init__(self) -> None:
        self.leader: str | None = None
        self.leads = True
        self.epoch = 3
        self.mode = "propose"
        self.paused = False
        self.end_of_migrations = "DONE"
        self.no_plan: str | None = None
        self.refuses: str | None = None
        self.down = False
        self.breaks = False
        self.recorded = 1
        self.layers = 1
        self.settings: dict[str, Any] = {"policy": "eplane", "interval_s": 3.0}
        self.plans_by_id: dict[str, dict[str, Any]] = {"p1": self._plan("p1")}
        self.migrations_by_id: dict[str, dict[str, Any]] = {}
        self.changes: list[tuple[Any, ...]] = []

    def _plan(self, name: str, kind: str = "rebalance") -> dict[str, Any]:
        predicted = {
            "balancedness_before": 0.6,
            "balancedness_after": 0.9,
            "gain_s": 1.5,
            "cost_s": 0.2,
            "bytes": 2048,
            "moves": 2,
        }
        return {
            "id": name,
            "group": "g",
            "world": "w",
            "base_epoch": self.epoch,
            "kind": kind,
            "state": "PROPOSED",
            "policy": "eplane",
            "reason": "load is tilted",
            "actor": "someone",
            "created_at": 1.7e9,
            "waves": [{"number": 0, "bytes": 2048}],
            "predicted": predicted,
            "decisions": [{"goal": "worth", "ruling": "YES", "sentence": "gains 1.5 s, costs 0.2 s"}],
        }

    def _lead(self, *change: Any) -> None:
        if self.down:
            raise StoreUnavailable("no endpoint answers")
        if self.breaks:
            raise KeyError("a defect")
        if not self.leads:
            raise NotLeader(self.leader)
        self.changes.append(change)

    async def status(self) -> Any:
        return {
            "group": "g",
            "mode": self.mode,
            "paused": self.paused,
            "leader": {"id": "c0", "url": LEADER_URL, "epoch": {"cluster": 1, "revision": 7}},
            "world": {"world": "w", "ranks": 2},
            "epoch": self.epoch,
            "digest": "00ff00ff00ff00ff",
            "balancedness": {"now": 0.71, "mean": float("nan"), "per_layer": [0.71]},
            "verdict": {"at": 1.7e9, "kind": "waiting", "sentence": "the load is level enough"},
            "migration": None,
            "nodes": [{"node": "n0", "ranks": [0, 1], "agent": "present"}],
            "agents": "1/1",
        }

    async def load(self) -> Any:
        rows = range(self.layers)
        load, ranks = [[5.0 + i, 3.0, 2.0] for i in rows], [[7.0 + i, 3.0] for i in rows]
        return {"windows": 1, "load": load, "rank_load": ranks, "complete": True}

    async def windows(self, since_step: int = -1) -> Any:
        entry = {"world": "w", "digest": "00ff00ff00ff00ff", "load": [[5.0, 3.0, 2.0]], "rank_load": [[7.0, 3.0]]}
        ends = [8 * (number + 1) for number in range(self.recorded)]
        return [{**entry, "first_step": end - 8, "last_step": end} for end in ends if end > since_step]

    async def recording(self, since_step: int = -1, world: str | None = None) -> Any:
        found = await self.windows(since_step if world in (None, "w") else -1)
        if not found:
            return None
        steps = {name: np.array([w[name] for w in found]) for name in ("first_step", "last_step")}
        named = {name: np.array([w[name] for w in found]) for name in ("world", "digest")}
        return {"load": np.array([w["load"] for w in found], dtype=np.int32), **steps, **named}

    async def placement(self, epoch: int | None = None) -> Any:
        if epoch is not None and epoch > self.epoch:
            raise NotFound(f"there is no epoch {epoch}")
        return {
            "epoch": epoch or self.epoch,
            "digest": "00ff00ff00ff00ff",
            "ranks": 2,
            "p2l": [[0, 1, 2, -1]] * self.layers,
        }

    async def plans(self) -> Any:
        return list(self.plans_by_id.values())

    async def plan(self, plan_id: str) -> Any:
        if plan_id not in self.plans_by_id:
            raise NotFound(f"there is no plan {plan_id}")
        return self.plans_by_id[plan_id]

    async def migrations(self) -> Any:
        return [{**m, "waves": len(m.get("waves", ()))} for m in self.migrations_by_id.values()]

    async def migration(self, migration_id: str) -> Any:
        if migration_id not in self.migrations_by_id:
            raise NotFound(f"there is no migration {migration_id}")
        found = self.migrations_by_id[migration_id]
        if found["state"] == "RUNNING":
            found["looks"] = found.get("looks", 0) + 1
            if found["looks"] > 1:
                found["state"] = found["ends"]
        return found

    async def nodes(self) -> Any:
        return [{"node": "n0", "ranks": [0, 1]}]

    async def history(self, limit: int) -> Any:
        more = {"at": 1.7e9, "kind": "wave", "moves": 2, "bytes": 4096, "actor": "someone", "reason": "tilted"}
        return [{"epoch": e, **more} for e in range(self.epoch, -1, -1)][:limit]

    async def goals(self) -> Any:
        return [{"goal": "worth", "ruling": "NO", "sentence": "gains less than it costs"}]

    async def anomalies(self) -> Any:
        return []

    async def explain(self, layer: int, expert: int) -> Any:
        if layer > 0:
            raise NotFound(f"there is no layer {layer}")
        return {"layer": layer, "expert": expert, "sentence": f"expert {expert} is on rank 0 since epoch 1"}

    async def config(self) -> Any:
        return self.settings

    async def propose(self, policy: str | None, actor: str, reason: str, options: Mapping[str, Any]) -> Any:
        self._lead("propose", policy, actor, reason, dict(options))
        if self.refuses:
            raise RefusedByGoal(self.refuses)
        if self.no_plan:
            return self.no_plan
        plan = self._plan(f"p{len(self.plans_by_id) + 1}")
        self.plans_by_id[plan["id"]] = plan
        return plan

    async def execute(self, plan_id: str, if_match_epoch: int, actor: str, reason: str) -> Any:
        self._lead("execute", plan_id, if_match_epoch, actor, reason)
        plan = await self.plan(plan_id)
        if plan["base_epoch"] != self.epoch:
            raise Conflict(f"plan {plan_id} is stale: it starts from epoch {plan['base_epoch']}")
        waves = [
            {"number": 1, "epoch": self.epoch + 1, "state": "STAGING", "moves": 2, "bytes": 2048, "verified": ["n0"]}
        ]
        name = f"m{len(self.migrations_by_id) + 1}"
        migration = {
            "id": name,
            "plan": plan_id,
            "state": "RUNNING",
            "ends": self.end_of_migrations,
            "waves": waves,
            "live": 0,
        }
        self.migrations_by_id[migration["id"]] = migration
        return dict(migration)

    async def discard(self, plan_id: str, actor: str, reason: str) -> Any:
        self._lead("discard", plan_id, actor, reason)
        return {**await self.plan(plan_id), "state": "DISCARDED"}

    async def abort(self, migration_id: str, actor: str, reason: str) -> Any:
        self._lead("abort", migration_id, actor, reason)
        found = await self.migration(migration_id)
        found.update(state="STOPPING", ends="ABORTED")
        found["state"] = "ABORTED"
        return found

    async def rollback(self, to_epoch: int, actor: str, reason: str) -> Any:
        self._lead("rollback", to_epoch, actor, reason)
        if to_epoch >= self.epoch:
            raise Conflict(f"epoch {to_epoch} is not in the past")
        plan = self._plan(f"p{len(self.plans_by_id) + 1}", "rollback")
        self.plans_by_id[plan["id"]] = plan
        return plan

    async def pause(self, actor: str, reason: str) -> Any:
        self._lead("pause", actor, reason)
        self.paused = True
        return {"paused": True}

    async def resume(self, actor: str, reason: str) -> Any:
        self._lead("resume", actor, reason)
        self.paused = False
        return {"paused": False}

    async def set_mode(self, mode: str, actor: str, reason: str) -> Any:
        self._lead("set_mode", mode, actor, reason)
        self.mode = mode
        return {"mode": mode}

    async def set_settings(self, patch: Mapping[str, Any], actor: str, reason: str) -> Any:
        self._lead("set_settings", dict(patch), actor, reason)
        for name in patch:
            if name not in self.settings:
                raise Invalid(name, "is no setting")
        self.settings = {**self.settings, **patch}
        return self.settings

    async def ingest(self, body: Mapping[str, Any]) -> Any:
        self._lead("ingest", dict(body))
        return {"accepted": 1, "refused": [], "shares": None, "want_describe": False, "window_after": 1}


class SmallController:
    """One group `g` and its desk."""

    def __init__(self) -> None:
        self.small = SmallDesk()

    def groups(self) -> Sequence[str]:
        return ("g",)

    def desk(self, group: str) -> SmallDesk:
        return self.small

    def is_leader(self, group: str) -> bool:
        return self.small.leads

    def leader_url(self, group: str) -> str | None:
        return LEADER_URL if self.small.leads else self.small.leader

    def metrics_text(self) -> bytes:
        return b"# TYPE eplane_epoch gauge\neplane_epoch 3.0\n"
