"""A cluster that was started by hand, over TLS: who serves a driver, what is left of it, and what a loss means."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pearl.cluster.adapter import RequestFailed, SlotShape
from pearl.cluster.certificates import Certificates
from pearl.cluster.existing import ExistingAdapter, ExistingCluster, probe
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import Zone
from pearl.core.requests import Cause
from pearl.errors import UserError
from tests.cluster.actors import Odd
from tests.cluster.hand_started import HandStarted
from tests.cluster.support import ENVIRONMENT, EVENT_S, ROOT, START_S

CPU = SlotShape(gpus=0)
pytestmark = pytest.mark.slow


@pytest.fixture
def started(tmp_path: Path) -> Iterator[HandStarted]:
    tls = Certificates.make(tmp_path / "tls").directory
    with HandStarted(tmp_path, tls) as started:
        yield started


class Driver:
    """A driver's half: the cluster and the adapter, with the events in a queue."""

    def __init__(self, started: HandStarted) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        tls = Certificates(started.tls) if started.tls else None
        self.cluster = ExistingCluster(started.address, started.folder, lambda *_: None, host="127.0.0.1", tls=tls)
        self.cluster.on_scheduler_lost = self.lost.put_nowait
        self.adapter = ExistingAdapter(self.cluster, self.events.put_nowait)

    async def __aenter__(self) -> Driver:
        await self.cluster.__aenter__()
        await self.adapter.connect()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.adapter.close()
        await self.cluster.__aexit__(*error)

    async def event(self, kind: type[Event]) -> Any:
        event = await asyncio.wait_for(self.events.get(), START_S + EVENT_S)
        assert isinstance(event, kind), event
        return event

    async def joined(self, count: int) -> dict[str, SlotJoined]:
        """By name, whatever else is told meanwhile."""
        found: dict[str, SlotJoined] = {}
        while len(found) < count:
            if isinstance(event := await self.event(Event), SlotJoined):
                found[event.slot.name] = event
        return found

    async def actor(self, slot: str) -> Any:
        return await self.cluster.create_actor(self.cluster.workers[slot], Odd, 30)


async def test_slots_serve_one_driver_after_the_other_each_in_a_fresh_life(started: HandStarted) -> None:
    pid = started.worker("a-0")
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 2, CPU)
        first = await driver.event(RequestFailed if driver.adapter.here.slots == {} else SlotJoined)
        joined = first if isinstance(first, SlotJoined) else await driver.event(SlotJoined)
        assert joined.slot.name == "a-0" and joined.slot.zone == Zone.PREEMPTIBLE
        actor = await driver.actor("a-0")
        assert await actor.call("pid", timeout_s=30) == pid
        child = psutil.Process(await actor.call("start_hanging_child", timeout_s=30))
        own = await driver.cluster.start_worker("rollout-0", 1, "reserved", ENVIRONMENT, START_S)
        assert str(own.address).startswith("tls://127.0.0.1")
        with pytest.raises(UserError, match="another driver is connected"):
            await Driver(started).__aenter__()
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        event = await driver.event(Event)  # of the life that ends, or of the next one
        while not (isinstance(event, SlotJoined) and event.life > joined.life):
            event = await driver.event(Event)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the first driver's engine is gone"
        assert await (await driver.actor("a-0")).call("pid", timeout_s=30) == pid, "in the same process"
        own = await driver.cluster.start_worker("rollout-0", 1, "reserved", ENVIRONMENT, START_S)
        assert own.incarnation == 1, "the lives of a driver's own slots are counted anew"


DRIVER = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
from tests.cluster.test_existing import CPU, Driver, Zone
from tests.cluster.support import ENVIRONMENT, START_S
async def main():
    address, folder, tls = sys.argv[1:]
    async with Driver(SimpleNamespace(address=address, folder=Path(folder), tls=Path(tls))) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 2, CPU)
        joined = await driver.joined(2)
        children = [await (await driver.actor(slot)).call("start_hanging_child", timeout_s=30) for slot in joined]
        own = await driver.cluster.start_worker("rollout-0", 1, "reserved", ENVIRONMENT, START_S)
        lives = [event.life for _, event in sorted(joined.items())]
        print(*lives, own.process.pid, *children, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_workers_of_a_killed_driver_begin_anew_and_serve_the_next_one(started: HandStarted) -> None:
    pids = {slot: started.worker(slot) for slot in ("a-0", "a-1")}
    line = [sys.executable, "-c", DRIVER, started.address, str(started.folder), str(started.tls)]
    pipe = asyncio.subprocess.PIPE
    killed = await asyncio.create_subprocess_exec(*line, stdout=pipe, cwd=ROOT, env={**os.environ, **ENVIRONMENT})
    assert killed.stdout is not None
    *lives, own, one, other = map(int, (await asyncio.wait_for(killed.stdout.readline(), 2 * START_S)).split())
    others = [psutil.Process(pid) for pid in (own, one, other)]
    killed.kill()
    await killed.wait()
    gone, left = await asyncio.to_thread(psutil.wait_procs, others, EVENT_S)
    assert len(gone) == 3 and not left, "its own worker, and what ran in theirs"
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 2, CPU)
        joined = await driver.joined(2)
        assert [joined[slot].life for slot in pids] == [life + 1 for life in lives]
        for slot, pid in pids.items():
            assert await (await driver.actor(slot)).call("pid", timeout_s=30) == pid


async def test_what_is_asked_for_is_taken_and_what_is_given_back_begins_anew(started: HandStarted) -> None:
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        started.worker("a-0")
        assert (await driver.event(RequestFailed)).cause is Cause.CAPACITY
        joined = await driver.event(SlotJoined)
        started.worker("a-1")
        seen = asyncio.Event()
        driver.cluster.watch(lambda event: seen.set() if event.identity.slot == "a-1" else None)
        await asyncio.wait_for(seen.wait(), START_S)  # it is here, and nobody asked
        assert driver.events.empty()
        await driver.adapter.release(["a-0"])
        assert await driver.event(SlotLost) == SlotLost("a-0", joined.life, "given back")
        assert driver.adapter.plan == {Zone.PREEMPTIBLE: 0}
        await driver.adapter.request(Zone.PREEMPTIBLE, 2, CPU)
        names = {(await driver.event(SlotJoined)).slot.name}
        event = await driver.event(Event)
        names.add((event if isinstance(event, SlotJoined) else await driver.event(SlotJoined)).slot.name)
        assert names == {"a-0", "a-1"}
        os.kill(started.processes["a-1"].pid, signal.SIGTERM)
        assert (await driver.event(SlotNotice)).worker == "a-1"
        os.kill(started.processes["a-1"].pid, signal.SIGKILL)
        assert (await driver.event(SlotLost)).worker == "a-1"


async def test_a_slot_that_cannot_serve_is_named_with_the_reason(
    started: HandStarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 1, SlotShape(gpus=2))
        started.worker("a-0")
        assert (await driver.event(RequestFailed)).cause is Cause.CAPACITY
        failed = await driver.event(RequestFailed)
        assert failed.reason == "a-0 cannot serve: it has 0 GPUs (CUDA_VISIBLE_DEVICES), an engine takes 2"
        said = "torch: driver has 1, worker has 2"
        monkeypatch.setattr("pearl.cluster.existing.version_differences", lambda versions: [said])
        started.worker("a-1")
        failed = await driver.event(RequestFailed)
        assert failed.cause is Cause.CONFIGURATION and failed.reason == f"a-1 cannot serve: it runs other code: {said}"


async def test_when_the_scheduler_is_lost_the_driver_is_told_and_the_workers_end(
    started: HandStarted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pearl.cluster.membership.RESYNC_S", 1.0)
    started.worker("a-0")
    async with Driver(started) as driver:
        await driver.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        while not isinstance(await driver.event(Event), SlotJoined):
            pass
        started.processes["scheduler"].kill()
        worker = started.processes["a-0"]
        await asyncio.to_thread(worker.wait, EVENT_S)
        assert await asyncio.wait_for(driver.lost.get(), EVENT_S)
        assert driver.lost.empty(), "once"


async def test_an_address_that_does_not_answer_or_is_of_another_cluster_is_refused(
    started: HandStarted, tmp_path: Path
) -> None:
    identity = await probe(started.address, Certificates(tmp_path / "tls"))
    assert identity["type"] == "Scheduler"
    foreign = Certificates.make(tmp_path / "foreign")
    for address, tls in ((started.address, foreign), (started.address.replace("tls", "tcp"), None)):
        with pytest.raises(UserError, match=r"no Dask scheduler answers at cluster\.address .*other certificates"):
            await probe(address, tls)
