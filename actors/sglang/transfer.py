"""KV transfer between engines: whether this machine can, over which interface, and what a server needs for it.

Mooncake carries KV from a prefill to a decode engine: over RDMA between GPUs, over TCP between CPUs, by way of one
network interface that the user names. None of its ports asks who calls, so they listen on that interface only (see
`listen`), and an engine with another one does not serve.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any, Literal

import psutil

from actors.sglang.listen import KV_HOST, strays
from pearl.errors import UserError

HEARTBEAT_S = 2
"""How often a decode engine asks the prefill engines that it knows whether they live; two silences are a death."""
HOLD_S = 10
"""How long a decode engine keeps the room of a broken transfer, lest a late write of the other side hit foreign KV."""


@dataclass(frozen=True, slots=True)
class KvEndpoint:
    """Where an engine takes and hands on KV; as a dict it travels to the other half of a pair."""

    host: str
    """Address of the named interface."""
    port: int
    """Bootstrap port, at which the two halves find each other."""
    tensor_parallel: int
    """Both halves must be cut alike: heads are transferred rank to rank."""

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)


def missing() -> UserError | None:
    """What KV transfer lacks here, None if nothing. Prefill-decode serving is off without it."""
    if find_spec("mooncake") is None:
        return UserError(
            "KV transfer between engines needs Mooncake, which is not installed",
            "Run `pip install --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1`; "
            "on a GPU install `pearl-rl[gpu]`.",
        )
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return UserError(
            "KV transfer between engines needs libibverbs.so.1, also where it runs over TCP, and this machine lacks it",
            "Run `apt-get install libibverbs1` (Debian, Ubuntu) or `dnf install libibverbs` (Fedora, RHEL).",
        )
    return None


def interface_address(interface: str) -> str:
    """IPv4 address of a network interface of this host. UserError if there is none."""
    addresses = psutil.net_if_addrs()
    for address in addresses.get(interface, ()):
        if address.family is socket.AF_INET:
            return str(address.address)
    known = ", ".join(name for name, all_ in addresses.items() if any(a.family is socket.AF_INET for a in all_))
    raise UserError(
        f"the KV interface {interface!r} has no IPv4 address on {socket.gethostname()}",
        f"Name one of {known}: the one that only the cluster reaches.",
    )


def require_private(kv: KvEndpoint, pids: Iterable[int]) -> None:
    """UserError if one of an engine's processes listens where others than the cluster may reach it."""
    open_ = sorted({listener for pid in pids for listener in strays(kv.host, pid)})
    if open_:
        where = ", ".join(f"{listener.host}:{listener.port}" for listener in open_)
        raise UserError(
            f"the engine listens on {where}, beyond its KV interface ({kv.host}), where nobody is asked who he is",
            "Set elastic.prefill_decode to false, or install the Mooncake that this release was run with (0.3.13).",
        )


def flags(kv: KvEndpoint, device: Literal["cpu", "cuda"], max_running_requests: int) -> list[str]:
    """One set for every role: a server starts as decode, which sizes all pools for any role, and is switched then."""
    made = [
        "--disaggregation-mode", "decode",
        "--disaggregation-bootstrap-port", str(kv.port),
        "--disaggregation-transfer-backend", "mooncake_tcp" if device == "cpu" else "mooncake",
        "--disaggregation-decode-extra-slots", str(2 * max_running_requests),
        # The prefix cache stays on in every role; a pair with it on one side only ends in a crash.
        "--disaggregation-decode-enable-radix-cache",
        "--enable-pd-role-switch",
    ]  # fmt: skip
    if device == "cpu":
        made += ["--disable-overlap-schedule", "--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return made


def environment(kv: KvEndpoint) -> dict[str, str]:
    return {
        "SGLANG_HOST_IP": kv.host,
        KV_HOST: kv.host,
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": str(HEARTBEAT_S),
        "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": str(HOLD_S),
    }
