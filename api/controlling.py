"""Controlling: makes a controller of its options, gives it a store and an API, and runs both."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.app import create_app
from api.auth import Auth, AuthSettings, check_bind
from api.serving import address_of, listening_socket, serve
from controller.settings import ControllerSettings
from eplane.clock import SystemClock
from eplane.errors import BadInput, SettingsError
from eplane.store.etcd import EtcdStore
from eplane.store.tls import TlsFiles

# Where a person gave what the settings refuse.
_OPTIONS = {
    "url": "--url",
    "groups": "--group",
    "controller_id": "--id",
    "lease_ttl_s": "--ttl",
    "default_mode": "--mode",
}


@dataclass(frozen=True, slots=True)
class ControllerOptions:
    """One controller process, as its command line describes it."""

    etcd: str
    groups: tuple[str, ...]
    listen: str
    url: str | None
    controller_id: str | None
    mode: str | None
    ttl_s: float
    auth: AuthSettings
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None


def run_controller(options: ControllerOptions) -> None:
    """Run until SIGTERM or SIGINT. Everything that can be refused is refused before anything is started."""
    host, port = address_of(options.listen, "--listen")
    check_bind(host, options.auth)
    auth = Auth(options.auth)
    settings = _settings(options, host, port)
    tls = _tls(options)
    listener = listening_socket(host, port)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Every run of a timer would be two lines; what fails or is missed is still told.
    logging.getLogger("apscheduler").setLevel(logging.WARNING)
    try:
        asyncio.run(_run(options, settings, tls, auth, listener))
    finally:
        listener.close()


async def _run(
    options: ControllerOptions, settings: ControllerSettings, tls: TlsFiles | None, auth: Auth, listener: socket.socket
) -> None:
    # Late, so that an option that is refused costs no import of the solver.
    from controller.daemon import Controller

    store = EtcdStore([part.strip() for part in options.etcd.split(",") if part.strip()], tls=tls)
    try:
        # Asked once before anything is served: who starts a controller on a dead store wants to hear it.
        await store.status()
        controller = Controller(store, settings, SystemClock())
        await serve(create_app(controller, auth), listener, options.auth, controller.run)
    finally:
        await store.close()


def _settings(options: ControllerOptions, host: str, port: int) -> ControllerSettings:
    given: dict[str, Any] = {
        "url": options.url or _url_of(host, port, options.auth.has_tls),
        "groups": options.groups,
        "controller_id": options.controller_id,
        "lease_ttl_s": options.ttl_s,
        "default_mode": options.mode,
    }
    try:
        return ControllerSettings.from_mapping({name: value for name, value in given.items() if value is not None})
    except SettingsError as error:
        raise BadInput(f"{_OPTIONS.get(error.field, error.field)}: {error.reason}") from None


def _url_of(host: str, port: int, has_tls: bool) -> str:
    """What agents and other controllers will use; an address that means 'every address' is nobody's."""
    if host in ("0.0.0.0", "::"):
        raise BadInput(f"--listen {host} does not say how others reach this controller: give --url too")
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if has_tls else 'http'}://{shown}:{port}"


def _tls(options: ControllerOptions) -> TlsFiles | None:
    if (options.etcd_cert is None) != (options.etcd_key is None):
        raise BadInput("--etcd-cert and --etcd-key belong together: give both, or neither")
    if options.etcd_ca is None:
        if options.etcd_cert is not None or "https://" in options.etcd:
            raise BadInput("etcd over TLS needs --etcd-ca")
        return None
    return TlsFiles(options.etcd_ca, options.etcd_cert, options.etcd_key)
