"""The local adapter and the follower of availability, with real worker processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pearl.cluster.adapter import ClusterAdapter, RequestFailed, SlotShape
from pearl.cluster.availability import AvailabilityFollower, preemptible_bindings
from pearl.cluster.binding import Binding
from pearl.cluster.local_adapter import LocalAdapter
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import SlotInfo, Zone
from pearl.errors import UserError
from pearl.sim.availability import read
from tests.cluster.support import EVENT_S, START_S, Watched

CPU = SlotShape(gpus=0)
TWO_GPUS = SlotShape(gpus=2)


class Setup:
    """An adapter with two reserved slots and some preemptible ones; its events wait in a queue."""

    def __init__(self, folder: Path, preemptible: list[Binding], offered: bool) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.cluster = Watched(folder)
        reserved = [Binding(f"reserved-{i}", "reserved", (2 * i, 2 * i + 1), 1) for i in range(2)]
        self.adapter = LocalAdapter(
            self.cluster.local, [*reserved, *preemptible], self.events.put_nowait, START_S, offered
        )

    async def event(self, kind: type[Event]) -> Any:
        event = await asyncio.wait_for(self.events.get(), START_S + EVENT_S)
        assert isinstance(event, kind), event
        return event

    async def __aenter__(self) -> Setup:
        await self.cluster.local.__aenter__()
        await self.adapter.connect()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.adapter.close()
        assert not self.adapter.requested
        await self.cluster.local.__aexit__(*error)


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    bindings = [Binding("preemptible-0", "preemptible", (), 1)]
    async with Setup(tmp_path / "workers", bindings, offered=False) as setup:
        yield setup


async def test_a_request_is_a_level_and_what_is_given_back_is_gone(setup: Setup) -> None:
    adapter: ClusterAdapter = setup.adapter
    for _ in range(3):
        await adapter.request(Zone.RESERVED, 1, TWO_GPUS)
    assert list(setup.adapter.requested) == ["reserved-0"] and not adapter.observed()
    joined = await setup.event(SlotJoined)
    host = joined.slot.host
    info = SlotInfo("reserved-0", Zone.RESERVED, (f"{host}/0", f"{host}/1"), host)
    assert joined == SlotJoined(info, 1)
    assert setup.adapter.plan == {Zone.RESERVED: 1} and not setup.adapter.requested
    assert adapter.observed()["reserved-0"].slot == info
    await adapter.request(Zone.RESERVED, 1, TWO_GPUS)
    assert not setup.adapter.requested
    await adapter.release(["reserved-0", "reserved-1", "nobody"])
    assert await setup.event(SlotLost) == SlotLost("reserved-0", 1, "given back")
    await adapter.release(["reserved-0"])
    assert setup.adapter.plan == {Zone.RESERVED: 0} and not adapter.observed()
    await adapter.request(Zone.RESERVED, 2, TWO_GPUS)
    assert set(setup.adapter.requested) == {"reserved-0", "reserved-1"}
    await adapter.request(Zone.RESERVED, 1, TWO_GPUS)  # withdraws one
    again = await setup.event(SlotJoined)
    assert len(adapter.observed()) == 1 and again.life == (2 if "reserved-0" in adapter.observed() else 1)
    while setup.adapter.requested:
        await asyncio.wait([request.task for request in setup.adapter.requested.values()])
    assert setup.events.empty()  # a withdrawn request is no failure


async def test_what_is_released_is_not_asked_for_again_and_no_more_than_that(setup: Setup) -> None:
    await setup.adapter.request(Zone.RESERVED, 2, TWO_GPUS)
    for _ in range(2):
        await setup.event(SlotJoined)
    await setup.adapter.request(Zone.RESERVED, 1, TWO_GPUS)  # ends nothing
    assert len(setup.adapter.observed()) == 2 and setup.events.empty()
    await setup.adapter.release(["reserved-0"])  # one too many was there: the plan stands
    await setup.event(SlotLost)
    assert setup.adapter.plan == {Zone.RESERVED: 1} and not setup.adapter.requested
    await setup.adapter.release(["reserved-1"])
    await setup.event(SlotLost)
    assert setup.adapter.plan == {Zone.RESERVED: 0} and not setup.adapter.requested


async def test_a_request_that_was_withdrawn_can_be_made_again_at_once(setup: Setup) -> None:
    for n in (1, 0, 1):
        await setup.adapter.request(Zone.RESERVED, n, TWO_GPUS)
    assert (await setup.event(SlotJoined)).slot.name in setup.adapter.observed()
    assert setup.events.empty() and not setup.adapter.requested


async def test_what_this_machine_does_not_have_is_refused_with_the_reason(setup: Setup) -> None:
    four = SlotShape(gpus=4)
    await setup.adapter.request(Zone.RESERVED, 3, four)
    reason = "this machine has 0 reserved slots of 4 GPUs, 2 more are of another shape"
    assert await setup.event(RequestFailed) == RequestFailed(Zone.RESERVED, 3, four, reason)
    assert not setup.adapter.requested and setup.adapter.plan == {Zone.RESERVED: 0}


async def test_a_worker_that_cannot_start_is_a_failed_request(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = setup.cluster.local.log_directory / "broken"
    broken.mkdir()
    (broken / "distributed.py").write_text("import no_such_module")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    setup.adapter.offer("preemptible-0")
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
    failed = await setup.event(RequestFailed)
    assert "preemptible-0" in failed.reason and "No module named" in failed.reason
    assert not setup.adapter.requested and setup.events.empty()
    monkeypatch.undo()
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)  # asked again
    assert (await setup.event(SlotJoined)).life == 2


async def test_a_slot_that_is_taken_before_it_joined_is_a_failed_request(setup: Setup) -> None:
    setup.adapter.offer("preemptible-0")
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
    await setup.adapter.take("preemptible-0")
    failed = await setup.event(RequestFailed)
    assert failed.reason == "preemptible-0: taken back by the cloud"
    assert not setup.adapter.requested and not setup.cluster.local.workers


async def test_a_worker_with_other_code_is_a_failed_request_and_ends(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pearl.cluster.cluster.version_differences", lambda versions: ["torch: driver has 1, worker has 2"]
    )
    setup.adapter.offer("preemptible-0")
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
    failed = await setup.event(RequestFailed)
    assert failed.reason == "preemptible-0 runs other code: torch: driver has 1, worker has 2"
    assert not setup.cluster.local.workers and not setup.adapter.observed()
    await setup.cluster.event("left")
    assert setup.events.empty()


async def test_a_slot_under_notice_that_is_given_back_is_replaced_by_another_that_is_offered(tmp_path: Path) -> None:
    bindings = [Binding(f"preemptible-{i}", "preemptible", (), 1) for i in range(2)]
    async with Setup(tmp_path / "workers", bindings, offered=True) as setup:
        setup.adapter.grace(1000)
        await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        assert (await setup.event(SlotJoined)).slot.name == "preemptible-0"
        setup.adapter.warn("preemptible-0")
        assert (await setup.event(SlotNotice)).worker == "preemptible-0"
        seconds = setup.adapter.observed()["preemptible-0"].seconds_left
        assert seconds is not None and 0 < seconds <= 1000
        await setup.adapter.release(["preemptible-0"])
        assert await setup.event(SlotLost) == SlotLost("preemptible-0", 1, "given back")
        assert setup.adapter.plan == {Zone.PREEMPTIBLE: 1}
        assert (await setup.event(SlotJoined)).slot.name == "preemptible-1"
        await setup.adapter.take("preemptible-1")
        assert (await setup.event(SlotLost)).reason == "taken back by the cloud"
        assert not setup.adapter.requested and setup.events.empty()


async def test_a_slot_that_left_on_notice_can_be_asked_for_again(tmp_path: Path) -> None:
    """Where nobody plays the cloud: at once it is not replaced, the next request may have it."""
    async with Setup(tmp_path / "workers", [Binding("preemptible-0", "preemptible", (), 1)], offered=True) as setup:
        setup.adapter.grace(1000)
        await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        await setup.event(SlotJoined)
        setup.adapter.warn("preemptible-0")
        await setup.event(SlotNotice)
        await setup.adapter.release(["preemptible-0"])
        await setup.event(SlotLost)
        assert not setup.adapter.requested
        await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
        assert (await setup.event(SlotJoined)).life == 2


async def test_connecting_twice_tells_nothing_twice(setup: Setup) -> None:
    await setup.adapter.connect()
    setup.adapter.offer("preemptible-0")
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
    await setup.event(SlotJoined)
    await setup.adapter.release(["preemptible-0"])
    await setup.event(SlotLost)
    assert setup.events.empty()


async def test_a_crash_is_a_loss_and_the_slot_comes_back_on_request_only(setup: Setup) -> None:
    setup.adapter.offer("preemptible-0")
    assert not setup.adapter.requested  # nobody wants it
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
    await setup.event(SlotJoined)
    os.kill(setup.cluster.local.workers["preemptible-0"].process.pid, signal.SIGKILL)
    lost = await setup.event(SlotLost)
    assert lost.life == 1 and lost.reason.startswith("lost: its connection broke")
    assert not setup.adapter.requested
    await setup.adapter.request(Zone.PREEMPTIBLE, 1, CPU)
    assert (await setup.event(SlotJoined)).life == 2


async def test_slots_come_get_notice_and_go_as_the_trace_says(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"events": [[0, 4], [200, 2], [300, 4]]}')
    availability = read(path, most_gpus=16, gpus_per_node=8)
    bindings = preemptible_bindings(availability, 2, (), 1)
    async with Setup(tmp_path / "workers", bindings, offered=False) as setup:
        follower = AvailabilityFollower(setup.adapter, availability, 2, notice_s=100, scale=0.2, seed=3)
        await setup.adapter.request(Zone.PREEMPTIBLE, 2, CPU)
        victim = ""
        for _, change in follower.changes:  # as `run` does, but at the pace of this machine
            await follower.apply(change)
            match change, await setup.event(type(change)):
                case SlotJoined(), SlotJoined(slot=slot, life=life):
                    assert (slot.name, life) == (change.slot.name, change.life)
                case SlotNotice(), SlotNotice(worker=victim, life=1, seconds_left=seconds):
                    assert victim == change.worker and 0 < seconds <= 20
                case SlotLost(), lost:
                    assert lost == SlotLost(victim, 1, "taken back by the cloud") == change
    assert [type(change) for _, change in follower.changes] == [
        SlotJoined,
        SlotJoined,
        SlotNotice,
        SlotLost,
        SlotJoined,
    ]


async def test_a_trace_goes_on_in_the_middle_with_the_slots_that_are_there_then() -> None:
    """Four slots join; one is gone, one has its notice, one leaves later, and one more comes."""
    recorder: Any = Recorder()
    availability = [(0.0, 4), (100.0, 3), (200.0, 2), (300.0, 1), (320.0, 2)]
    follower = AvailabilityFollower(recorder, availability, 1, notice_s=30, scale=0.001, seed=0)
    whole = [(type(change).__name__, seconds) for seconds, change in follower.changes]
    assert [kind for kind, seconds in whole if seconds <= 180] == ["SlotJoined"] * 4 + [
        "SlotNotice", "SlotLost", "SlotNotice",
    ]  # fmt: skip
    gone = {change.worker for seconds, change in follower.changes if seconds <= 180 and isinstance(change, SlotNotice)}
    run = asyncio.create_task(follower.run(180.0))
    await asyncio.sleep(0)
    assert follower.seconds == pytest.approx(180, abs=10)
    await run
    assert follower.seconds >= 320
    offered = [slot for kind, slot, _ in recorder.did[:2] if kind == "joined"]
    assert len(offered) == 2 and not gone & set(offered)
    assert [kind for kind, _, _ in recorder.did[2:]] == ["lost", "notice", "lost", "joined"]
    assert recorder.did[2][1] in gone, "it is taken at its time, though it was not offered again"


class Recorder:
    """An adapter that notes what it is told to do."""

    def __init__(self) -> None:
        self.did: list[tuple[str, str, float]] = []
        self.began = asyncio.get_running_loop().time()

    def _note(self, kind: str, slot: str) -> None:
        self.did.append((kind, slot, asyncio.get_running_loop().time() - self.began))

    def grace(self, seconds: float) -> None:
        self.grace_s = seconds

    def offer(self, slot: str) -> None:
        self._note("joined", slot)

    def warn(self, slot: str) -> None:
        self._note("notice", slot)

    async def take(self, slot: str) -> None:
        self._note("lost", slot)


async def test_the_follower_keeps_the_order_and_the_scale_of_the_trace() -> None:
    recorder: Any = Recorder()
    availability = [(0.0, 2), (100.0, 0), (150.0, 1)]
    follower = AvailabilityFollower(recorder, availability, 1, notice_s=30, scale=0.001, seed=0)
    await follower.run()
    assert recorder.grace_s == pytest.approx(0.03)
    assert [kind for kind, _, _ in recorder.did] == ["joined"] * 2 + ["notice"] * 2 + ["lost"] * 2 + ["joined"]
    for (_, _, at), (seconds, _) in zip(recorder.did, follower.changes, strict=True):
        assert at >= seconds * 0.001 - 0.001  # never early


def test_the_machine_must_have_the_gpus_of_the_trace() -> None:
    availability = [(0.0, 4), (60.0, 8)]
    bound = preemptible_bindings(availability, 2, range(8), 1)
    assert [b.devices for b in bound] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    with pytest.raises(UserError, match="up to 4 slots of 2 GPUs, this machine has 6"):
        preemptible_bindings(availability, 2, range(6), 1)
