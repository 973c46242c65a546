"""Users, roles and certificates of a real etcd: tokens that run out, certificates that are renewed."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from eplane.errors import StoreDenied, StoreUnavailable
from eplane.store.base import Exists, Missing, Put
from eplane.store.etcd import EtcdStore
from eplane.store.tls import TlsFiles
from tests.etcd_process import EtcdProcess
from tests.store.conftest import until

PASSWORD = "correct horse"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


# --- users ---


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdProcess]:
    """Tokens live one second; `agent` may use /eplane/ and the store's own bookkeeping, and nothing else."""
    options = ("--auth-token-ttl", "1", "--bcrypt-cost", "4")
    with EtcdProcess(tmp_path / "etcd", options=options) as etcd:
        etcd.post("auth/user/add", {"name": "root", "password": "root"})
        etcd.post("auth/user/grant", {"user": "root", "role": "root"})
        etcd.post("auth/role/add", {"name": "eplane"})
        for start, end in (("/eplane/", "/eplane0"), ("~eplane-txn/", "~eplane-txn0")):
            permission = {"permType": "READWRITE", "key": b64(start), "range_end": b64(end)}
            etcd.post("auth/role/grant", {"name": "eplane", "perm": permission})
        etcd.post("auth/user/add", {"name": "agent", "password": PASSWORD})
        etcd.post("auth/user/grant", {"user": "agent", "role": "eplane"})
        etcd.post("auth/enable", {})
        yield etcd


def login(etcd: EtcdProcess, **more: Any) -> EtcdStore:
    return EtcdStore([etcd.endpoint], username="agent", password=PASSWORD, give_up_s=20, **more)


async def test_a_token_that_ran_out_is_renewed_everywhere(guarded: EtcdProcess) -> None:
    store = login(guarded)
    made = await store.transact([Missing("/eplane/a")], [Put("/eplane/a", b"1")])
    lease = await store.lease_grant(60)
    stale = store._token
    await asyncio.sleep(2.2)
    assert (await store.transact([Exists("/eplane/a")], [Put("/eplane/a", b"2")])).succeeded
    assert store._token != stale
    stale = store._token
    await asyncio.sleep(2.2)
    assert await store.lease_keepalive(lease) == 60
    # etcd answers a watch with a token that ran out only by a reason in an ordinary reply.
    store._token = stale
    watch = store.watch("/eplane/", from_revision=made.revision)
    async with asyncio.timeout(30):
        assert (await anext(watch)).events[0].kv.value == b"1"
    assert store._token != stale
    await watch.aclose()
    assert (await store.status()).healthy
    await store.close()


async def test_wrong_users_and_roles_are_told_apart_from_outages(guarded: EtcdProcess) -> None:
    nobody = EtcdStore([guarded.endpoint], give_up_s=20)
    with pytest.raises(StoreDenied, match="user name is empty"):
        await nobody.get("/eplane/a")
    await nobody.close()
    wrong = EtcdStore([guarded.endpoint], username="agent", password="wrong", give_up_s=20)
    with pytest.raises(StoreDenied, match="invalid user ID or password") as caught:
        await wrong.get("/eplane/a")
    assert caught.value.exit_code == 2
    with pytest.raises(StoreDenied):
        await anext(wrong.watch("/eplane/", from_revision=1))
    await wrong.close()
    store = login(guarded)
    assert await store.get("/eplane/a") is None
    with pytest.raises(StoreDenied, match="permission denied"):
        await store.get("/other/a")
    with pytest.raises(StoreDenied, match="permission denied"):
        await store.transact([Missing("/eplane/a")], [Put("/other/a", b"")])
    with pytest.raises(StoreDenied):
        await anext(store.watch("/other/", from_revision=1))
    assert (await store.transact([Missing("/eplane/a")], [Put("/eplane/a", b"")])).succeeded
    await store.close()


# --- certificates ---


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


def make_ca(folder: Path, name: str) -> None:
    subject = ("-subj", f"/CN={name}", "-days", "2", "-nodes")
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
    openssl(folder, "req", "-x509", *key, *subject, "-keyout", f"{name}.key", "-out", f"{name}.pem")


def make_cert(folder: Path, ca: str, name: str) -> None:
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, "req", "-new", *key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
    (folder / f"{name}.ext").write_text(
        "subjectAltName=IP:127.0.0.1,DNS:etcd.test\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    signer = ("-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2")
    openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signer, "-extfile", f"{name}.ext", "-out", f"{name}.pem")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for ca in ("ca", "stranger"):
        make_ca(folder, ca)
    for ca, name in (("ca", "server"), ("ca", "client"), ("ca", "renewed"), ("stranger", "intruder")):
        make_cert(folder, ca, name)
    return folder


@pytest.fixture
def secured(tmp_path: Path, certificates: Path) -> Iterator[EtcdProcess]:
    server, key, ca = (str(certificates / name) for name in ("server.pem", "server.key", "ca.pem"))
    options = ("--cert-file", server, "--key-file", key, "--trusted-ca-file", ca, "--client-cert-auth")
    with EtcdProcess(tmp_path / "etcd", options=options, tls=True) as etcd:
        yield etcd


def place(certificates: Path, name: str, folder: Path, *endings: str) -> None:
    """Replace the client's files, whole."""
    for ending in endings or ("pem", "key"):
        shutil.copy(certificates / f"{name}.{ending}", folder / "new")
        (folder / "new").rename(folder / f"client.{ending}")


def client_files(certificates: Path, folder: Path, name: str) -> TlsFiles:
    place(certificates, name, folder)
    return TlsFiles(certificates / "ca.pem", folder / "client.pem", folder / "client.key")


async def test_both_sides_prove_who_they_are(secured: EtcdProcess, certificates: Path, tmp_path: Path) -> None:
    store = EtcdStore([f"https://{secured.endpoint}"], tls=client_files(certificates, tmp_path, "client"), give_up_s=20)
    assert (await store.transact([Missing("a")], [Put("a", b"1")])).succeeded
    await store.close()
    for tls in (
        TlsFiles(certificates / "ca.pem"),
        client_files(certificates, tmp_path, "intruder"),
        TlsFiles(certificates / "stranger.pem", certificates / "client.pem", certificates / "client.key"),
        TlsFiles(certificates / "ca.pem", certificates / "client.pem", certificates / "client.key", "other.test"),
    ):
        stranger = EtcdStore([secured.endpoint], tls=tls, give_up_s=0.6)
        with pytest.raises(StoreUnavailable):
            await stranger.get("a")
        await stranger.close()


async def test_renewed_certificates_are_taken_up_while_running(
    secured: EtcdProcess, certificates: Path, tmp_path: Path
) -> None:
    tls = client_files(certificates, tmp_path, "client")
    store = EtcdStore([secured.endpoint], tls=tls, give_up_s=2, call_timeout_s=0.5)
    made = await store.transact([Missing("a")], [Put("a", b"1")])
    watch = store.watch("a", from_revision=made.revision + 1)
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.2)
    old = store.peers.current()
    # Half of a renewal, the new certificate with the old key: stay with what works.
    place(certificates, "renewed", tmp_path, "pem")
    assert await store.get("a") is not None
    assert store.peers.current() is old
    place(certificates, "renewed", tmp_path, "key")
    assert await store.get("a") is not None
    # What hangs on the old certificate ends soon, streams too.
    assert store.peers.current() is not old
    await until(lambda: old.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)
    # That the files count at all shows when they are bad.
    place(certificates, "intruder", tmp_path)
    with pytest.raises(StoreUnavailable):
        await store.get("a")
    place(certificates, "client", tmp_path)
    made = await store.transact([Exists("a")], [Put("a", b"2")])
    async with asyncio.timeout(30):
        assert (await waiting).revision == made.revision
    await watch.aclose()
    await store.close()


async def test_unusable_files_are_named(tmp_path: Path, certificates: Path) -> None:
    missing = TlsFiles(tmp_path / "no-ca.pem")
    mismatched = TlsFiles(certificates / "ca.pem", certificates / "client.pem", certificates / "renewed.key")
    for tls, words in ((missing, "no-ca.pem"), (mismatched, r"renewed\.key")):
        store = EtcdStore(["127.0.0.1:1"], tls=tls)
        with pytest.raises(StoreDenied, match=words):
            await store.get("a")
        await store.close()
