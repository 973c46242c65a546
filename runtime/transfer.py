"""Transfers of bundles between ranks. They are pulled: the receiver asks, the source pins the cell and answers.

The default way is TCP (TransferServer, fetch). One connection carries one bundle: a request frame with a fresh id,
an answer frame that repeats the id, then the bytes in manifest order. A connection that broke, timed out or answered
another id is closed, so late bytes can never be taken for a later bundle. The receiver limits the rate.

PairedTransfer is the way for device memory (NCCL, HCCL): both ends enter a paired send and receive with a fresh tag.
It is exercised on gloo here and unverified on devices.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from eplane.errors import GenerationEnded, LinkError, MessageError, TransferError
from eplane.fields import Fields
from runtime.cells import CellPool
from runtime.link.messages import Json, decode, encode

CHUNK = 256 * 1024
MAX_REQUEST = 4096
SOCKET_BYTES = 512 * 1024  # Bounds what lies between the two ends, so that a rate limit is felt at the source.
POLL_S = 0.2
MAX_DEADLINE_S = 3600.0
_log = logging.getLogger(__name__)

Lookup = Callable[[str, int, int, str], int | None]
"""(world, layer, expert, digest) -> a cell that holds the bundle, PINNED for the caller; None = not here."""


@dataclass(frozen=True, slots=True)
class BundleRequest:
    """Which bundle is wanted: of this world, with this digest."""

    world: str
    layer: int
    expert: int
    digest: str


class TokenBucket:
    """Lets `bytes_per_s` pass (None = no limit), smoothly: each portion waits until the ones before are paid for."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0

    @property
    def portion(self) -> int:
        """Bytes to move at a time, so that a wait is about a tenth of a second at most."""
        return CHUNK if self._rate is None else max(1, min(CHUNK, int(self._rate / 10)))

    def seconds(self, size: int) -> float:
        return 0.0 if self._rate is None else size / self._rate

    def take(self, size: int, cancelled: threading.Event) -> None:
        """Waits until `size` bytes may pass, or until `cancelled`."""
        if self._rate is None:
            return
        now = time.monotonic()
        start = max(now, self._free_at)
        self._free_at = start + size / self._rate
        if start > now:
            cancelled.wait(start - now)


class Pacer:
    """Keeps a background thread to a share of one core: after each portion of work it sleeps in proportion.

    The step loop shares its cores and the interpreter lock with staging; short bursts do not lengthen its tail.
    """

    def __init__(self, share: float = 0.25) -> None:
        self._rest = 1.0 / share - 1.0
        self._since = time.thread_time()

    def __call__(self) -> None:
        work = time.thread_time() - self._since
        time.sleep(min(0.02, work * self._rest))
        self._since = time.thread_time()


def bundle_lookup(pool: CellPool, world: str, digests: Sequence[Sequence[str]]) -> Lookup:
    """The usual lookup: bundles of `world` with the digest that all ranks agreed on, from LIVE or VERIFIED cells."""

    def look(asked_world: str, layer: int, expert: int, digest: str) -> int | None:
        if asked_world != world or not (0 <= layer < len(digests) and 0 <= expert < len(digests[layer])):
            return None
        return pool.pin_bundle(layer, expert) if digests[layer][expert] == digest else None

    return look


class TransferServer:
    """Serves the bundles of one rank over TCP, a thread a connection, at most `most` at once."""

    def __init__(self, pool: CellPool, lookup: Lookup, host: str = "127.0.0.1", port: int = 0, most: int = 32) -> None:
        self._pool = pool
        self._lookup = lookup
        self._room = threading.BoundedSemaphore(most)
        self._listener = socket.create_server((host, port), backlog=128)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        self._closed = threading.Event()
        bound = self._listener.getsockname()
        self.address = f"{host}:{bound[1]}"
        self._thread = threading.Thread(target=self._accept, name="transfer-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes no more requests. Transfers under way end with their connections."""
        self._closed.set()
        # A closed listener does not wake a thread that waits in accept; a connection does.
        try:
            with socket.create_connection(self._listener.getsockname()[:2], timeout=1.0):
                pass
        except OSError:
            _log.debug("the listener of %s was gone already", self.address)
        self._listener.close()
        self._thread.join(timeout=5.0)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed.is_set():
                    return
                _log.warning("transfer server %s cannot accept: %s", self.address, error)
                time.sleep(POLL_S)
                continue
            if self._closed.is_set():
                connection.close()
                return
            threading.Thread(target=self._serve, args=(connection,), name="transfer-send", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, self._room:
            try:
                connection.settimeout(10.0)
                self._answer(connection)
            except (OSError, LinkError, TransferError) as error:
                # The receiver sees the connection end and takes another source.
                _log.info("a transfer from %s ended early: %s", self.address, error)

    def _answer(self, connection: socket.socket) -> None:
        fields = Fields(_receive_frame(connection, MAX_REQUEST), "request", MessageError)
        request_id = fields.text("request")
        deadline = time.monotonic() + fields.number("deadline_s", low=0.0, high=MAX_DEADLINE_S)
        cell = self._lookup(
            fields.text("world"), fields.integer("layer"), fields.integer("expert"), fields.text("digest")
        )
        if cell is None:
            connection.sendall(encode({"request": request_id, "error": "this rank has no such bundle"}))
            return
        try:
            connection.sendall(encode({"request": request_id, "bytes": self._pool.manifest.bundle_bytes}))
            pace = Pacer()
            for part in _portions(self._pool.buffers(cell), CHUNK):
                _send_all(connection, part, deadline)
                pace()
        finally:
            self._pool.unpin(cell)


def fetch(
    address: str,
    request: BundleRequest,
    buffers: Sequence[memoryview],
    *,
    deadline_s: float,
    bucket: TokenBucket,
    cancelled: threading.Event,
) -> int:
    """Pulls one bundle from `address` into `buffers` (manifest order); returns its bytes. Raises TransferError.

    The bytes are not verified here: the receiver digests the cell itself. `deadline_s` is for the whole bundle.
    """
    deadline = time.monotonic() + deadline_s
    request_id = secrets.token_hex(8)
    size = sum(buffer.nbytes for buffer in buffers)
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=min(5.0, deadline_s)) as connection:
            asked: Json = {
                "request": request_id,
                "world": request.world,
                "layer": request.layer,
                "expert": request.expert,
                "digest": request.digest,
                "deadline_s": deadline_s,
            }
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
            connection.sendall(encode(asked))
            connection.settimeout(min(10.0, deadline_s))
            _check_answer(Fields(_receive_frame(connection, MAX_REQUEST), "answer", MessageError), request_id, size)
            connection.settimeout(POLL_S)
            _receive_bundle(connection, buffers, deadline, bucket, cancelled)
    except (OSError, ValueError, LinkError) as error:
        raise TransferError(f"{address}: {error}") from error
    return size


def _check_answer(answer: Fields, request_id: str, size: int) -> None:
    if answer.text("request") != request_id:
        raise TransferError("the answer belongs to another request")
    error = answer.maybe("error", answer.text)
    if error is not None:
        raise TransferError(error)
    if answer.integer("bytes") != size:
        raise TransferError(f"the source sends {answer.integer('bytes')} bytes, the bundle has {size}")


def _receive_bundle(
    connection: socket.socket,
    buffers: Sequence[memoryview],
    deadline: float,
    bucket: TokenBucket,
    cancelled: threading.Event,
) -> None:
    pace = Pacer()
    for part in _portions(buffers, bucket.portion):
        bucket.take(part.nbytes, cancelled)
        start = 0
        while start < part.nbytes:
            if cancelled.is_set():
                raise TransferError("given up")
            if time.monotonic() > deadline:
                raise TransferError("the deadline of the transfer has passed")
            try:
                got = connection.recv_into(part[start:])
            except TimeoutError:
                continue
            if got == 0:
                raise TransferError("the source closed the connection early")
            start += got
        pace()


def _portions(buffers: Sequence[memoryview], size: int) -> Iterator[memoryview]:
    for buffer in buffers:
        for start in range(0, buffer.nbytes, size):
            yield buffer[start : start + size]


def _send_all(connection: socket.socket, part: memoryview, deadline: float) -> None:
    start = 0
    connection.settimeout(POLL_S)
    while start < part.nbytes:
        if time.monotonic() > deadline:
            raise TransferError("the receiver did not take the bundle before its deadline")
        try:
            start += connection.send(part[start:])
        except TimeoutError:
            continue


def _receive_frame(connection: socket.socket, most: int) -> Json:
    size = int.from_bytes(_receive_exactly(connection, 4), "big")
    if size > most:
        raise TransferError(f"a frame of {size} bytes is over the limit of {most}")
    return decode(_receive_exactly(connection, size))


def _receive_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise TransferError("the connection was closed")
        data += part
    return bytes(data)


class PairedTransfer:
    """Bundles by paired send and receive on a transfer group of their own, never the group that serves tokens.

    The source takes a tag with `fresh_tags` and tells it to the receiver beforehand; then both call `send` and
    `receive`. Tags are never reused: an old message can so never be taken for a new one. One transfer is in flight at
    a time. What breaks or times out ends this generation for good (an orphan receive breaks the pair both ways): every
    later call raises GenerationEnded, and the ranks make a new group with a new PairedTransfer.
    Exercised on gloo; unverified on NCCL and HCCL, which ignore tags and match by order: there the one-at-a-time rule
    and the digest of the received bundle carry the weight.
    """

    def __init__(self, group: dist.ProcessGroup, generation: int, timeout_s: float) -> None:
        self.generation = generation
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._lock = threading.Lock()
        self._ended: str | None = None
        self._next_tag = 1

    @property
    def ended(self) -> str | None:
        """Why this generation is over, or None."""
        return self._ended

    def fresh_tags(self, tensors: int) -> int:
        """First of `tensors` tags that this source has never used in this generation."""
        with self._lock:
            first = self._next_tag
            self._next_tag += tensors
            return first

    def send(self, peer: int, first_tag: int, tensors: Sequence[torch.Tensor]) -> None:
        """Sends `tensors` (contiguous, manifest order) to rank `peer` of the group."""
        self._pair(dist.isend, peer, first_tag, tensors)

    def receive(self, peer: int, first_tag: int, tensors: Sequence[torch.Tensor]) -> None:
        """Receives into `tensors` what rank `peer` of the group sends under the same tags."""
        self._pair(dist.irecv, peer, first_tag, tensors)

    def _pair(
        self,
        operation: Callable[..., dist.Work | None],
        peer: int,
        first_tag: int,
        tensors: Sequence[torch.Tensor],
    ) -> None:
        with self._lock:
            if self._ended is not None:
                raise GenerationEnded(f"generation {self.generation} is over: {self._ended}")
            global_peer = dist.get_global_rank(self._group, peer)
            operations = [
                dist.P2POp(operation, tensor, global_peer, self._group, first_tag + i)
                for i, tensor in enumerate(tensors)
            ]
            deadline = time.monotonic() + self._timeout.total_seconds()
            try:
                for work in dist.batch_isend_irecv(operations):
                    work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
            except RuntimeError as error:
                self._ended = f"paired transfer with rank {peer}: {str(error).splitlines()[0]}"
                raise GenerationEnded(f"generation {self.generation} is over: {self._ended}") from error
