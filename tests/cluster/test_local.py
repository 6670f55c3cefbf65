"""The local cluster and calls to actors, on real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.binding import bind
from pearl.cluster.errors import ActorCallFailed, ActorLost, ActorTimeout
from pearl.cluster.identity import own_versions, version_differences
from pearl.cluster.local import LocalCluster
from pearl.config.load import make_config
from pearl.errors import UserError
from tests.cluster.actors import Odd

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {"PYTHONPATH": str(ROOT)}
START_S = 90.0


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.left: asyncio.Queue[tuple[str, int, str]] = asyncio.Queue()
        self.local = LocalCluster(folder, lambda *event: self.left.put_nowait(event))

    async def actor(self, slot: str = "w-0", incarnation: int = 1) -> ActorRef:
        worker = await self.local.start_worker(slot, incarnation, "reserved", ENVIRONMENT, START_S)
        return await self.local.create_actor(worker, Odd, 30)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path / "workers")
    async with cluster.local:
        yield cluster


async def test_calls_answer_fail_and_time_out_in_their_own_ways(cluster: Cluster) -> None:
    actor = await cluster.actor()
    assert await actor.call("echo", {"a": [1, 2.5, b"x", None]}, timeout_s=10) == {"a": [1, 2.5, b"x", None]}
    with pytest.raises(ActorCallFailed, match=r"w-0#1\.raises: what went wrong") as failed:
        await actor.call("raises", timeout_s=10)
    assert failed.value.kind == "ValueError"
    with pytest.raises(ActorTimeout, match=r"w-0#1\.never did not answer within 0\.2 s"):
        await actor.call("never", timeout_s=0.2)
    for method in ("unpackable", "raises_unpicklable"):
        with pytest.raises(ActorCallFailed, match=method):
            await actor.call(method, timeout_s=10)
    assert await actor.call("echo", 1, timeout_s=10) == 1


async def test_plain_methods_run_outside_the_event_loop(cluster: Cluster) -> None:
    actor = await cluster.actor()
    assert "actor" in (await actor.call("thread", timeout_s=10)).lower()


async def test_a_killed_worker_fails_its_calls_at_once_and_is_reported(cluster: Cluster) -> None:
    actor = await cluster.actor()
    pid = await actor.call("pid", timeout_s=10)
    pending = asyncio.ensure_future(actor.call("never", timeout_s=60))
    while not await actor.call("has_entered", timeout_s=10):
        pass
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorLost):
        await pending
    assert time.monotonic() - began < 10
    slot, incarnation, reason = await asyncio.wait_for(cluster.left.get(), 10)
    assert (slot, incarnation) == ("w-0", 1) and str(pid) in reason
    with pytest.raises(ActorLost):
        await actor.call("echo", 1, timeout_s=10)


async def test_what_a_killed_worker_had_started_is_gone_too_when_its_end_is_told(cluster: Cluster) -> None:
    actor = await cluster.actor()
    child = psutil.Process(await actor.call("start_hanging_child", timeout_s=10))
    await cluster.local.kill("w-0")
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


async def test_a_slot_lives_again_as_another_incarnation(cluster: Cluster) -> None:
    first = await cluster.actor(incarnation=1)
    second = await cluster.actor(incarnation=2)
    assert await second.call("echo", "x", timeout_s=10) == "x"
    with pytest.raises(ActorLost):
        await first.call("echo", "x", timeout_s=10)


async def test_a_worker_that_cannot_start_says_its_last_words(cluster: Cluster) -> None:
    path = cluster.local.log_directory / "elsewhere"
    path.mkdir()
    (path / "distributed.py").write_text("import no_such_module")
    with pytest.raises(ActorLost, match=r"(?s)ended while it started.*exit code 1.*No module named"):
        await cluster.local.start_worker("w-0", 1, "reserved", {"PYTHONPATH": f"{path}:{ROOT}"}, START_S)


async def test_a_worker_that_does_not_join_in_time_is_killed(cluster: Cluster) -> None:
    with pytest.raises(ActorTimeout, match="worker_start_s"):
        await cluster.local.start_worker("w-0", 1, "reserved", ENVIRONMENT, 0.01)
    assert not cluster.local.workers


def test_workers_end_with_a_killed_driver(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from pearl.cluster.local import LocalCluster
from tests.cluster.actors import Odd
async def main():
    async with LocalCluster(pathlib.Path({str(tmp_path)!r}), print) as cluster:
        worker = await cluster.start_worker("w-0", 1, "reserved", {ENVIRONMENT!r}, {START_S})
        print(worker.process.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT}
    )
    assert driver.stdout is not None
    worker = psutil.Process(int(driver.stdout.readline()))
    driver.kill()
    driver.wait()
    worker.wait(timeout=30)  # raises TimeoutExpired if it lives on


def test_other_code_or_packages_are_named() -> None:
    mine = own_versions()
    assert version_differences(mine) == []
    (line,) = version_differences({**mine, "torch": "0.1"})
    assert line == f"torch: driver has {mine['torch']}, worker has 0.1"


def test_slots_get_their_devices_in_order_and_too_few_gpus_are_refused() -> None:
    config = make_config(
        {"trainer": {"ranks": 2}, "cluster": {"rollout_workers": 2}, "engine": {"tensor_parallel": 2}}, "test"
    )
    bindings = bind(config, gpus=6)
    assert {slot: b.devices for slot, b in bindings.items() if b.devices} == {
        "trainer-0": (0,),
        "trainer-1": (1,),
        "rollout-0": (2, 3),
        "rollout-1": (4, 5),
    }
    with pytest.raises(UserError, match="need 6 GPUs, this machine has 4"):
        bind(config, gpus=4)
    assert all(not b.devices for b in bind(config, gpus=0).values())


async def test_the_scheduler_listens_on_loopback_at_the_port_that_was_asked_for(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with LocalCluster(tmp_path, print, port) as cluster:
        assert cluster.scheduler.address == f"tcp://127.0.0.1:{port}"
        listening = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in listening} <= {"127.0.0.1"}
