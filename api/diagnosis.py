"""Diagnosis: looks at the machine without changing it, and says what is missing and how to get it.

torch is asked in a process of its own: importing it costs seconds, and with torch_npu but without CANN it fails.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass

from api.stack import answers, etcd_binary
from eplane.errors import BadInput

BASE = ("numpy", "numba", "cslab-etcd3", "grpcio", "fastapi", "uvicorn", "httpx", "apscheduler", "typer", "pyyaml")
PROBE_LIMIT_S = 120.0
_PROBE = """
import json, os
out = {}
try:
    import torch
except Exception as error:
    out["error"] = f"{type(error).__name__}: {error}"
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
else:
    out["torch"] = torch.__version__
    device = torch.accelerator.current_accelerator(check_available=True) if hasattr(torch, "accelerator") else None
    out["device"] = device.type if device else "cpu"
    out["count"] = torch.accelerator.device_count() if device else 0
    import torch.distributed as dist
    out["backend"] = dist.get_default_backend_for_device(out["device"]) if dist.is_available() else None
print(json.dumps(out))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `state`: ok, missing, broken, or none (a device that is not here); `needed`: without it no controller runs here."""

    name: str
    state: str
    detail: str
    remedy: str | None = None
    needed: bool = False

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def diagnose(etcd: str | None) -> tuple[Finding, ...]:
    """Everything there is to say, needed parts first."""
    return (
        Finding("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("cpu", "ok", f"{len(os.sched_getaffinity(0))} cores for this process"),
        *(_package(name, None, needed=True) for name in BASE),
        _etcd(etcd),
        *_torch(),
        _package("transformers", "runtime"),
        _package("safetensors", "runtime"),
        _package("matplotlib", "demo"),
    )


def _package(name: str, extra: str | None, needed: bool = False) -> Finding:
    version = _version(name)
    if version is not None:
        return Finding(name, "ok", version, needed=needed)
    remedy = f"pip install {name}" if extra is None else f"pip install 'eplane[{extra}]'"
    what = "part of the base install" if needed else f"only needed for the extra {extra!r}"
    return Finding(name, "missing", what, remedy, needed)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _etcd(given: str | None) -> Finding:
    if given and not os.path.isfile(given):
        return _asked_etcd(given)
    try:
        binary = etcd_binary()
    except BadInput as error:
        return Finding("etcd", "missing", "no etcd is given and none is installed", str(error), needed=True)
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
        first = done.stdout.splitlines()[0] if done.stdout else f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("etcd", "broken", f"{binary}: {error}", "reinstall it, or set EPLANE_ETCD", needed=True)
    return Finding("etcd", "ok", f"{binary}, {first}", needed=True)


def _asked_etcd(given: str) -> Finding:
    urls = [u.strip() if "://" in u else f"http://{u.strip()}" for u in given.split(",") if u.strip()]
    silent = [u for u in urls if u.startswith("http://") and not answers(f"{u}/health")]
    if any(u.startswith("https://") for u in urls):
        return Finding("etcd", "ok", f"{given} (TLS: reached by the controller, not asked here)", needed=True)
    if len(silent) < len(urls):
        detail = f"{len(urls) - len(silent)} of {len(urls)} endpoints of {given} are healthy"
        return Finding("etcd", "ok", detail, needed=True)
    return Finding("etcd", "missing", f"{given} does not answer", "start it, or correct EPLANE_ETCD", needed=True)


def _torch() -> tuple[Finding, ...]:
    """torch and the device it finds, then torch_npu and CANN."""
    version, npu = _version("torch"), _version("torch_npu")
    if version is None:
        missing = "needed to serve models on this machine, not for controller, agent, API and CLI"
        found = Finding("torch", "missing", missing, "pip install 'eplane[runtime]'")
        return (found, _npu(npu, None))
    seen = _probe_torch()
    error = seen.get("error")
    if error is not None:
        remedy = "set TORCH_DEVICE_BACKEND_AUTOLOAD=0 to use torch on the CPU" if npu else "reinstall torch"
        return (
            Finding("torch", "broken", f"{version} does not import: {str(error)[:160]}", remedy),
            _npu(npu, str(error)),
        )
    device = seen.get("device")
    where = "CPU only" if device == "cpu" else f"{seen.get('count')} x {device}"
    torch = Finding("torch", "ok", f"{seen.get('torch')}, {where}, collectives over {seen.get('backend')}")
    return (torch, _gpu(str(device)), _npu(npu, None))


def _gpu(device: str) -> Finding:
    if device == "cuda":
        return Finding("cuda", "ok", "torch uses it")
    if shutil.which("nvidia-smi") is not None:
        return Finding("cuda", "broken", "a driver is here, but this torch has no CUDA", "install torch built for CUDA")
    return Finding("cuda", "none", "no NVIDIA driver found; the CPU serves")


def _npu(version: str | None, error: str | None) -> Finding:
    cann = next((os.environ[n] for n in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if os.environ.get(n)), None)
    if version is None:
        card = os.path.exists("/dev/davinci_manager")
        detail = "an Ascend device is here, torch_npu is not" if card else "no Ascend device found; the CPU serves"
        return Finding("npu", "missing" if card else "none", detail, "pip install 'eplane[npu]'" if card else None)
    if cann is None:
        remedy = "source CANN's set_env.sh; without an NPU set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return Finding("npu", "broken", f"torch_npu {version} is installed, but CANN is missing", remedy)
    state = "ok" if error is None else "broken"
    return Finding("npu", state, f"torch_npu {version}, CANN at {cann}", None if error is None else error[:160])


def _probe_torch() -> dict[str, object]:
    """What torch says of itself, asked in a process that can not hurt ours."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False
        )
        seen = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": str(error)}
    except (ValueError, IndexError):
        return {"error": f"the probe ended with code {done.returncode}: {done.stderr.strip()[-200:]}"}
    return seen if isinstance(seen, dict) else {"error": "the probe said nothing"}
