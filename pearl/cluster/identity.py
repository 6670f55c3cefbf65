"""Who a worker is: slot, incarnation, zone, process; and whether it runs the driver's code."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import socket
import time
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pearl.core.layout import SlotInfo, Zone

CHECKED_PACKAGES = ("distributed", "torch", "msgpack", "numpy", "pydantic")
"""A difference in one of these between driver and worker breaks calls or numbers."""
SOURCE_FOLDERS = ("pearl", "actors", "trainer", "envs")

HOST = "PEARL_HOST"
"""Environment variable: another name for this host, where two would have the same one."""


def own_host() -> str:
    """The name by which the cluster knows this host: processes of one host share its memory."""
    return os.environ.get(HOST) or socket.gethostname()


@dataclass(frozen=True, slots=True)
class Identity:
    """Sent with a worker's registration; `versions` are package versions plus a hash of our own source."""

    slot: str
    incarnation: int
    """Which life of the slot."""
    zone: str
    """Of a rollout slot reserved, preemptible or overlap; else training or environment."""
    host: str
    pid: int
    devices: str
    """CUDA_VISIBLE_DEVICES of the process."""
    versions: dict[str, str]
    free: bool = False
    """Belongs to no driver: it serves whichever is connected to the scheduler, each in a life of its own."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """Cluster-wide GPU ids, "host/device"."""
        return tuple(f"{self.host}/{device}" for device in self.devices.split(",") if device)

    def slot_info(self) -> SlotInfo:
        """Of a rollout slot. Raises ValueError for another zone."""
        return SlotInfo(self.slot, Zone(self.zone), self.gpus, self.host)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


def later_life() -> int:
    """Of a slot whose lives nobody counts: milliseconds since 1970, so that one started at once is a later one, too."""
    return time.time_ns() // 1_000_000


def own_identity(slot: str, incarnation: int, zone: str, free: bool = False) -> Identity:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Identity(slot, incarnation, zone, own_host(), os.getpid(), devices, own_versions(), free)


@functools.cache  # some milliseconds, at each worker that joins
def own_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "pearl source": source_hash()}
    for package in CHECKED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def version_differences(worker: dict[str, str]) -> list[str]:
    """Lines 'package: driver has x, worker has y', empty if both run the same."""
    mine = own_versions()
    return [
        f"{name}: driver has {mine[name]}, worker has {worker.get(name)}"
        for name in mine
        if mine[name] != worker.get(name)
    ]


@functools.cache
def source_hash() -> str:
    """Hash of our four packages as they are imported here."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for folder in SOURCE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
