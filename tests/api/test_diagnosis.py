"""doctor: says what is there, what is missing and how to get it, whatever state torch is in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from api import diagnosis
from api.cli import run
from api.diagnosis import Finding, diagnose

VERSIONS = dict.fromkeys(diagnosis.BASE, "1.0") | {
    "torch": "2.13.0",
    "transformers": "5.24.0",
    "safetensors": "0.8",
}


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, as a test wants it; torch answers as on a machine without devices."""
    known = dict(VERSIONS)
    seen = {"torch": "2.13.0+cpu", "device": "cpu", "count": 0, "backend": "gloo"}
    monkeypatch.setattr("api.diagnosis._version", known.get)
    monkeypatch.setattr("api.diagnosis._probe_torch", lambda: seen)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
    monkeypatch.delenv("EPLANE_ETCD", raising=False)
    return known


def _found(name: str, etcd: str | None = None) -> Finding:
    return next(f for f in diagnose(etcd) if f.name == name)


def test_a_machine_that_has_everything(versions: dict[str, str]) -> None:
    assert _found("numpy") == Finding("numpy", "ok", "1.0", needed=True)
    assert _found("torch").detail == "2.13.0+cpu, CPU only, collectives over gloo"
    assert _found("etcd").state == "ok"
    assert _found("npu").state in ("none", "missing")


def test_what_is_missing_names_its_remedy(versions: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("torch", "matplotlib"):
        versions.pop(name, None)
    assert _found("torch").remedy == "pip install 'eplane[runtime]'"
    assert _found("matplotlib").remedy == "pip install 'eplane[demo]'"
    assert run(["doctor"]) == 0
    del versions["grpcio"]
    assert _found("grpcio") == Finding("grpcio", "missing", "part of the base install", "pip install grpcio", True)
    assert run(["doctor", "-o", "json"]) == 5
    out = capsys.readouterr().out
    assert {f["name"] for f in json.loads(out[out.index("{") :])["findings"]} >= {"python", "grpcio", "npu"}


def test_devices(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {"torch": "2.13.0", "device": "cuda", "count": 8, "backend": "nccl"}
    monkeypatch.setattr("api.diagnosis._probe_torch", lambda: seen)
    assert _found("torch").detail == "2.13.0, 8 x cuda, collectives over nccl"
    assert _found("cuda").state == "ok"
    seen.update(device="cpu")
    monkeypatch.setattr("api.diagnosis.shutil.which", lambda name: f"/bin/{name}")
    assert _found("cuda").state == "broken"


def test_torch_npu_without_cann(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    versions["torch_npu"] = "2.13.0"
    error = "RuntimeError: Failed to load the backend extension: torch_npu"
    monkeypatch.setattr("api.diagnosis._probe_torch", lambda: {"error": error})
    torch, npu = _found("torch"), _found("npu")
    assert (torch.state, "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in (torch.remedy or "")) == ("broken", True)
    assert (npu.state, "CANN is missing" in npu.detail) == ("broken", True)
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend")
    assert "CANN at /usr/local/Ascend" in _found("npu").detail
    monkeypatch.setattr("api.diagnosis._probe_torch", lambda: {"torch": "2.13.0", "device": "npu", "count": 8})
    assert _found("npu").state == "ok"


def test_an_ascend_card_without_its_package(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.diagnosis.os.path.exists", lambda path: path == "/dev/davinci_manager")
    assert _found("npu") == Finding(
        "npu", "missing", "an Ascend device is here, torch_npu is not", "pip install 'eplane[npu]'"
    )


def test_etcd_of_an_address(versions: dict[str, str]) -> None:
    found = _found("etcd", "127.0.0.1:1,http://127.0.0.1:2")
    assert (found.state, found.needed) == ("missing", True)
    assert _found("etcd", "https://etcd.example:2379").state == "ok"


def test_no_etcd_at_all(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("api.stack.importlib.util.find_spec", lambda name: None)
    found = _found("etcd")
    assert (found.state, "apt-get install etcd-server" in (found.remedy or "")) == ("missing", True)


def _torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> dict[str, object]:
    """What the probe, in its own process, says of a package `torch` of this text."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return diagnosis._probe_torch()


def test_the_probe_of_a_torch_that_does_not_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _torch(tmp_path, monkeypatch, "raise ImportError('libhccl.so: cannot open')") == {
        "error": "ImportError: libhccl.so: cannot open"
    }


def test_the_probe_of_a_torch_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ended with code -6" in str(_torch(tmp_path, monkeypatch, "import os; os.abort()")["error"])
