"""Slots of this machine: one worker process each, with fixed bindings.

A preemptible slot can be had while it is *offered*. Who plays the cloud (`AvailabilityFollower`) offers slots, warns
them and takes them; without one, all slots are offered.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pearl.cluster.adapter import ObservedSlot, OnEvent, RequestFailed, SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.errors import ActorTimeout
from pearl.cluster.local import LocalCluster
from pearl.cluster.membership import MemberEvent
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import Zone


@dataclass(slots=True)
class Request:
    """A worker process that was started and has not joined."""

    zone: Zone
    shape: SlotShape
    task: asyncio.Task[None]


class LocalAdapter:
    """A ClusterAdapter over a LocalCluster that somebody else opens and closes."""

    def __init__(
        self,
        cluster: LocalCluster,
        bindings: Sequence[Binding],
        on_event: OnEvent,
        start_s: float,
        offered: bool = True,
    ) -> None:
        """`bindings` are all slots there can be; `start_s` as `deadlines.worker_start_s`.

        `offered` False: preemptible slots cannot be had until somebody offers them; else each request may have them.
        """
        self.cluster, self.on_event, self.start_s = cluster, on_event, start_s
        self.bindings = {binding.slot: binding for binding in bindings}
        self.plan: dict[Zone, int] = {}
        self.requested: dict[str, Request] = {}
        self._always = offered
        self._shapes: dict[Zone, SlotShape] = {}
        self._observed: dict[str, ObservedSlot] = {}
        self._offered = {b.slot for b in bindings if offered or b.zone != Zone.PREEMPTIBLE}
        self._lives: dict[str, int] = {}
        self._reasons: dict[str, str] = {}
        """Why we end a slot, until it is gone."""
        self._grace_s = cluster.notices.sigterm_grace_s

    async def connect(self) -> None:
        self.cluster.watch(self._member)

    async def request(self, zone: Zone, n: int, shape: SlotShape) -> None:
        slots = self._of(zone)
        fitting = [name for name in slots if len(self.bindings[name].devices) in (0, shape.gpus)]
        if n > len(fitting):
            other = f", {len(slots) - len(fitting)} more are of another shape" if len(slots) > len(fitting) else ""
            reason = f"this machine has {len(fitting)} {zone} slots of {shape.gpus} GPUs{other}"
            self.on_event(RequestFailed(zone, n - len(fitting), shape, reason))
        self.plan[zone], self._shapes[zone] = min(n, len(fitting)), shape
        self._offered |= set(slots) if self._always or zone != Zone.PREEMPTIBLE else set()
        self._reconcile(zone)

    async def release(self, workers: Iterable[str]) -> None:
        for name in workers:
            if not (name in self._observed or name in self.requested) or name in self._reasons:
                continue
            here, zone = self._observed.get(name), Zone(self.bindings[name].zone)
            staying = len([other for other in self._busy(zone) if other not in self._reasons])
            if (here is None or here.seconds_left is None) and self.plan[zone] >= staying:
                self.plan[zone] -= 1
            self._offered.discard(name)
            if here is None:
                self.requested[name].task.cancel()
            else:
                await self.cluster.leaving(name, "drained", "given back")
                await self._end(name, "given back")

    def observed(self) -> dict[str, ObservedSlot]:
        return dict(self._observed)

    async def close(self) -> None:
        self.plan = dict.fromkeys(self.plan, 0)
        self._offered.clear()
        tasks = [request.task for request in self.requested.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(self._end(name, "the run ends") for name in self._observed))
        await asyncio.gather(*tasks, return_exceptions=True)

    def offer(self, slot: str) -> None:
        """The cloud has the slot to give."""
        self._offered.add(slot)
        self._reconcile(Zone(self.bindings[slot].zone))

    def warn(self, slot: str) -> None:
        """The cloud says that it will take the slot: its worker gets a SIGTERM."""
        self.cluster.terminate(slot)

    async def take(self, slot: str) -> None:
        """The cloud takes the slot: its worker is killed, if it is there."""
        self._offered.discard(slot)
        reason = "taken back by the cloud"
        if slot in self._observed:
            await self._end(slot, reason)
        elif slot in self.requested:
            self._reasons[slot] = reason
            self.requested[slot].task.cancel()

    def grace(self, seconds: float) -> None:
        """How long workers that start from now on have between a warning and their end."""
        self._grace_s = seconds

    def _of(self, zone: Zone) -> list[str]:
        return [name for name, binding in self.bindings.items() if binding.zone == zone]

    def _busy(self, zone: Zone) -> list[str]:
        return [name for name in self._of(zone) if name in self._observed or name in self.requested]

    def _reconcile(self, zone: Zone) -> None:
        """Start what is wanted and offered, first the slot that had the fewest lives; withdraw what is too much."""
        if (shape := self._shapes.get(zone)) is None:
            return
        wanted, busy = self.plan[zone], self._busy(zone)
        free = [name for name in self._of(zone) if name in self._offered and name not in busy]
        free = [name for name in free if len(self.bindings[name].devices) in (0, shape.gpus)]
        free.sort(key=lambda name: self._lives.get(name, 0))
        for name in free[: max(0, wanted - len(busy))]:
            self._lives[name] = self._lives.get(name, 0) + 1
            task = asyncio.create_task(self._start(name, zone, shape))
            self.requested[name] = Request(zone, shape, task)
            task.add_done_callback(functools.partial(self._started, name))
        for name in [name for name in busy if name in self.requested][: max(0, len(busy) - wanted)]:
            self.requested[name].task.cancel()

    async def _start(self, name: str, zone: Zone, shape: SlotShape) -> None:
        binding, life = self.bindings[name], self._lives[name]
        notices = self.cluster.notices.model_copy(update={"sigterm_grace_s": self._grace_s})
        try:
            await self.cluster.start_worker(name, life, zone, binding.environment(), self.start_s, notices)
        except BaseException:
            await self._kill(name)
            raise

    def _started(self, name: str, task: asyncio.Task[None]) -> None:
        """It joined (then it is observed already), it was withdrawn, or it failed."""
        if (request := self.requested.get(name)) is None or request.task is not task:
            return
        del self.requested[name]
        error = None if task.cancelled() else task.exception()
        if (ended := self._reasons.pop(name, None)) or error:
            reason = f"{name}: {ended}" if ended else str(error) or repr(error)
            self.on_event(RequestFailed(request.zone, 1, request.shape, reason))
        if error is None:  # withdrawn or taken: perhaps one is wanted again, or another one can be had
            self._reconcile(request.zone)

    async def _end(self, name: str, reason: str) -> None:
        self._reasons[name] = reason
        await self._kill(name)

    async def _kill(self, name: str) -> None:
        with contextlib.suppress(ActorTimeout):  # it stays observed while its connection stands
            await self.cluster.kill(name)

    def _member(self, event: MemberEvent) -> None:
        name, life = event.identity.slot, event.identity.incarnation
        if name not in self.bindings or life != self._lives.get(name):
            return
        if event.kind == "joined":
            self.requested.pop(name, None)
            self._observed[name] = ObservedSlot(event.identity.slot_info(), life, event.address)
            self.on_event(SlotJoined(self._observed[name].slot, life))
        elif event.kind == "notice":
            self._observed[name] = replace(self._observed[name], seconds_left=event.seconds_left)
            self.on_event(SlotNotice(name, life, event.seconds_left))
        elif self._observed.pop(name, None):
            reason = self._reasons.pop(name, None) or f"{event.reason}: {event.detail}"
            self.on_event(SlotLost(name, life, reason))
            if name not in self._offered:  # taken: another one may be had. A crash is left to the next request
                self._reconcile(Zone(event.identity.zone))
