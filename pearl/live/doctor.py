"""`pearl doctor`: run each probe for real and say what follows."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from actors.sglang import plugin, transfer
from actors.sglang.args import check_versions
from envs.registry import FAMILIES
from envs.sandbox.backend import BubblewrapBackend
from pearl.config import SandboxConfig
from pearl.errors import UserError
from pearl.live.preflight import ENGINE_BASE_GB, available_memory_gb
from pearl.models import BUILT_IN, is_cached

State = Literal["ok", "missing", "failed"]
"""`missing` is optional, `failed` keeps a run from starting."""
SHARED_MEMORY_MIN_GB = 1.0
"""Below this a snapshot of a small model may not fit twice."""


@dataclass(frozen=True, slots=True)
class Finding:
    part: str
    state: State
    text: str
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def examine() -> list[Finding]:
    """All findings, the essential ones first."""
    findings = [_python(), _engine(), _package("deepspeed"), _package("distributed"), _torch(), await _sandbox()]
    return [*findings, _memory(), _shared_memory(), _transfer(), _roles(), _models(), _families()]


def _python() -> Finding:
    text = platform.python_version()
    tested = text.startswith("3.11.")
    return Finding("python", "ok", text if tested else f"{text} (tests run on 3.11)")


def _package(name: str) -> Finding:
    try:
        return Finding(name, "ok", version(name))
    except PackageNotFoundError:
        return Finding(name, "failed", "not installed", "Run `make install`.")


def _guarded(part: str, probe: Callable[[], str]) -> Finding:
    try:
        return Finding(part, "ok", probe())
    except UserError as error:
        return Finding(part, "failed", error.what, error.remedy)


def _engine() -> Finding:
    def probe() -> str:
        check_versions()
        return version("sglang")

    return _guarded("sglang", probe)


def _torch() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        return Finding("devices", "ok", f"torch {torch.__version__}, {torch.cuda.device_count()} x {', '.join(names)}")
    text = f"torch {torch.__version__}, no GPU: engines and trainer run on {os.cpu_count()} CPU cores"
    return Finding("devices", "ok", text)


async def _sandbox() -> Finding:
    backend = BubblewrapBackend(SandboxConfig(), name="doctor")
    try:
        await backend.probe()
        return Finding("sandbox", "ok", "bubblewrap ran a command over an overlay, without network")
    except UserError as error:
        return Finding("sandbox", "failed", error.what, error.remedy)
    finally:
        await backend.close()


def _memory() -> Finding:
    free = available_memory_gb()
    engines = int(free // (ENGINE_BASE_GB + 0.4))
    text = f"{free:.1f} GB available; an engine costs about {ENGINE_BASE_GB + 0.4:.1f} GB, so at most {engines} fit"
    if engines < 2:
        return Finding("memory", "failed", text, "A run on a CPU needs an engine and a trainer: about 6 GB.")
    return Finding("memory", "ok", text)


def _shared_memory() -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free / 1e9
    except OSError:
        return Finding("shared memory", "missing", "no /dev/shm; snapshots go to the run directory")
    if free < SHARED_MEMORY_MIN_GB:
        remedy = "Enlarge /dev/shm (in a container: --shm-size)."
        return Finding("shared memory", "failed", f"{free:.1f} GB free in /dev/shm", remedy)
    return Finding("shared memory", "ok", f"{free:.1f} GB free in /dev/shm")


def _transfer() -> Finding:
    """Needed for prefill-decode serving only."""
    if (lacking := transfer.missing()) is not None:
        return Finding("KV transfer", "missing", f"{lacking.what}; engines serve colocated only", lacking.remedy)
    return Finding(
        "KV transfer", "ok", "Mooncake and libibverbs are there, so engines can be prefill or decode engines"
    )


def _roles() -> Finding:
    if reason := plugin.available():
        text = "live between prefill and decode; to and from colocated by a restart of the engine"
        return Finding("role switches", "missing", text, f"{reason[0].upper()}{reason[1:]}.")
    return Finding(
        "role switches", "ok", "live between colocated, prefill and decode, through PEARL's plugin in SGLang"
    )


def _models() -> Finding:
    states = [f"{name} ({'ready' if is_cached(name) else 'made at first use'})" for name in BUILT_IN]
    return Finding("built-in models", "ok", ", ".join(states))


def _families() -> Finding:
    return Finding("task families", "ok", ", ".join(sorted(FAMILIES)))
