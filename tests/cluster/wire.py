"""A line to etcd that loses replies: the request arrives, the answer does not."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

# The request must have been applied before the line breaks: that is the case that is hard for its sender.
APPLIED_AFTER_S = 0.4
TAIL = 4096


class LossyWire:
    """Passes bytes between clients and `target`, until `lose(needle)` is armed and a request holds the needle.

    Then that request still reaches the target, but nothing comes back on its connection any more, and after `silent_s`
    the connection breaks. `lost` is set once it has happened.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self._needle: bytes | None = None
        self._silent_s = APPLIED_AFTER_S
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.lost = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, name="lossy-wire", daemon=True).start()

    def lose(self, needle: bytes, silent_s: float = APPLIED_AFTER_S) -> None:
        self.lost.clear()
        with self._lock:
            self._needle, self._silent_s = needle, silent_s

    def close(self) -> None:
        # A thread that waits in accept is not woken by close alone.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in list(self._open):
            _break(one)

    def __enter__(self) -> LossyWire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            client.close()
            return
        server.settimeout(None)
        self._open |= {client, server}
        muted = threading.Event()
        back = threading.Thread(target=self._pass_back, args=(server, client, muted), daemon=True)
        back.start()
        try:
            self._pass_on(client, server, muted)
        finally:
            _break(client)
            _break(server)
            back.join()
            self._open -= {client, server}
            client.close()
            server.close()

    def _pass_on(self, client: socket.socket, server: socket.socket, muted: threading.Event) -> None:
        tail = b""
        for data in _received(client):
            tail = tail[-TAIL:] + data
            if self._hit(tail):
                muted.set()
                with contextlib.suppress(OSError):
                    server.sendall(data)
                self.lost.set()
                time.sleep(self._silent_s)
                return
            try:
                server.sendall(data)
            except OSError:
                return

    def _pass_back(self, server: socket.socket, client: socket.socket, muted: threading.Event) -> None:
        for data in _received(server):
            if muted.is_set():
                continue
            try:
                client.sendall(data)
            except OSError:
                return
        if not muted.is_set():
            _break(client)

    def _hit(self, data: bytes) -> bool:
        with self._lock:
            if self._needle is None or self._needle not in data:
                return False
            self._needle = None
            return True


def _received(source: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = source.recv(65536)
        except OSError:
            return
        if not data:
            return
        yield data


def _break(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
