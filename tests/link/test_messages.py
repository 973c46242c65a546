"""Messages of the engine link: each survives its JSON form, and what is no message is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplane.errors import LinkRefused, MessageError
from eplane.fields import Fields
from eplane.placement import Change
from eplane.plan import Identity, LeaderEpoch, Load
from eplane.topology import Capabilities
from runtime.link.fence import LeaderFence
from runtime.link.manifest import BundleManifest, TensorSpec, bundle_digest
from runtime.link.messages import (
    MAX_FRAME,
    Describe,
    Live,
    ManifestReply,
    PlacementReply,
    RankStatus,
    StageCommand,
    Staged,
    StagedState,
    decode,
    encode,
    identity_hash,
)

HEX = "0123456789abcdef"
IDENTITY = Identity(HEX, "m1", 2, 7, HEX[::-1])
LEADER = LeaderEpoch(2**63 + 5, 12)


def over_the_wire(message: dict[str, object]) -> dict[str, object]:
    return decode(encode(message)[4:])


def test_describe_round_trip() -> None:
    described = Describe(
        HEX, "g", 1, "n0", ("n0", "n1"), "tiny", 2, 8, 2, 5, 12, 2, 4096, Capabilities(phases_known=False),
        HEX, None, HEX, "127.0.0.1:99", -1,
    )  # fmt: skip
    assert Describe.from_json(over_the_wire(described.to_json())) == described


@pytest.mark.parametrize("staged", [None, Staged(IDENTITY, StagedState.FAILED, 1, 3, 99, "no source")])
def test_status_round_trip(staged: Staged | None) -> None:
    status = RankStatus(HEX, 3, 17, Live(6, HEX), LEADER, IDENTITY, staged, None, None, False, 3, 2)
    assert RankStatus.from_json(over_the_wire(status.to_json())) == status


def test_stage_round_trip() -> None:
    shares = np.array([[0.25, 0.75]])
    command = StageCommand(
        IDENTITY, LEADER, HEX, (Change(0, 1, -1),), shares, (Load(0, 1, 2, 3),), {0: "a:1", 12: "b:2"}, 1e6
    )
    back = StageCommand.read(Fields(over_the_wire(command.to_json()), "stage", MessageError))
    assert back.shares is not None
    assert (back.shares == shares).all()
    assert (back.identity, back.changes, back.loads, back.peers) == (
        IDENTITY,
        command.changes,
        command.loads,
        command.peers,
    )


def test_placement_and_manifest_round_trip() -> None:
    reply = PlacementReply(HEX, 3, np.array([[0, -1], [1, 0]], dtype=np.int32), np.array([[1.0, 0.0], [1.0, 1.0]]))
    back = PlacementReply.from_json(over_the_wire(reply.to_json()))
    assert (back.p2l == reply.p2l).all()
    assert back.p2l.dtype == np.int32
    manifest = ManifestReply(BundleManifest((TensorSpec("w", "bfloat16", (2, 3)),)), (("a" * 32,), ("b" * 32,)))
    assert ManifestReply.from_json(over_the_wire(manifest.to_json())) == manifest
    assert manifest.manifest.bundle_bytes == 12


GOOD = StageCommand(IDENTITY, LEADER, HEX, (Change(0, 1, 2),), None, (Load(0, 1, 2, 0),), {0: "a:1"}, None).to_json()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("identity", None),
        ("identity", {**IDENTITY.to_json(), "wave": -1}),
        ("identity", {**IDENTITY.to_json(), "digest": "short"}),
        ("leader_epoch", {"cluster": 1}),
        ("leader_epoch", {"cluster": True, "revision": 3}),
        ("base_digest", 7),
        ("changes", [[1, 2]]),
        ("changes", [[1, 2, 2**40]]),
        ("changes", "all"),
        ("shares", [[0.5], [0.5, 0.5]]),
        ("shares", [["a"]]),
        ("shares", [[float("nan")]]),
        ("loads", [{"layer": 0}]),
        ("peers", {"x": "a:1"}),
        ("peers", ["a:1"]),
        ("peers", {"0": 5}),
        ("bytes_per_s", 0),
        ("bytes_per_s", float("inf")),
    ],
)
def test_a_bad_field_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(MessageError) as caught:
        StageCommand.read(Fields({**GOOD, field: value}, "stage", MessageError))
    assert field in str(caught.value)


@settings(max_examples=150, deadline=None)
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(GOOD)), inner, max_size=8),
                    max_leaves=12))  # fmt: skip
def test_noise_is_refused_and_never_crashes(value: object) -> None:
    for read in (Describe.from_json, RankStatus.from_json, PlacementReply.from_json, ManifestReply.from_json):
        with pytest.raises(MessageError):
            read(value)
    with pytest.raises(MessageError):
        StageCommand.read(Fields(value, "stage", MessageError))


def test_frames_have_a_limit_and_must_be_objects() -> None:
    with pytest.raises(MessageError, match="limit"):
        encode({"x": "y" * MAX_FRAME})
    for body in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000):
        with pytest.raises(MessageError):
            decode(body)
    frame = encode({"a": 1})
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    assert json.loads(frame[4:]) == {"a": 1}


def test_the_hash_of_an_identity_depends_on_all_of_it() -> None:
    names = {
        identity_hash(IDENTITY),
        identity_hash(Identity("f" * 16, "m1", 2, 7, HEX[::-1])),
        identity_hash(Identity(HEX, "m2", 2, 7, HEX[::-1])),
        identity_hash(Identity(HEX, "m1", 3, 7, HEX[::-1])),
        identity_hash(Identity(HEX, "m1", 2, 8, HEX[::-1])),
        identity_hash(Identity(HEX, "m1", 2, 7, HEX)),
    }
    assert len(names) == 6
    assert 0 not in names
    assert all(-(2**63) <= name < 2**63 for name in names)


def test_a_digest_is_over_all_bytes_in_order() -> None:
    assert bundle_digest([b"ab", b"c"]) == bundle_digest([b"abc"])
    assert bundle_digest([b"abc"]) != bundle_digest([b"acb"])
    assert len(bundle_digest([b""])) == 32


def test_the_fence_never_falls() -> None:
    fence = LeaderFence()
    fence.hear(LeaderEpoch(1, 50))
    assert fence.current is None, "hearing of a leader is no command"
    fence.check(LeaderEpoch(1, 5))
    fence.check(LeaderEpoch(1, 5))
    fence.hear(LeaderEpoch(1, 8))
    fence.hear(LeaderEpoch(1, 7))
    fence.hear(LeaderEpoch(2, 99))
    assert fence.current == LeaderEpoch(1, 8)
    for late in (LeaderEpoch(1, 7), LeaderEpoch(2, 100)):
        with pytest.raises(LinkRefused, match=r"older|adopt"):
            fence.check(late)
    fence.adopt(LeaderEpoch(2, 3))
    for late in (LeaderEpoch(1, 8), LeaderEpoch(2, 2)):
        with pytest.raises(LinkRefused):
            fence.adopt(late)
    fence.adopt(LeaderEpoch(1, 9))
    assert fence.current == LeaderEpoch(1, 9)
