"""The scheduler's plugin and the driver's view of it, against a scheduler that is only a dictionary, and a real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from distributed import Client, Scheduler, Worker
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pearl.cluster.identity import Identity
from pearl.cluster.membership import MemberEvent, Membership
from pearl.cluster.plugin import IDENTITY, ElasticityPlugin
from pearl.cluster.settings import configure_dask
from pearl.core.layout import SlotInfo, Zone

HOST = "127.0.0.1"


def identity(slot: str, life: int) -> dict[str, Any]:
    return Identity(slot, life, "preemptible", "host-a", 1, "2,3", {}).to_wire()


class Desk:
    """What the plugin needs of a scheduler, and what a `Membership` needs of a client.

    `connected` is the wire; while it is `slow`, live events lie in it until it is not, or an answer was on its way.
    """

    def __init__(self) -> None:
        self.workers: dict[str, Any] = {}
        self.handlers: dict[str, Any] = {"register-worker": self._registered}
        self.connected, self.slow = True, False
        self.clients: dict[str, Any] = {}
        self.wire: list[dict[str, Any]] = []
        self.handler: Any = None
        self.scheduler = self

    async def _registered(self, comm: Any, **message: Any) -> None:
        self.workers[message["address"]] = SimpleNamespace(extra=message["extra"], last_seen=0.0)
        self.plugin.add_worker(self, message["address"])

    async def start(self, **options: Any) -> ElasticityPlugin:
        self.plugin = ElasticityPlugin(**options)
        await self.plugin.start(self)
        await self.plugin.close()  # no timer: tests call `check_silence`
        return self.plugin

    def log_event(self, topic: str, event: dict[str, Any]) -> None:
        if self.connected and self.handler:
            self.wire.append(event)
            if not self.slow:
                self.deliver()

    def deliver(self) -> None:
        wire, self.wire = self.wire, []
        for event in wire:
            self.handler((0.0, event))

    def subscribe_topic(self, topic: str, handler: Any) -> None:
        self.handler = handler

    async def pearl_members(self, **query: Any) -> Any:
        if not self.connected:
            raise OSError("no connection")
        reply = self.plugin.members(**query)
        if query["since"] % 2:  # an answer and the stream may overtake each other
            self.deliver()
        return reply

    def worker_send(self, address: str, message: dict[str, Any]) -> None:
        """Nobody reads it."""

    async def remove_worker(self, address: str, stimulus_id: str) -> None:
        if self.workers.pop(address, None) is None:
            return
        if pause := self.plugin.remove_worker(self, address, stimulus_id=stimulus_id):
            assert asyncio.iscoroutine(pause)
            pause.close()  # there are no other workers to be told
        await asyncio.sleep(0)

    async def join(self, slot: str, life: int) -> str:
        """The refusal, empty if it was let in."""
        said: list[Any] = []

        async def write(message: Any) -> None:
            said.append(message["message"])

        await self.plugin.register(
            SimpleNamespace(write=write), address=f"{slot}#{life}", extra={IDENTITY: identity(slot, life)}
        )
        return "".join(said)


def words(events: list[MemberEvent]) -> list[tuple[str, str, int]]:
    return [(e.kind, e.identity.slot, e.identity.incarnation) for e in events]


WHAT = ("join", "leave", "notice", "away", "back", "slow", "new driver")
ACTIONS = st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from("ab")), max_size=40)


@given(ACTIONS)
@example([(what, "a") for what in ("join", "away", "leave", "join", "leave", "join", "back", "notice")])
@example([(what, "a") for what in ("join", "slow", "leave", "new driver", "join", "back")])
@settings(max_examples=300, deadline=None)
def test_a_driver_that_comes_and_goes_finds_the_truth_and_nothing_twice(actions: list[tuple[str, str]]) -> None:
    async def play() -> None:
        desk = Desk()
        await desk.start()
        seen: list[MemberEvent] = []
        membership = Membership(desk, seen.append)
        await membership._catch_up()
        lives = dict.fromkeys("ab", 0)
        noticed = set()
        for action, slot in actions:
            address = f"{slot}#{lives[slot]}"
            if action == "join" and address not in desk.workers:
                lives[slot] += 1
                assert not await desk.join(slot, lives[slot])
            elif action == "leave" and address in desk.workers:
                await desk.remove_worker(address, stimulus_id="x")
            elif action == "notice":
                known = address in desk.workers
                assert desk.plugin.notice(slot, lives[slot], 30, "test")["status"] == ("OK" if known else "unknown")
                noticed |= {address} if known else set()
            elif action == "slow":
                desk.slow = True
            elif action in ("away", "back"):
                desk.connected = action == "back"
                desk.slow = False
                desk.deliver() if desk.connected else desk.wire.clear()
            elif action == "new driver":
                desk.connected = True
                membership = Membership(desk, seen.append, membership.position)
                await membership._catch_up()
            if desk.connected and membership._behind.is_set():  # what its task would do
                membership._behind.clear()
                await membership._catch_up()
        desk.connected = True
        await membership._catch_up()
        desk.deliver()
        assert {e.address for e in membership.present.values()} == set(desk.workers)
        said = words(seen)
        assert len(said) == len(set(said))  # nothing twice
        for name in "ab":
            mine = [(kind, life) for kind, slot, life in said if slot == name]
            here = 0
            for kind, life in mine:
                if kind == "joined":
                    assert not here
                    here = life
                elif kind == "left" and here:
                    assert here == life
                    here = 0
            assert bool(here) == (f"{name}#{lives[name]}" in desk.workers)
        for address in noticed & set(desk.workers):
            slot, _, number = address.partition("#")
            assert ("notice", slot, int(number)) in said

    asyncio.run(play())


async def test_a_life_that_is_over_is_refused_with_the_reason() -> None:
    desk = Desk()
    await desk.start()
    assert not await desk.join("a", 2)
    assert await desk.join("a", 2) == "a is here as life 2; life 2 cannot join beside it"
    await desk.remove_worker("a#2", stimulus_id="x")
    for life in (1, 2):
        reason = await desk.join("a", life)
        assert reason == f"a left as life 2; life {life} is over, the slot comes back as a later one"
    assert not desk.workers
    assert not await desk.join("a", 3)


async def test_a_later_life_replaces_one_that_was_not_seen_to_leave() -> None:
    desk = Desk()
    await desk.start()
    seen: list[MemberEvent] = []
    await Membership(desk, seen.append)._catch_up()
    await desk.join("a", 1)
    await desk.join("a", 2)
    assert words(seen) == [("joined", "a", 1), ("left", "a", 1), ("joined", "a", 2)]
    assert (seen[1].reason, seen[1].detail) == ("lost", "replaced by life 2")


async def test_of_two_later_lives_that_come_at_once_one_stays() -> None:
    desk = Desk()
    await desk.start()
    await desk.join("a", 1)
    await asyncio.gather(desk.join("a", 2), desk.join("a", 3))
    assert set(desk.workers) == {"a#3"}


async def test_departures_say_how() -> None:
    desk = Desk()
    plugin = await desk.start()
    seen: list[MemberEvent] = []
    await Membership(desk, seen.append)._catch_up()
    for life in range(1, 5):
        await desk.join("a", life)
        if life == 1:
            plugin.leaving("a#1", "closed", "SIGINT")
        if life == 3:
            plugin.notice("a", 3, 30.0, "SIGTERM")
        await desk.remove_worker(f"a#{life}", stimulus_id="retire-workers-1" if life == 2 else "handle-worker-cleanup")
    assert [(e.reason, e.detail) for e in seen if e.kind == "left"] == [
        ("closed", "SIGINT"),
        ("drained", ""),
        ("lost", "its connection broke, after a notice (SIGTERM)"),
        ("lost", "its connection broke"),
    ]
    assert seen[0].identity.slot_info() == SlotInfo("a", Zone.PREEMPTIBLE, ("host-a/2", "host-a/3"), "host-a")


async def test_a_missed_departure_says_how_though_the_slot_is_back() -> None:
    desk = Desk()
    plugin = await desk.start()
    seen: list[MemberEvent] = []
    membership = Membership(desk, seen.append)
    await membership._catch_up()
    await desk.join("a", 1)
    desk.connected = False
    plugin.leaving("a#1", "closed", "SIGINT")
    await desk.remove_worker("a#1", stimulus_id="x")
    await desk.join("a", 2)
    await desk.join("b", 1)
    plugin.notice("b", 1, 30.0, "of one that is gone when the driver is back")
    await desk.remove_worker("b#1", stimulus_id="x")
    desk.connected = True
    await membership._catch_up()
    assert words(seen) == [("joined", "a", 1), ("left", "a", 1), ("joined", "a", 2), ("left", "b", 1)]
    assert (seen[1].reason, seen[1].detail) == ("closed", "SIGINT")


async def test_a_notice_is_news_again_only_if_it_comes_sooner() -> None:
    desk = Desk()
    plugin = await desk.start()
    seen: list[MemberEvent] = []
    await Membership(desk, seen.append)._catch_up()
    await desk.join("a", 1)
    for seconds in (120.0, 119.9, 300.0, 30.0):
        plugin.notice("a", 1, seconds, f"says {seconds}")
    assert [e.source for e in seen[1:]] == ["says 120.0", "says 30.0"]
    assert plugin.notice("a", 2, 30.0, "of another life")["status"] == "unknown"


async def test_another_scheduler_takes_nobody_over_by_itself() -> None:
    desk = Desk()
    await desk.start()
    seen: list[MemberEvent] = []
    membership = Membership(desk, seen.append)
    await membership._catch_up()
    for slot in "ab":
        await desk.join(slot, 1)
    desk.workers.clear()
    await desk.start()  # a new epoch
    await desk.join("b", 1)
    await membership._catch_up()
    assert words(seen[2:]) == [("left", "a", 1)]
    assert seen[-1].detail == "the scheduler began anew without it"


async def test_silence_is_counted_in_time_in_which_the_scheduler_itself_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("pearl.cluster.plugin.time.monotonic", lambda: now)
    desk = Desk()
    plugin = await desk.start(silent_loss_s=10)
    seen: list[MemberEvent] = []
    await Membership(desk, seen.append)._catch_up()
    for slot in ("silent", "busy"):
        await desk.join(slot, 1)
    await plugin.check_silence()
    now += 3600  # the scheduler's own process was stopped
    await plugin.check_silence()
    assert len(desk.workers) == 2
    for _ in range(12):
        now += 1
        desk.workers["busy#1"].last_seen += 1
        await plugin.check_silence()
    assert set(desk.workers) == {"busy#1"}
    assert seen[-1].identity.slot == "silent" and "event loop was silent for" in seen[-1].detail


def real_worker(slot: str, life: int, address: str) -> Worker:
    async def who(_: Worker) -> dict[str, Any]:
        return identity(slot, life)

    more = {"memory_limit": 0, "dashboard": False, "dashboard_address": None}
    return Worker(address, name=f"{slot}#{life}", nthreads=1, host=HOST, startup_information={IDENTITY: who}, **more)


def real_scheduler() -> Scheduler:
    configure_dask()
    return Scheduler(host=HOST, port=0, dashboard=False, dashboard_address=f"{HOST}:0")


async def test_the_driver_hears_of_all_departures_before_any_other_worker_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pearl.cluster.plugin.HEAD_START_S", 2.0)
    order: list[str] = []
    async with real_scheduler() as scheduler:
        told, send = asyncio.Event(), scheduler.worker_send

        def worker_send(address: str, message: dict[str, Any]) -> None:
            send(address, message)
            if message["op"] == "remove-worker":
                order.append("worker")
                told.set()

        monkeypatch.setattr(scheduler, "worker_send", worker_send)
        async with Client(scheduler.address, asynchronous=True, set_as_default=False) as client:
            await client.register_plugin(ElasticityPlugin())
            workers = [await real_worker(slot, 1, scheduler.address) for slot in "abc"]
            membership = Membership(client, lambda event: order.append(event.kind))
            await membership.start()
            order.clear()
            for worker in workers[:2]:
                worker.batched_stream.comm.abort()
            await asyncio.wait_for(told.wait(), 60)
            assert order[:3] == ["left", "left", "worker"]
            await membership.close()
        await asyncio.gather(*(worker.close() for worker in workers))


async def test_on_a_real_scheduler() -> None:
    """Join, refusal, departure and the way back of a driver, over real connections."""
    async with real_scheduler() as scheduler:
        first: asyncio.Queue[MemberEvent] = asyncio.Queue()
        async with Client(scheduler.address, asynchronous=True, set_as_default=False) as client:
            await client.register_plugin(ElasticityPlugin())
            membership = Membership(client, first.put_nowait)
            await membership.start()
            a = await real_worker("a", 1, scheduler.address)
            assert (await asyncio.wait_for(first.get(), 60)).kind == "joined"
            await membership.close()
        await a.close()
        with pytest.raises(RuntimeError) as refused:
            await real_worker("a", 1, scheduler.address)
        assert "life 1 is over" in str(refused.value.__cause__)
        async with real_worker("b", 1, scheduler.address):
            second: list[MemberEvent] = []
            async with Client(scheduler.address, asynchronous=True, set_as_default=False) as client:
                await client.register_plugin(ElasticityPlugin())  # as every driver does; the one that is there stays
                membership = Membership(client, second.append, membership.position)
                await membership.start()
                assert words(second) == [("left", "a", 1), ("joined", "b", 1)]
                await membership.close()
