"""Leaders, agents and etcd that die, stand still or are not heard, in the middle of migrations; all processes are real.

Every crash point kills its actor, on both sides of each transition; standing still is tested at the points where it
differs in kind. `python -m tests.cluster.matrix` goes through all points on all nodes, killed and stopped, and more.

The tests share one life of one deployment and come in this order: the first begins with the adoption of the engine's
world. Whatever one does, the engine serves on through all of them, and the history that they make is one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eplane.migration import MigrationState
from tests.cluster.rig import CONTROLLERS, Cluster, crashes
from tests.cluster.scenarios import (
    ABORT,
    ADOPTION,
    FORWARD,
    aborted_half_way,
    ack_reply_lost,
    agent_goes_on_after_its_successor,
    agent_stopped_past_its_ttl,
    arm_agents,
    arm_controllers,
    begun_and_held,
    cutover_reply_lost,
    etcd_killed_in_switching,
    going_on,
    migrate,
    migrate_and_abort,
    not_passed,
    stop_leader_past_its_ttl,
)
from tests.cluster.wire import LossyWire
from tests.etcd_process import EtcdProcess

LEADER_POINTS = (*ADOPTION, *FORWARD["controller"], *ABORT["controller"])
AGENT_POINTS = (*FORWARD["agent"], *ABORT["agent"])
DONE, STOPPED, ABORTED = MigrationState.DONE, MigrationState.STOPPED, MigrationState.ABORTED

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def own_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdProcess]:
    with EtcdProcess(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd


@pytest.fixture(scope="module")
def wire(own_etcd: EtcdProcess) -> Iterator[LossyWire]:
    with LossyWire(own_etcd.client_port) as wire:
        yield wire


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, own_etcd: EtcdProcess, wire: LossyWire) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    armed = {"c": crashes(folder / "marks", "controller", LEADER_POINTS, "kill")}
    with Cluster(folder, own_etcd, crash=armed, port=wire.port) as cluster:
        yield cluster


def test_leaders_killed_before_and_after_each_of_their_transitions(cluster: Cluster) -> None:
    assert migrate(cluster) is DONE
    assert migrate_and_abort(cluster) is ABORTED
    assert not_passed(cluster, "controller", LEADER_POINTS) == []


def test_agents_killed_before_and_after_each_of_their_transitions(cluster: Cluster) -> None:
    arm_agents(cluster, {"n0": AGENT_POINTS[::2], "n1": AGENT_POINTS[1::2]}, "kill")
    assert migrate(cluster) is DONE
    assert migrate_and_abort(cluster) is ABORTED
    assert not_passed(cluster, "agent", AGENT_POINTS) == []


def test_a_leader_that_stood_still_at_its_cutover_goes_on_after_its_successor(cluster: Cluster) -> None:
    points = ("cutover.before", "cutover.after")
    arm_controllers(cluster, points, "stop")
    pids = [cluster.supervisor.pid(name) for name in CONTROLLERS]
    with going_on(cluster) as gone_on:
        assert migrate(cluster) is DONE
    assert not_passed(cluster, "controller", points) == []
    assert len(gone_on) == len(points)
    # Each lost its seat and lives on as a follower.
    assert [cluster.supervisor.pid(name) for name in CONTROLLERS] == pids


def test_a_leader_that_is_stopped_past_its_ttl_in_the_middle_of_a_wave(cluster: Cluster) -> None:
    assert stop_leader_past_its_ttl(cluster, begun_and_held) is DONE


def test_an_agent_that_is_stopped_past_its_ttl(cluster: Cluster) -> None:
    assert agent_stopped_past_its_ttl(cluster) is DONE


def test_an_old_agent_that_goes_on_after_its_successor_commands_nothing_and_ends(cluster: Cluster) -> None:
    assert agent_goes_on_after_its_successor(cluster) == (DONE, 76)


def test_an_abort_half_way_leaves_what_is_live(cluster: Cluster) -> None:
    assert aborted_half_way(cluster) is STOPPED


def test_etcd_killed_while_a_wave_switches(cluster: Cluster) -> None:
    assert etcd_killed_in_switching(cluster) is DONE


def test_the_reply_to_a_cutover_is_lost(cluster: Cluster, wire: LossyWire) -> None:
    before = cluster.see().leader
    assert cutover_reply_lost(cluster, wire, 0.4) is DONE
    assert cluster.see().leader == before


def test_the_reply_to_an_acknowledgement_is_lost(cluster: Cluster, wire: LossyWire) -> None:
    assert ack_reply_lost(cluster, wire) is DONE
