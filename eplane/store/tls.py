"""Certificate files of a TLS client, read anew when they change on disk."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from eplane.errors import StoreDenied


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. `cert` and `key` (both or none) prove who we are; `server_name` is what the server's certificate must name,
    where that is not the host in the endpoint."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None

    def read(self) -> TlsMaterial:
        """The files' contents, checked to be readable and to belong together: half of a renewal is refused."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
            return TlsMaterial(
                self.ca.read_bytes(),
                self.cert.read_bytes() if self.cert else None,
                self.key.read_bytes() if self.key else None,
            )
        except (OSError, ssl.SSLError) as error:
            names = ", ".join(str(path) for path in (self.ca, self.cert, self.key) if path)
            raise StoreDenied(f"the TLS files {names} can not be used: {error}") from error

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Changes when a file is rewritten or replaced (a renewed secret is often a new link target)."""
        return tuple(_stamp(path) for path in (self.ca, self.cert, self.key) if path is not None)


@dataclass(frozen=True, slots=True, repr=False)
class TlsMaterial:
    ca: bytes
    cert: bytes | None
    key: bytes | None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
