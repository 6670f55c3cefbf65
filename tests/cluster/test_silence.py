"""Workers that are lost without a word: stopped, or behind a network that swallows everything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from pearl.cluster import local
from pearl.cluster.errors import ActorLost
from tests.cluster.support import EVENT_S, Watched


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Watched]:
    cluster = Watched(tmp_path / "workers", silent_loss_s=5)
    async with cluster.local:
        yield cluster


class Proxy:
    """Between workers and scheduler; once `cut`, it takes bytes from both and passes none on, connections open."""

    def __init__(self) -> None:
        self.cut = False

    async def start(self, target: str) -> str:
        self._target = target.removeprefix("tcp://").split(":")
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(*self._target)
        await asyncio.gather(self._pump(reader, back), self._pump(there, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not self.cut:
                    writer.write(data)
        if not self.cut:
            writer.close()


async def test_a_stopped_worker_is_lost_and_cannot_come_back(cluster: Watched) -> None:
    actor = await cluster.actor()
    await cluster.event("joined")
    pid = cluster.local.workers["w-0"].process.pid
    pending = asyncio.ensure_future(actor.call("never", timeout_s=EVENT_S))
    os.kill(pid, signal.SIGSTOP)
    left = await cluster.event("left")
    assert (left.reason, "event loop was silent" in left.detail) == ("lost", True)
    with pytest.raises(ActorLost, match="silent"):
        await pending
    assert (await asyncio.wait_for(cluster.left.get(), EVENT_S))[:2] == ("w-0", 1)
    await asyncio.wait_for(cluster.local.workers["w-0"].process.wait(), EVENT_S)  # killed, though it was stopped
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    assert await (await cluster.actor(incarnation=2)).call("echo", 1, timeout_s=30) == 1
    assert (await cluster.event("joined")).identity.incarnation == 2
    assert cluster.members.empty()


async def test_a_stopped_worker_that_nobody_can_kill_ends_itself_when_it_goes_on(
    cluster: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    await cluster.actor()
    await cluster.event("joined")
    process = cluster.local.workers["w-0"].process
    with monkeypatch.context() as patch:
        patch.setattr(cluster.local, "_end", lambda worker: None)  # as if it were on a machine that cannot be reached
        os.kill(process.pid, signal.SIGSTOP)
        assert (await cluster.event("left")).reason == "lost"
        os.kill(process.pid, signal.SIGCONT)
        assert await asyncio.wait_for(process.wait(), EVENT_S) == 0
    assert cluster.members.empty() and not cluster.local.scheduler.workers


async def test_a_worker_behind_a_cut_network_is_lost_and_killed(cluster: Watched) -> None:
    proxy = Proxy()
    cluster.local.contact = await proxy.start(cluster.local.scheduler.address)
    await cluster.actor()
    await cluster.event("joined")
    process = cluster.local.workers["w-0"].process
    proxy.cut = True
    left = await cluster.event("left")
    assert (left.reason, "event loop was silent" in left.detail) == ("lost", True)
    assert await asyncio.wait_for(process.wait(), EVENT_S) == -signal.SIGKILL


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Workers run in a network namespace of their own, and see the driver over one cable: its name, on our side."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("a network namespace needs root and iproute2")
    name, net = f"pearl{os.getpid()}", f"10.213.{os.getpid() % 254 + 1}"

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    inside = tmp_path / "python"
    # What starts a worker, with the address of the other end in the place of ours.
    inside.write_text(
        f"#!/bin/sh\nset -- $(echo \"$@\" | sed 's/--host {net}.1/--host {net}.2/')\n"
        f'exec ip netns exec {name} {sys.executable} "$@"\n'
    )
    inside.chmod(0o755)
    try:
        ip("netns", "add", name)
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        for where, device, address in (([], name, f"{net}.1"), (["-n", name], "eth0", f"{net}.2")):
            ip(*where, "addr", "add", f"{address}/30", "dev", device)
            ip(*where, "link", "set", device, "up")
        ip("-n", name, "link", "set", "lo", "up")
        monkeypatch.setattr(local, "HOST", f"{net}.1")
        monkeypatch.setattr(sys, "executable", str(inside))
        yield name
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace here: {error.stderr.decode()}")
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


async def test_a_worker_whose_cable_is_cut_is_lost_with_its_calls_and_killed(namespace: str, cluster: Watched) -> None:
    actor = await cluster.actor()
    await cluster.event("joined")
    process = cluster.local.workers["w-0"].process
    pending = asyncio.ensure_future(actor.call("never", timeout_s=EVENT_S))
    while not await actor.call("has_entered", timeout_s=EVENT_S):
        pass
    await asyncio.to_thread(subprocess.run, ["ip", "link", "set", namespace, "down"], check=True)
    assert (await cluster.event("left")).reason == "lost"
    with pytest.raises(ActorLost):
        await pending
    assert await asyncio.wait_for(process.wait(), EVENT_S) == -signal.SIGKILL


async def test_a_lost_life_is_refused_and_nothing_revives_it(cluster: Watched) -> None:
    await cluster.actor(incarnation=3)
    await cluster.event("joined")
    process = cluster.local.workers["w-0"].process
    os.kill(process.pid, signal.SIGKILL)
    assert (await cluster.event("left")).identity.incarnation == 3
    assert await asyncio.wait_for(process.wait(), EVENT_S) == -signal.SIGKILL  # some moments after its connection
    with pytest.raises(ActorLost, match=r"(?s)the worker did not join.*w-0 left as life 3; life 3 is over"):
        await cluster.actor(incarnation=3)
    mine = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert not [line for line in mine if "pearl.cluster.worker" in line]  # no nanny started another one
    assert not cluster.local.scheduler.workers and cluster.members.empty()
