"""What the adapter does with a provider that says no, in which order and when. The provider is a list of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pearl.cluster.adapter import RequestFailed, SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.identity import Identity
from pearl.cluster.launcher import LaunchFailed
from pearl.cluster.launching import LaunchingAdapter
from pearl.cluster.membership import MemberEvent
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost
from pearl.core.layout import Zone
from pearl.core.requests import Cause

CPU = SlotShape(gpus=0)
LATE_S = 20.0


class Provider:
    """Cluster and launcher in one: an option in `refuses` fails with that cause, one in `full` has no room."""

    def __init__(self, options: Sequence[str], rest_s: float) -> None:
        self.options, self.rest_s = options, rest_s
        self.launchers: dict[str, Any] = {}
        self.launcher, self.notices, self.contact = self, SimpleNamespace(), ""
        self.refuses: dict[str, Cause] = {}
        self.full: set[str] = set()
        self.asked: list[tuple[str, int, str]] = []
        self.member: Any = None

    async def check(self) -> None:
        pass

    def room(self, option: str) -> bool:
        return option not in self.full

    def watch(self, member: Any) -> None:
        self.member = member

    async def start_worker(self, slot: str, life: int, zone: str, *_: Any, option: str, **__: Any) -> None:
        self.asked.append((slot, life, option))
        await asyncio.sleep(0)
        if option in self.refuses:
            raise LaunchFailed(f"{option} says no", self.refuses[option])
        who = Identity(slot, life, zone, "h", 1, "", {})
        self.member(MemberEvent("joined", who, f"tcp://{slot}"))

    async def kill(self, slot: str, *_: Any) -> None:
        pass

    def lose(self, slot: str, life: int) -> None:
        who = Identity(slot, life, "preemptible", "h", 1, "", {})
        self.member(MemberEvent("left", who, f"tcp://{slot}", reason="lost", detail="gone"))


async def adapter(provider: Any, slots: int) -> tuple[LaunchingAdapter, asyncio.Queue[Event]]:
    events: asyncio.Queue[Event] = asyncio.Queue()
    bindings = [Binding(f"p-{i}", Zone.PREEMPTIBLE, (), 1, elsewhere=True) for i in range(slots)]
    made = LaunchingAdapter(provider, bindings, events.put_nowait, 1.0)
    await made.connect()
    await made.request(Zone.PREEMPTIBLE, slots, CPU)
    return made, events


async def take(events: asyncio.Queue[Event], kind: type[Event]) -> Any:
    event = await asyncio.wait_for(events.get(), LATE_S)
    assert isinstance(event, kind), event
    return event


async def test_a_request_that_fails_goes_on_in_the_next_option_at_once() -> None:
    provider = Provider(("a", "b", "c"), rest_s=1000)
    provider.refuses = {"a": Cause.CAPACITY, "b": Cause.QUOTA}
    made, events = await adapter(provider, 1)
    failed = [await take(events, RequestFailed) for _ in range(2)]
    assert [(f.option, f.cause, f.reason, f.again_s) for f in failed] == [
        ("a", Cause.CAPACITY, "a says no", 0.0), ("b", Cause.QUOTA, "b says no", 0.0),
    ]  # fmt: skip
    assert (await take(events, SlotJoined)).life == 3
    assert provider.asked == [("p-0", 1, "a"), ("p-0", 2, "b"), ("p-0", 3, "c")]
    await made.close()


async def test_when_all_options_rest_the_first_that_has_rested_is_asked_again_by_itself() -> None:
    provider = Provider(("a", "b"), rest_s=0.05)
    provider.refuses = {"a": Cause.CAPACITY, "b": Cause.CREDENTIALS}
    made, events = await adapter(provider, 1)
    assert (await take(events, RequestFailed)).again_s == 0
    assert 0 < (await take(events, RequestFailed)).again_s <= 0.05
    await made.request(Zone.PREEMPTIBLE, 1, CPU)
    assert len(provider.asked) == 2, "asking more often does not ask the provider more often"
    assert (await take(events, RequestFailed)).option == "a"
    del provider.refuses["a"]
    await take(events, SlotJoined)
    assert [option for _, _, option in provider.asked] == ["a", "b", "a", "a"], "b needs a person"
    await made.close()


async def test_an_option_without_room_is_not_asked_until_it_has_some() -> None:
    provider = Provider(("a",), rest_s=1000)
    provider.full = {"a"}
    made, events = await adapter(provider, 1)
    assert not provider.asked and events.empty()
    provider.full = set()
    await made.request(Zone.PREEMPTIBLE, 1, CPU)
    assert (await take(events, SlotJoined)).life == 1
    await made.close()


async def test_what_is_not_wanted_any_more_is_not_asked_for_when_an_option_has_rested() -> None:
    provider = Provider(("a",), rest_s=0.05)
    provider.refuses = {"a": Cause.CAPACITY}
    made, events = await adapter(provider, 1)
    failed = await take(events, RequestFailed)
    await made.request(Zone.PREEMPTIBLE, 0, CPU)
    provider.refuses = {}
    await asyncio.sleep(2 * failed.again_s)
    assert len(provider.asked) == 1 and events.empty()
    await made.close()


async def test_a_slot_that_was_lost_is_asked_for_again_by_the_next_request_only() -> None:
    provider = Provider(("a",), rest_s=1000)
    made, events = await adapter(provider, 1)
    await take(events, SlotJoined)
    provider.lose("p-0", 1)
    assert await take(events, SlotLost) == SlotLost("p-0", 1, "lost: gone")
    assert len(provider.asked) == 1
    await made.request(Zone.PREEMPTIBLE, 1, CPU)
    assert (await take(events, SlotJoined)).life == 2
    await made.close()
