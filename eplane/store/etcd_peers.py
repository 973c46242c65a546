"""The endpoints of an etcd cluster: one gRPC channel for each, which one is asked now, and certificates read anew."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from etcd3 import etcdrpc

from eplane.errors import EndpointError, StoreDenied, StoreRefused
from eplane.store.etcd_wire import translate
from eplane.store.once import Unanswered
from eplane.store.tls import TlsFiles

_log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 128 * 1024 * 1024
# An etcd server hangs up on clients that ping more often than each 5 s.
_MIN_KEEPALIVE_S = 5.0


@dataclass(frozen=True, slots=True, eq=False)
class Peer:
    """One endpoint's channel and stubs. The stubs have no types of their own."""

    address: str
    channel: grpc.aio.Channel
    kv: Any
    lease: Any
    watch: Any
    auth: Any
    maintenance: Any


class Peers:
    """Asks one endpoint until it does not answer, then the next; the first is drawn, so that many clients spread."""

    def __init__(
        self,
        endpoints: Sequence[str],
        tls: TlsFiles | None,
        keepalive_time_s: float,
        keepalive_timeout_s: float,
        grace_s: float,
    ) -> None:
        if keepalive_time_s < _MIN_KEEPALIVE_S:
            raise StoreRefused(
                f"keepalive_time_s is {keepalive_time_s:g}, etcd allows no less than {_MIN_KEEPALIVE_S:g}"
            )
        self.endpoints = tuple(_address(endpoint, tls is not None) for endpoint in endpoints)
        if not self.endpoints:
            raise EndpointError("no etcd endpoint is given")
        self._tls = tls
        self._stamp: tuple[tuple[int, int, int] | None, ...] = ()
        self._options = _channel_options(keepalive_time_s, keepalive_timeout_s, tls.server_name if tls else None)
        self._grace_s = grace_s
        self._at = random.randrange(len(self.endpoints))
        self._peers: list[Peer] = []
        self._leaving: set[asyncio.Task[None]] = set()

    def current(self) -> Peer:
        if self._tls is not None and self._tls.stamp() != self._stamp:
            self._renew(self._tls)
        if not self._peers:
            self._peers = [self._connect(address, None) for address in self.endpoints]
        return self._peers[self._at]

    def leave(self, peer: Peer) -> None:
        """`peer` did not answer: go on to the next, unless another request did that already."""
        if self._peers and self._peers[self._at] is peer:
            self._at = (self._at + 1) % len(self._peers)

    @contextlib.contextmanager
    def answers(self, peer: Peer) -> Iterator[None]:
        """Around a request to `peer`: turns every way in which gRPC fails into the store's own errors."""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            meaning = translate(error.code(), error.details() or "", peer.address)
            if isinstance(meaning, Unanswered):
                self.leave(peer)
            raise meaning from error
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            # The channel was closed under the request, as its certificates were renewed, or the call ended before it.
            raise Unanswered(f"etcd at {peer.address}: {error}") from error
        except asyncio.CancelledError as error:
            # gRPC reports a call that it ended itself in the same way as a task that was told to end.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise Unanswered(f"etcd at {peer.address}: the call was ended") from error

    def _renew(self, tls: TlsFiles) -> None:
        """New channels with the new certificates; requests under way on the old ones may finish."""
        stamp = tls.stamp()
        try:
            material = tls.read()
        except StoreDenied as error:
            if not self._peers:
                raise
            # Half-written files: stay with what works and look again at the next request.
            _log.warning("keeping the certificates in use: %s", error)
            return
        credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.cert)
        old, self._peers = self._peers, [self._connect(address, credentials) for address in self.endpoints]
        self._stamp = stamp
        for peer in old:
            task = asyncio.get_running_loop().create_task(peer.channel.close(self._grace_s))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    def _connect(self, address: str, credentials: grpc.ChannelCredentials | None) -> Peer:
        if credentials is None:
            channel = grpc.aio.insecure_channel(address, options=self._options)
        else:
            channel = grpc.aio.secure_channel(address, credentials, options=self._options)
        return Peer(
            address,
            channel,
            etcdrpc.KVStub(channel),
            etcdrpc.LeaseStub(channel),
            etcdrpc.WatchStub(channel),
            etcdrpc.AuthStub(channel),
            etcdrpc.MaintenanceStub(channel),
        )

    async def close(self) -> None:
        peers, self._peers = self._peers, []
        for peer in peers:
            await peer.channel.close()
        for task in list(self._leaving):
            task.cancel()
        await asyncio.gather(*self._leaving, return_exceptions=True)


def _address(endpoint: str, tls: bool) -> str:
    scheme, found, rest = endpoint.strip().rpartition("://")
    if found and scheme != ("https" if tls else "http"):
        raise EndpointError(f"endpoint {endpoint}: {scheme} {'with' if tls else 'without'} TLS files")
    address = rest.rstrip("/")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise EndpointError(f"endpoint {endpoint!r} is not host:port")
    return address


def _channel_options(
    keepalive_time_s: float, keepalive_timeout_s: float, server_name: str | None
) -> list[tuple[str, Any]]:
    options: list[tuple[str, Any]] = [
        ("grpc.keepalive_time_ms", int(keepalive_time_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.http2.max_pings_without_data", 0),
        # A server that comes back is found in a second, one that swallows packets is left as soon.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1000),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        # Each client its own connections: a new certificate must not ride on an old one's.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if server_name is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options
