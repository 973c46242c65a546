"""Transfers: pulled, bounded in time and rate, pinned at the source, and never taken for another bundle."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from eplane.errors import TransferError
from runtime import transfer
from runtime.cells import CellPool, CellState
from runtime.link.manifest import bundle_digest
from runtime.link.messages import decode, encode
from runtime.transfer import BundleRequest, TokenBucket, TransferServer, bundle_lookup, fetch
from tests.moving.rig import all_digests, bundle, manifest

WORLD = "0123456789abcdef"
ROWS = 1_500_000  # 6 MB: many chunks, and more than the sockets hold.
DIGESTS = all_digests(1, 2, ROWS)
NEVER = threading.Event()


@pytest.fixture
def source() -> Iterator[tuple[CellPool, TransferServer, int]]:
    pool = CellPool(manifest(ROWS), 3)
    cell = pool.hold(0, 1, bundle(0, 1, ROWS), DIGESTS[0][1])
    server = TransferServer(pool, bundle_lookup(pool, WORLD, DIGESTS))
    yield pool, server, cell
    server.close()


def pull(
    address: str, expert: int = 1, *, digest: str | None = None, world: str = WORLD, rate: float | None = None,
    deadline_s: float = 10.0, cancelled: threading.Event = NEVER,
) -> str:  # fmt: skip
    """Digest of what arrives."""
    buffer = np.zeros(4 * (ROWS + 1), dtype=np.uint8)
    request = BundleRequest(world, 0, expert, digest or DIGESTS[0][expert])
    fetch(address, request, [buffer.data], deadline_s=deadline_s, bucket=TokenBucket(rate), cancelled=cancelled)
    return bundle_digest([buffer.data])


def test_a_bundle_arrives_whole(source: tuple[CellPool, TransferServer, int]) -> None:
    _, server, _ = source
    for _ in range(3):
        assert pull(server.address) == DIGESTS[0][1]


def test_many_receivers_at_once(source: tuple[CellPool, TransferServer, int]) -> None:
    pool, server, cell = source
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(pull(server.address))) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [DIGESTS[0][1]] * 12
    wait_unpinned(pool, cell)


def wait_unpinned(pool: CellPool, cell: int) -> None:
    if pool.state(cell) is CellState.LIVE:
        pool.retire(cell)
    for _ in range(1000):
        if pool.free_if_unpinned(cell):
            return
        time.sleep(0.005)
    raise AssertionError("the source still pins the cell")


@pytest.mark.parametrize(
    "asked", [{"expert": 0}, {"digest": "a" * 32}, {"world": "f" * 16}], ids=["not held", "digest", "world"]
)
def test_what_is_not_here_is_refused(source: tuple[CellPool, TransferServer, int], asked: dict[str, object]) -> None:
    with pytest.raises(TransferError, match="no such bundle"):
        pull(source[1].address, **asked)  # type: ignore[arg-type]


def test_a_cell_is_pinned_while_it_is_sent_and_not_longer(source: tuple[CellPool, TransferServer, int]) -> None:
    pool, server, cell = source
    cancelled = threading.Event()
    ended: list[str] = []

    def slowly() -> None:
        with pytest.raises(TransferError) as caught:
            pull(server.address, rate=1000.0, deadline_s=60.0, cancelled=cancelled)
        ended.append(str(caught.value))

    thread = threading.Thread(target=slowly)
    thread.start()
    for _ in range(2000):
        if pool._pins[cell]:
            break
        time.sleep(0.005)
    pool.retire(cell)
    assert not pool.free_if_unpinned(cell)
    cancelled.set()
    thread.join()
    assert "given up" in ended[0]
    wait_unpinned(pool, cell)


def test_tooth_pin(source: tuple[CellPool, TransferServer, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the pin, a cell is filled anew while it is sent; the receiver's digest sees it."""
    pool, server, cell = source
    monkeypatch.setattr(CellPool, "free_if_unpinned", lambda self, c: (self._free_unpinned(c), True)[1])
    begun, digests = threading.Event(), []
    real = transfer._send_all

    def send(connection: socket.socket, part: memoryview, deadline: float) -> None:
        if begun.is_set():
            time.sleep(0.02)
        begun.set()
        real(connection, part, deadline)

    monkeypatch.setattr(transfer, "_send_all", send)
    thread = threading.Thread(target=lambda: digests.append(pull(server.address)))
    thread.start()
    begun.wait(10)
    pool.retire(cell)
    assert pool.free_if_unpinned(cell)
    for expert in (0, 1, 0):  # The pool has three cells, so one of these is the cell that is being sent.
        pool.write(pool.allocate(0, expert), bundle(0, 0, ROWS))
    thread.join()
    assert digests
    assert digests[0] != DIGESTS[0][1]


def test_a_rate_limit_holds_a_bundle_back() -> None:
    bucket, waits = TokenBucket(1000.0), []

    class Spy(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            return False

    for _ in range(5):
        bucket.take(bucket.portion, Spy())
    assert bucket.portion == 100
    assert len(waits) == 4, "the first portion is free"
    assert 0.25 < max(waits) <= 0.4, "five portions of 0.1 s each, none of which was really waited for"
    assert TokenBucket(None).portion == transfer.CHUNK
    assert TokenBucket(2000.0).seconds(500) == 0.25


def test_a_deadline_ends_a_slow_transfer(source: tuple[CellPool, TransferServer, int]) -> None:
    pool, server, cell = source
    with pytest.raises(TransferError, match="deadline"):
        pull(server.address, rate=1000.0, deadline_s=0.3)
    wait_unpinned(pool, cell)


def served_by(behave: Callable[[socket.socket, dict[str, object]], None]) -> str:
    """A source that answers one connection in its own way; its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, listener, contextlib.suppress(OSError):  # The receiver may hang up first.
            head = transfer._receive_exactly(connection, 4)
            behave(connection, decode(transfer._receive_exactly(connection, int.from_bytes(head, "big"))))

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def of_another(connection: socket.socket, asked: dict[str, object]) -> None:
    connection.sendall(encode({"request": "0" * 16, "bytes": 4 * (ROWS + 1)}) + bundle(0, 0, ROWS))


def of_another_size(connection: socket.socket, asked: dict[str, object]) -> None:
    connection.sendall(encode({"request": asked["request"], "bytes": 8}))


def half(connection: socket.socket, asked: dict[str, object]) -> None:
    connection.sendall(encode({"request": asked["request"], "bytes": 4 * (ROWS + 1)}) + bundle(0, 1, ROWS)[:1000])


def noise(connection: socket.socket, asked: dict[str, object]) -> None:
    connection.sendall(b"\xff\xff\xff\xff")


def garbage(connection: socket.socket, asked: dict[str, object]) -> None:
    connection.sendall((4).to_bytes(4, "big") + b"nope")


@pytest.mark.parametrize(
    ("behave", "sentence"),
    [
        (of_another, "another request"),
        (of_another_size, "the bundle has"),
        (half, "closed the connection early"),
        (noise, "over the limit"),
        (garbage, "not valid JSON"),
        (lambda c, a: None, "closed"),
    ],
)
def test_a_source_that_misbehaves_is_a_transfer_error(
    behave: Callable[[socket.socket, dict[str, object]], None], sentence: str
) -> None:
    with pytest.raises(TransferError, match=sentence):
        pull(served_by(behave))


def test_no_source_at_all() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    for bad in (address, "127.0.0.1:x", "nowhere", ""):
        with pytest.raises(TransferError):
            pull(bad)


def test_tooth_request_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the fresh id an answer to another request would be taken; only the digest would still see it."""
    monkeypatch.setattr(transfer, "_check_answer", lambda *_: None)
    assert pull(served_by(of_another)) == DIGESTS[0][0] != DIGESTS[0][1]


def test_a_source_outlives_bad_requests(source: tuple[CellPool, TransferServer, int]) -> None:
    _, server, _ = source
    host, port = server.address.split(":")
    for noise_bytes in (b"", b"\x00", b"\xff" * 8, encode({"request": "x"}), encode({"world": 5})):
        with (
            socket.create_connection((host, int(port)), timeout=5) as connection,
            contextlib.suppress(OSError),
        ):
            connection.sendall(noise_bytes)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b""
    assert pull(server.address) == DIGESTS[0][1]
