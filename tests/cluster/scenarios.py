"""What is done to a running group, one function each. Each ends with the group at rest and everything checked.

Crash points are armed once each (a mark file), for every process of their actor: the process that passes the point ends
or stands still there, another takes over, and so on through all points, while the migration goes its way. The same
functions serve the tests (every point killed; standing still at the points of each kind) and `tests.cluster.matrix`,
which goes through all of it.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace

from api.supervise import EventKind, Restart
from eplane.errors import StackError
from eplane.migration import MigrationState
from tests.cluster.checks import at_rest
from tests.cluster.rig import CONTROLLERS, NODES, TTL_S, Cluster, Stored, crashes, until
from tests.cluster.wire import LossyWire

SIDES = ("before", "after")
ADOPTION = tuple(f"adopt.{side}" for side in SIDES)
FORWARD = {
    "controller": tuple(f"{point}.{side}" for point in ("plan", "stage", "cutover", "finish") for side in SIDES),
    "agent": tuple(f"{point}.{side}" for point in ("stage", "verified", "arm", "switched", "clean") for side in SIDES),
}
ABORT = {actor: tuple(f"abort.{side}" for side in SIDES) for actor in FORWARD}


def migrate(cluster: Cluster) -> MigrationState:
    """Plan, execute, and see it through."""
    outcome = cluster.ended(cluster.begin())
    at_rest(cluster)
    return outcome


def migrate_and_abort(cluster: Cluster) -> MigrationState:
    """Begin a migration whose bundles do not arrive, abort it, and see it through."""
    cluster.hold_file.touch()
    try:
        migration = cluster.begin()
        cluster.wave_in(migration, "STAGING")
        cluster.abort(migration)
        outcome = cluster.ended(migration)
    finally:
        cluster.hold_file.unlink()
    at_rest(cluster)
    return outcome


# --- every point of an actor, killed or stopped ---


def arm_agents(
    cluster: Cluster, points: Mapping[str, tuple[str, ...]], kind: str, restart: Restart = Restart.ALWAYS
) -> None:
    """New lives of both agents that end or stand still once at each of the points of their node."""
    marks = {}
    for node in NODES:
        folder = cluster.marks / node
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        marks[node] = crashes(folder, "agent", points[node], kind)
    cluster.restart(*NODES, restart=restart, **marks)


def on_both(*points: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(NODES, points)


def arm_controllers(cluster: Cluster, points: tuple[str, ...], kind: str) -> None:
    for mark in cluster.marks.glob("controller.*"):
        mark.unlink()
    cluster.restart(*CONTROLLERS, c=crashes(cluster.marks, "controller", points, kind))


def not_passed(cluster: Cluster, actor: str, points: Iterable[str]) -> list[str]:
    """Points that ended or stopped nobody, of any node."""
    gone = {mark.name for mark in cluster.marks.rglob(f"{actor}.*")}
    return [point for point in points if f"{actor}.{point}" not in gone]


@contextmanager
def going_on(cluster: Cluster, successors: bool = False) -> Iterator[list[str]]:
    """Lets processes that stand still at a crash point go on, but only after their place was lost to another.

    A controller goes on when another leads. An agent goes on when its presence has run out; with `successors`, when a
    second life of it, started here, has taken its node over. Yields the names of those that went on.
    """
    gone_on: list[str] = []
    end = threading.Event()
    failed: list[BaseException] = []

    def tend() -> None:
        try:
            while not end.wait(0.05):
                for name, state in cluster.supervisor.states().items():
                    if state.running and cluster.is_stopped(name):
                        _replaced(cluster, name, successors and name not in CONTROLLERS)
                        with suppress(StackError):
                            cluster.signal(name, signal.SIGCONT)
                        gone_on.append(name)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=tend)
    thread.start()
    try:
        yield gone_on
    finally:
        end.set()
        thread.join()
        if failed:
            raise failed[0]


def _replaced(cluster: Cluster, name: str, by_successor: bool) -> None:
    """Wait until the place of `name` is another's."""
    node = name.partition(".")[0]
    if by_successor:
        was = cluster.see().agents.get(node)
        successor = f"{node}.{sum(known.startswith(node) for known in cluster.supervisor.states())}"
        # Two lives that are both started again would take the node from each other for ever.
        cluster.supervisor.start(replace(cluster.spec(successor), restart=Restart.NEVER))
        until(lambda: _newer(cluster.now(), node, was.incarnation if was else ""), f"a successor of {name}")
        return

    def lost() -> bool:
        now = cluster.now()
        if now is None:
            return False
        if name in CONTROLLERS:
            return now.leader is not None and now.leader[0] != name
        return node not in now.agents

    until(lost, f"the place of {name} free")


def _newer(now: Stored | None, node: str, incarnation: str) -> bool:
    found = None if now is None else now.agents.get(node)
    return found is not None and found.incarnation != incarnation


# --- single outages ---


def stop_leader_past_its_ttl(cluster: Cluster, at: Callable[[Cluster], str]) -> MigrationState:
    """The leader stands still while a migration is where `at` leaves it; its successor finishes; then it goes on."""
    migration = at(cluster)
    leader = cluster.see().leader
    assert leader is not None
    name, seat = leader
    pid = cluster.signal(name, signal.SIGSTOP)
    until(lambda: _other_seat(cluster.now(), seat), "a successor")
    for held in (cluster.hold_file, cluster.hold_switch):
        held.unlink(missing_ok=True)
    outcome = cluster.ended(migration)
    cluster.signal(name, signal.SIGCONT)
    at_rest(cluster)
    # It lost its seat, and lives on as a follower.
    assert cluster.supervisor.pid(name) == pid
    return outcome


def _other_seat(now: Stored | None, seat: int) -> bool:
    return now is not None and now.leader is not None and now.leader[1] != seat


def begun_and_held(cluster: Cluster) -> str:
    """A migration whose first wave is STAGING and stays so while the hold file is there."""
    cluster.hold_file.touch()
    migration = cluster.begin()
    cluster.wave_in(migration, "STAGING")
    return migration


def cut_and_held(cluster: Cluster) -> str:
    """A migration whose first wave is SWITCHING and stays so while the file `hold_switch` is there."""
    cluster.hold_switch.touch()
    migration = cluster.begin()
    cluster.wave_in(migration, "SWITCHING")
    return migration


def cutover_reply_lost(cluster: Cluster, wire: LossyWire, silent_s: float) -> MigrationState:
    """The store makes the epoch, and its leader never hears of it; nothing comes back for `silent_s`."""
    wire.lose(b'"SWITCHING"', silent_s)
    outcome = cluster.ended(cluster.begin())
    assert wire.lost.is_set()
    at_rest(cluster)
    return outcome


def ack_reply_lost(cluster: Cluster, wire: LossyWire) -> MigrationState:
    """An agent's acknowledgement is written, and its agent never hears of it."""
    wire.lose(b"/SWITCHED/n1")
    outcome = cluster.ended(cluster.begin())
    assert wire.lost.is_set()
    at_rest(cluster)
    return outcome


def etcd_killed_in_switching(cluster: Cluster) -> MigrationState:
    """A wave stays SWITCHING while etcd is away for longer than every lease, and goes on by itself afterwards."""
    migration = cut_and_held(cluster)
    cluster.etcd.kill()
    step = cluster.engine()["step"]
    time.sleep(1.5 * TTL_S)
    # The engine does not need it.
    assert cluster.engine()["step"] > step
    cluster.etcd.start()
    assert cluster.see().migration(migration) is not None
    cluster.hold_switch.unlink()
    outcome = cluster.ended(migration)
    at_rest(cluster)
    return outcome


def agent_stopped_past_its_ttl(cluster: Cluster) -> MigrationState:
    """An agent stands still in STAGING, for longer than its lease, and goes on; nobody else took its node."""
    migration = begun_and_held(cluster)
    cluster.signal("n0", signal.SIGSTOP)
    until(lambda: "n0" not in cluster.see().agents, "the end of its lease")
    cluster.hold_file.unlink()
    cluster.signal("n0", signal.SIGCONT)
    outcome = cluster.ended(migration)
    at_rest(cluster)
    return outcome


def agent_goes_on_after_its_successor(cluster: Cluster) -> tuple[MigrationState, int | None]:
    """The agent of n1 stands still while a wave switches; another life of it finishes; then the old one goes on.

    Also returns the exit code that the old life ended with. It is not started again, though its supervisor restarts what
    dies: the life that stood in keeps the node.
    """
    migration = cut_and_held(cluster)
    old = cluster.signal("n1", signal.SIGSTOP)
    was, restarts = cluster.see().agents["n1"].incarnation, cluster.supervisor.state("n1").restarts
    cluster.supervisor.start(replace(cluster.spec("n1.stand-in"), restart=Restart.NEVER))
    until(lambda: _newer(cluster.now(), "n1", was), "the stand-in")
    cluster.hold_switch.unlink()
    outcome = cluster.ended(migration)
    cluster.signal("n1", signal.SIGCONT)
    until(lambda: not cluster.supervisor.state("n1").running, "the end of the old life")
    at_rest(cluster)
    if cluster.supervisor.state("n1").restarts != restarts or not cluster.supervisor.state("n1.stand-in").running:
        raise AssertionError(f"the old life of n1 took its node back: {cluster.supervisor.states()}")
    cluster.supervisor.stop("n1.stand-in")
    cluster.restart("n1")
    return outcome, next(e.code for e in cluster.events if e.pid == old and e.kind is EventKind.ENDED)


def aborted_half_way(cluster: Cluster) -> MigrationState:
    """A wave is live and the next one held when the migration is aborted: what is live stays."""
    migration = cut_and_held(cluster)
    cluster.hold_file.touch()
    cluster.hold_switch.unlink()
    cluster.wave_in(migration, "RETIRED")
    cluster.abort(migration)
    outcome = cluster.ended(migration)
    cluster.hold_file.unlink()
    at_rest(cluster)
    return outcome


def stage_deadline_with_an_agent_away(cluster: Cluster) -> MigrationState:
    """An agent stands still for longer than a wave may stage: the wave is given up, and cleaned once it is back."""
    cluster.change("PATCH", "config", {"settings": {"stage_timeout_s": 3.0}, "reason": "a short deadline"})
    migration = begun_and_held(cluster)
    cluster.signal("n0", signal.SIGSTOP)
    cluster.hold_file.unlink()
    cluster.wave_in(migration, "ABORTED")
    cluster.signal("n0", signal.SIGCONT)
    outcome = cluster.ended(migration)
    cluster.change("PATCH", "config", {"settings": {"stage_timeout_s": 300.0}, "reason": "as it was"})
    at_rest(cluster)
    return outcome


def drop_successors(cluster: Cluster) -> None:
    """Back to one process a node, without crash points."""
    for name in list(cluster.supervisor.states()):
        if "." in name:
            cluster.supervisor.stop(name)
    cluster.restart(*NODES, n0="", n1="")
    until(lambda: set(cluster.see().agents) == set(NODES), "both agents")
