"""Snapshots between hosts that share only cables: two network namespaces, and this one as the trainer's host.

trainer (this namespace) ── a (slots a-0, a-1)
                         ── b (slot b-0)          a ── b
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from pearl.cluster import local
from pearl.cluster.identity import own_host
from pearl.core.events import Event
from pearl.live.measured import WeightsCopied
from pearl.live.snapshots import HostSnapshots
from pearl.live.waits import WaitTable
from pearl.weights.snapshot import DATA, read_tensors, snapshot_directory, write_snapshot
from tests.cluster.support import ENVIRONMENT, START_S, Watched

FETCH_S = 60.0
OVERHEAD = 1.1
"""Of TCP, of Dask's messages and of a quarter of a second of heartbeats, on 24 MB."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@dataclass(frozen=True)
class Cables:
    """Names of the two namespaces, and of our ends of their cables."""

    a: str
    b: str

    def left(self) -> int:
        """Bytes that have left this host."""
        counts = (Path(f"/sys/class/net/{name}/statistics/tx_bytes") for name in (self.a, self.b))
        return sum(int(count.read_text()) for count in counts)

    def cut_between(self) -> None:
        ip("-n", self.a, "link", "set", "eth1", "down")


@pytest.fixture
def cables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cables]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and iproute2")
    a, b, net = f"pa{os.getpid()}", f"pb{os.getpid()}", f"10.214.{os.getpid() % 254 + 1}"
    inside = tmp_path / "python"
    inside.write_text(  # what starts a worker: in the namespace and with the address of its slot
        f'#!/bin/sh\ncase "$*" in\n*"--slot a-"*) space={a} own={net}.2 ;;\n*"--slot b-"*) space={b} own={net}.6 ;;\n'
        f'*) exec {sys.executable} "$@" ;;\nesac\n'
        f'set -- $(echo "$@" | sed "s/--host {net}.1/--host $own/")\n'
        f'exec ip netns exec $space {sys.executable} "$@"\n'
    )
    inside.chmod(0o755)
    try:
        for name, ours, theirs in ((a, f"{net}.1", f"{net}.2"), (b, f"{net}.5", f"{net}.6")):
            ip("netns", "add", name)
            ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("addr", "add", f"{ours}/30", "dev", name)
            ip("-n", name, "addr", "add", f"{theirs}/30", "dev", "eth0")
            for where, device in (([], name), (["-n", name], "eth0"), (["-n", name], "lo")):
                ip(*where, "link", "set", device, "up")
            ip("-n", name, "route", "add", "default", "via", ours)
        ip("-n", a, "link", "add", "eth1", "type", "veth", "peer", "name", "eth1", "netns", b)
        for name, own, other, target in ((a, ".9", ".10", ".6"), (b, ".10", ".9", ".2")):
            ip("-n", name, "addr", "add", f"{net}{own}/30", "dev", "eth1")
            ip("-n", name, "link", "set", "eth1", "up")
            ip("-n", name, "route", "add", f"{net}{target}/32", "via", f"{net}{other}")
        monkeypatch.setattr(local, "HOST", f"{net}.1")
        monkeypatch.setattr(sys, "executable", str(inside))
        yield Cables(a, b)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace here: {error.stderr.decode()}")
    finally:
        for name in (a, b):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


async def test_weights_leave_the_trainers_host_once_for_all_hosts_and_slots(cables: Cables, tmp_path: Path) -> None:
    root = tmp_path / f"pearl-{os.getpid()}-0-{random.getrandbits(32):x}"
    told: list[Event] = []
    cluster = Watched(tmp_path / "workers")
    async with cluster.local:
        for slot in ("t-0", "a-0", "a-1", "b-0"):
            host = {} if slot == "t-0" else {"PEARL_HOST": slot[0]}
            await cluster.local.start_worker(slot, 1, "reserved", {**ENVIRONMENT, **host}, START_S)
        present = cluster.local.membership.present
        assert {slot: member.identity.host for slot, member in present.items()} == {
            "t-0": own_host(), "a-0": "a", "a-1": "a", "b-0": "b",
        }  # fmt: skip
        made = HostSnapshots(cluster.local, WaitTable(), root, told.append)

        async def bring(version: int) -> tuple[list[Path], float]:
            """Where each slot has it, and how many copies left this host."""
            write_snapshot(root, version, "shape", ((f"t{i}", torch.randn(1_000_000)) for i in range(6)))
            size, before = (snapshot_directory(root, version) / DATA).stat().st_size, cables.left()
            slots = ("t-0", "a-0", "a-1", "b-0")
            found = await asyncio.gather(*(made.at(slot, version, (), FETCH_S) for slot in slots))
            return found, (cables.left() - before) / size

        found, copies = await bring(1)
        assert found[0] == snapshot_directory(root, 1) and found[1] == found[2] and len(set(found)) == 3
        original = dict(read_tensors(found[0]))
        for directory in found[1:]:
            assert all(torch.equal(tensor, original[name]) for name, tensor in read_tensors(directory))
        assert 1.0 <= copies < OVERHEAD
        copied = [event for event in told if isinstance(event, WeightsCopied)]
        assert sorted((event.host, sum(event.bytes_from.values())) for event in copied) == [
            ("a", 24_000_000), ("b", 24_000_000),
        ]  # fmt: skip

        await made.retire(1)
        assert [directory.exists() for directory in found] == [True, False, False, False], "ours is the trainer's"

        cables.cut_between()
        found, copies = await bring(2)
        assert 2.0 <= copies < 2 * OVERHEAD, "b turned to the trainer's host"
        assert all(directory.exists() for directory in found)
        await made.close()
        assert [directory.exists() for directory in found] == [True, False, False, False]
