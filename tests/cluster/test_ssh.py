"""Slots over a real sshd on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from pearl.cluster.adapter import RequestFailed, SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.launcher import LaunchFailed, WorkerOrder
from pearl.cluster.launching import LaunchingAdapter
from pearl.cluster.local import LocalCluster
from pearl.cluster.reap import tagged
from pearl.cluster.ssh import SshLauncher, cause_of
from pearl.config.cluster import SshConfig
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import Zone
from pearl.core.requests import Cause
from pearl.errors import UserError
from tests.cluster.actors import Odd
from tests.cluster.servers import Sshd, sshd
from tests.cluster.support import EVENT_S, ROOT, START_S

TWO_GPUS = SlotShape(gpus=2)
pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "ssh") as server:
        yield server


def config(server: Sshd, **more: Any) -> SshConfig:
    fields: dict[str, Any] = {"hosts": ("here",), "devices": (0, 1, 2, 3), "options": server.options}
    return SshConfig(**{**fields, "directory": str(ROOT), **more})


class Setup:
    def __init__(self, folder: Path, config: SshConfig) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.cluster = LocalCluster(folder / "workers", lambda *_: None)
        self.launcher = SshLauncher(config, folder / "workers", width=2)
        self.cluster.launchers[Zone.PREEMPTIBLE] = self.launcher
        bindings = [Binding(f"preemptible-{i}", Zone.PREEMPTIBLE, (), 1, elsewhere=True) for i in range(3)]
        self.adapter = LaunchingAdapter(self.cluster, bindings, self.events.put_nowait, START_S)

    async def __aenter__(self) -> Setup:
        await self.cluster.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.adapter.close()
        await self.cluster.__aexit__(*error)
        assert tagged(f"{self.cluster.id}/") == []

    async def event(self, kind: type[Event]) -> Any:
        event = await asyncio.wait_for(self.events.get(), START_S + EVENT_S)
        assert isinstance(event, kind), event
        return event


@pytest.fixture
async def setup(server: Sshd, tmp_path: Path) -> AsyncIterator[Setup]:
    async with Setup(tmp_path, config(server, hosts=("nobody", "here"))) as setup:
        yield setup


async def test_slots_come_from_the_host_that_answers_serve_and_go_with_all_they_started(setup: Setup) -> None:
    await setup.adapter.connect()
    await setup.adapter.request(Zone.PREEMPTIBLE, 2, TWO_GPUS)
    joined: list[SlotJoined] = []
    failures: list[RequestFailed] = []
    while len(joined) < 2:
        event = await setup.event(Event)
        (joined if isinstance(event, SlotJoined) else failures).append(event)
    assert failures and {failure.cause for failure in failures} == {Cause.UNREACHABLE}
    assert all(failure.again_s == 0 for failure in failures), "the other host can be asked at once"
    gpus = sorted(event.slot.gpus for event in joined)
    assert [[gpu.rpartition("/")[2] for gpu in each] for each in gpus] == [["0", "1"], ["2", "3"]]
    assert not setup.launcher.room("here")

    name = joined[0].slot.name
    actor = await setup.cluster.create_actor(setup.cluster.workers[name], Odd, 30)
    pid = await actor.call("pid", timeout_s=30)
    assert psutil.Process(pid).parent() != psutil.Process(), "sshd is between us"
    child = psutil.Process(await actor.call("start_hanging_child", timeout_s=30))
    os.kill(pid, signal.SIGTERM)  # as its host would, before it goes
    assert (await setup.event(SlotNotice)).worker == name
    await setup.adapter.release([name])
    assert await setup.event(SlotLost) == SlotLost(name, joined[0].life, "given back")
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert setup.launcher.room("here")
    other = joined[1].slot.name
    os.kill(setup.cluster.workers[other].process.pid, signal.SIGKILL)  # the connection
    assert (await setup.event(SlotLost)).worker == other
    assert setup.events.empty()


async def test_a_host_that_does_not_know_the_key_is_refused_with_the_reason(server: Sshd, tmp_path: Path) -> None:
    launcher = SshLauncher(config(server, options=server.strange), tmp_path / "workers", width=2)
    with pytest.raises(UserError, match="Permission denied"):
        await launcher.check()
    order = WorkerOrder("c", "w-0", 1, "preemptible", "tcp://127.0.0.1:1", option="here")
    process = await launcher.start(order)
    await process.wait()
    failed = process.failed()
    assert isinstance(failed, LaunchFailed) and failed.cause is Cause.CREDENTIALS
    with pytest.raises(LaunchFailed, match="does not say what runs there"):
        await launcher.left("c")


async def test_nothing_is_left_on_a_host_that_was_never_reached(server: Sshd, tmp_path: Path) -> None:
    launcher = SshLauncher(config(server, hosts=("nobody", "here")), tmp_path, width=2)
    process = await launcher.start(WorkerOrder("c", "w-0", 1, "preemptible", "tcp://127.0.0.1:1", option="nobody"))
    await process.wait()
    failed = process.failed()
    assert isinstance(failed, LaunchFailed) and failed.cause is Cause.UNREACHABLE
    process.end()
    await process.ended()  # nobody has to say so
    assert launcher.room("nobody")


async def test_a_python_that_is_not_there_or_cannot_run_pearl_is_refused(server: Sshd, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"here does not say what runs there: .*/nowhere/python: No such file"):
        await SshLauncher(config(server, python="/nowhere/python"), tmp_path, width=2).check()
    with pytest.raises(UserError, match="here does not say what runs there: exit code 1"):
        await SshLauncher(config(server, python="/bin/false"), tmp_path, width=2).check()
    with pytest.raises(UserError, match="holds no slot of 8 GPUs"):
        await SshLauncher(config(server), tmp_path, width=8).check()


async def test_a_full_host_has_no_room_for_one_more(server: Sshd, tmp_path: Path) -> None:
    launcher = SshLauncher(config(server, devices=(0, 1)), tmp_path, width=2)
    order = WorkerOrder("c", "w-0", 1, "preemptible", "tcp://127.0.0.1:1", 2, option="here")
    tmp_path.mkdir(exist_ok=True)
    process = await launcher.start(order)
    with pytest.raises(LaunchFailed) as full:
        await launcher.start(replace(order, slot="w-1"))
    assert full.value.cause is Cause.CAPACITY
    process.end()
    await process.ended()


def test_what_ssh_says_is_a_cause() -> None:
    assert cause_of("root@h: Permission denied (publickey).") is Cause.CREDENTIALS
    assert cause_of("ssh: connect to host h port 22: Connection refused") is Cause.UNREACHABLE
    assert cause_of("env: 'python': No such file or directory") is Cause.CONFIGURATION
    assert cause_of("Killed") is Cause.OTHER
