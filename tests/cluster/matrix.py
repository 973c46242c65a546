"""Everything that the crash tests do, on every point and node: `python -m tests.cluster.matrix [--only WORD]... [--out FILE]`.

Every crash point of leader and agents, of both nodes, killed and stopped; leader and agents at once; leader, agents and
etcd stopped or killed with a wave held in each state; the lost reply of each kind of write. Takes some minutes: `make
test` runs a part of it. Prints one line a scenario with its outcome, and ends with 1 if one did not come to rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from api.supervise import Restart
from eplane.migration import MigrationState
from tests.cluster import scenarios as do
from tests.cluster.checks import at_rest
from tests.cluster.rig import CONTROLLERS, NODES, TTL_S, Cluster, crashes, until
from tests.cluster.wire import LossyWire
from tests.etcd_process import EtcdProcess

LEADER = (*do.FORWARD["controller"], *do.ABORT["controller"])
AGENT = (*do.FORWARD["agent"], *do.ABORT["agent"])
DONE, STOPPED, ABORTED = MigrationState.DONE, MigrationState.STOPPED, MigrationState.ABORTED
# What identifies a write on its way to etcd.
REPLIES = {
    "the begin of a migration": b'"EXECUTING"',
    "a wave's next state": b'"VERIFIED"',
    "a cutover": b'"SWITCHING"',
    "a migration's end": b'"DONE"',
    "the ack VERIFIED": b"/VERIFIED/n0",
    "the ack SWITCHED": b"/SWITCHED/n1",
    "the ack CLEAN": b"/CLEAN/n0",
}


@dataclass(frozen=True, slots=True)
class Bench:
    cluster: Cluster
    wire: LossyWire


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run` brings the group to rest again, with everything checked, and says how the migrations ended."""

    name: str
    run: Callable[[Bench], tuple[MigrationState, ...]]
    expects: frozenset[MigrationState]


def _both(bench: Bench) -> tuple[MigrationState, ...]:
    return do.migrate(bench.cluster), do.migrate_and_abort(bench.cluster)


def _killed(actor: str) -> Callable[[Bench], tuple[MigrationState, ...]]:
    def run(bench: Bench) -> tuple[MigrationState, ...]:
        points = _arm(bench, actor, "kill")
        ended = _both(bench)
        _must_be_empty(do.not_passed(bench.cluster, actor, points))
        return ended

    return run


def _killed_together(bench: Bench) -> tuple[MigrationState, ...]:
    points = {actor: _arm(bench, actor, "kill") for actor in ("controller", "agent")}
    ended = _both(bench)
    for actor, armed in points.items():
        _must_be_empty(do.not_passed(bench.cluster, actor, armed))
    return ended


def _stopped(actor: str, successors: bool) -> Callable[[Bench], tuple[MigrationState, ...]]:
    def run(bench: Bench) -> tuple[MigrationState, ...]:
        points = _arm(bench, actor, "stop", Restart.NEVER if successors else Restart.ALWAYS)
        try:
            with do.going_on(bench.cluster, successors):
                ended = _both(bench)
                if successors:
                    until(lambda: _old_lives(bench) is not None, "the end of the old lives")
        finally:
            if successors:
                do.drop_successors(bench.cluster)
        _must_be_empty(do.not_passed(bench.cluster, actor, points))
        return ended

    return run


def _old_lives(bench: Bench) -> bool | None:
    """Whether the first life of each node has ended as one that was taken over."""
    states = bench.cluster.supervisor.states()
    return True if all(states[n].last_code == 75 and not states[n].running for n in NODES) else None


def _stopped_in(state: str) -> Callable[[Bench], tuple[MigrationState, ...]]:
    at = {"STAGING": do.begun_and_held, "SWITCHING": do.cut_and_held}[state]
    return lambda bench: (do.stop_leader_past_its_ttl(bench.cluster, at),)


def _etcd_hangs(bench: Bench) -> tuple[MigrationState, ...]:
    cluster = bench.cluster
    migration = do.cut_and_held(cluster)
    cluster.etcd.pause()
    time.sleep(2 * TTL_S)
    cluster.etcd.resume()
    cluster.hold_switch.unlink()
    outcome = cluster.ended(migration)
    at_rest(cluster)
    return (outcome,)


def _etcd_killed_in_staging(bench: Bench) -> tuple[MigrationState, ...]:
    cluster = bench.cluster
    migration = do.begun_and_held(cluster)
    cluster.etcd.kill()
    time.sleep(1.5 * TTL_S)
    cluster.etcd.start()
    cluster.hold_file.unlink()
    outcome = cluster.ended(migration)
    at_rest(cluster)
    return (outcome,)


def _aborted_half_way(bench: Bench) -> tuple[MigrationState, ...]:
    do.arm_controllers(bench.cluster, do.ABORT["controller"], "kill")
    return (do.aborted_half_way(bench.cluster),)


def _stand_in(bench: Bench) -> tuple[MigrationState, ...]:
    outcome, code = do.agent_goes_on_after_its_successor(bench.cluster)
    if code != 75:
        raise RuntimeError(f"the old life ended with {code}")
    return (outcome,)


def _lost(needle: bytes, silent_s: float) -> Callable[[Bench], tuple[MigrationState, ...]]:
    def run(bench: Bench) -> tuple[MigrationState, ...]:
        bench.wire.lose(needle, silent_s)
        outcome = do.migrate(bench.cluster)
        if not bench.wire.lost.is_set():
            raise RuntimeError(f"no write held {needle!r}")
        return (outcome,)

    return run


def _arm(bench: Bench, actor: str, kind: str, restart: Restart = Restart.ALWAYS) -> tuple[str, ...]:
    if actor == "controller":
        do.arm_controllers(bench.cluster, LEADER, kind)
        return LEADER
    do.arm_agents(bench.cluster, do.on_both(*AGENT), kind, restart)
    return AGENT


def _must_be_empty(points: list[str]) -> None:
    if points:
        raise RuntimeError(f"nobody passed {', '.join(points)}")


def matrix() -> list[Scenario]:
    done, both = frozenset({DONE}), frozenset({DONE, ABORTED})
    found = [
        Scenario("leader killed at every point", _killed("controller"), both),
        Scenario("agents killed at every point, both nodes", _killed("agent"), both),
        Scenario("leader and agents killed at every point, at once", _killed_together, both),
        Scenario("leader stopped at every point, goes on after its successor", _stopped("controller", False), both),
        Scenario("agents stopped at every point past their TTL, go on", _stopped("agent", False), both),
        Scenario("agents stopped at every point, go on after successors", _stopped("agent", True), both),
        Scenario("leader stopped past its TTL in STAGING, goes on", _stopped_in("STAGING"), done),
        Scenario("leader stopped past its TTL in SWITCHING, goes on", _stopped_in("SWITCHING"), done),
        Scenario("agent stopped past its TTL in STAGING", lambda b: (do.agent_stopped_past_its_ttl(b.cluster),), done),
        Scenario("agent stopped in SWITCHING, goes on after its successor", _stand_in, done),
        Scenario(
            "agent stopped past a wave's deadline",
            lambda b: (do.stage_deadline_with_an_agent_away(b.cluster),),
            frozenset({ABORTED}),
        ),
        Scenario("etcd killed in STAGING", _etcd_killed_in_staging, done),
        Scenario("etcd killed in SWITCHING", lambda b: (do.etcd_killed_in_switching(b.cluster),), done),
        Scenario("etcd hangs in SWITCHING", _etcd_hangs, done),
        Scenario("aborted half way, leader killed over it", _aborted_half_way, frozenset({STOPPED})),
    ]
    for name, needle in REPLIES.items():
        found.append(Scenario(f"reply lost: {name}", _lost(needle, 0.4), done))
        found.append(Scenario(f"reply lost, silent past the TTL: {name}", _lost(needle, 2 * TTL_S), done))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="scenarios whose name holds this; repeatable")
    parser.add_argument("--out", type=Path, help="results as JSON")
    args = parser.parse_args()
    chosen = [scenario for scenario in matrix() if any(word in scenario.name for word in args.only or [""])]
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="eplane-matrix-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        armed = {"c": crashes(folder / "marks", "controller", do.ADOPTION, "kill")}
        with (
            EtcdProcess(folder / "etcd") as etcd,
            LossyWire(etcd.client_port) as wire,
            Cluster(folder, etcd, crash=armed, port=wire.port) as cluster,
        ):
            _must_be_empty(do.not_passed(cluster, "controller", do.ADOPTION))
            for scenario in chosen:
                results.append(_run(scenario, Bench(cluster, wire)))
                if args.out:
                    args.out.write_text(json.dumps(results, indent=1))
                if not results[-1]["ok"]:
                    _show(cluster)
                    break
    return 0 if len(results) == len(chosen) and all(result["ok"] for result in results) else 1


def _run(scenario: Scenario, bench: Bench) -> dict[str, object]:
    began = time.monotonic()
    before = {name: state.restarts for name, state in bench.cluster.supervisor.states().items()}
    try:
        ended = scenario.run(bench)
        ok = set(ended) == set(scenario.expects)
        said = ", ".join(state.value for state in ended)
    except Exception:
        ok, said = False, traceback.format_exc()
    lasted = time.monotonic() - began
    pointer = bench.cluster.see().pointer
    epoch = pointer.epoch if pointer else None
    states = bench.cluster.supervisor.states()
    restarts = sum(max(0, states[name].restarts - before.get(name, 0)) for name in states)
    print(f"{'ok    ' if ok else 'FAILED'} {lasted:6.1f} s  epoch {epoch}  {scenario.name}: {said}", flush=True)
    return {"name": scenario.name, "ok": ok, "ended": said, "seconds": round(lasted, 1), "restarts": restarts}


def _show(cluster: Cluster) -> None:
    for name in (*CONTROLLERS, *NODES):
        print(f"--- {name}\n{cluster.supervisor.log_tail(name, 25)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
