"""The adapter for every provider that starts workers when it is asked: plan, requests and who is here, kept apart.

How a worker is started is the launcher's matter. A request that failed goes on in the provider's next option at once,
or, when all of them rest (`pearl.core.requests`), as soon as one has rested.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pearl.cluster.adapter import ObservedSlot, OnEvent, RequestFailed, SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.cluster import Cluster
from pearl.cluster.errors import ActorTimeout
from pearl.cluster.identity import Identity
from pearl.cluster.launcher import Launcher, LaunchFailed
from pearl.cluster.membership import MemberEvent
from pearl.cluster.observation import Observation
from pearl.config.cluster import NoticesConfig
from pearl.core.layout import Zone
from pearl.core.requests import Cause, Requests


@dataclass(slots=True)
class Request:
    """A worker that was asked for and has not joined."""

    zone: Zone
    shape: SlotShape
    option: str
    task: asyncio.Task[None]


class LaunchingAdapter:
    """A ClusterAdapter over a Cluster that somebody else opens and closes."""

    def __init__(self, cluster: Cluster, bindings: Sequence[Binding], on_event: OnEvent, start_s: float) -> None:
        """`bindings` are all slots there can be; a request that has not joined after `start_s` failed."""
        self.cluster, self.on_event, self.start_s = cluster, on_event, start_s
        self.bindings = {binding.slot: binding for binding in bindings}
        self.plan: dict[Zone, int] = {}
        self.requested: dict[str, Request] = {}
        self.here = Observation(on_event, self._known)
        self._shapes: dict[Zone, SlotShape] = {}
        self._lives: dict[str, int] = {}
        self._requests: dict[Zone, Requests] = {}
        self._timers: dict[Zone, asyncio.TimerHandle] = {}

    async def connect(self) -> None:
        for zone in {Zone(binding.zone) for binding in self.bindings.values()}:
            await self._launcher(zone).check()
        self.cluster.watch(self._member)

    async def request(self, zone: Zone, n: int, shape: SlotShape) -> None:
        slots = self._of(zone)
        fitting = [name for name in slots if len(self.bindings[name].devices) in (0, shape.gpus)]
        if n > len(fitting):
            other = f", {len(slots) - len(fitting)} more are of another shape" if len(slots) > len(fitting) else ""
            reason = f"{self._whose()} has {len(fitting)} {zone} slots of {shape.gpus} GPUs{other}"
            self.on_event(RequestFailed(zone, n - len(fitting), shape, reason))
        self.plan[zone], self._shapes[zone] = min(n, len(fitting)), shape
        self._reconcile(zone)

    async def release(self, workers: Iterable[str]) -> None:
        for name in workers:
            if not (name in self.here.slots or name in self.requested) or name in self.here.reasons:
                continue
            here, zone = self.here.slots.get(name), Zone(self.bindings[name].zone)
            staying = len([other for other in self._busy(zone) if other not in self.here.reasons])
            if (here is None or here.seconds_left is None) and self.plan[zone] >= staying:
                self.plan[zone] -= 1
            self._given_back(name)
            if here is None:
                self.requested[name].task.cancel()
            else:
                await self.cluster.leaving(name, "drained", "given back")
                await self._end(name, "given back")

    def observed(self) -> dict[str, ObservedSlot]:
        return dict(self.here.slots)

    async def close(self) -> None:
        self.plan = dict.fromkeys(self.plan, 0)
        for timer in self._timers.values():
            timer.cancel()
        tasks = [request.task for request in self.requested.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*(self._end(name, "the run ends") for name in self.here.slots))
        await asyncio.gather(*tasks, return_exceptions=True)

    def _whose(self) -> str:
        return "the cluster"

    def _can_be_had(self, name: str) -> bool:
        return True

    def _given_back(self, name: str) -> None:
        """The slot is about to be given back."""

    def _gone(self, name: str) -> bool:
        """Whether another slot is to be had at once in the place of this one, which was lost."""
        return False

    def _notices(self) -> NoticesConfig:
        return self.cluster.notices

    def _known(self, identity: Identity) -> bool:
        return identity.slot in self.bindings and identity.incarnation == self._lives.get(identity.slot)

    def _launcher(self, zone: Zone) -> Launcher:
        return self.cluster.launchers.get(zone, self.cluster.launcher)

    def _of(self, zone: Zone) -> list[str]:
        return [name for name, binding in self.bindings.items() if binding.zone == zone]

    def _busy(self, zone: Zone) -> list[str]:
        return [name for name in self._of(zone) if name in self.here.slots or name in self.requested]

    def _reconcile(self, zone: Zone) -> None:
        """Start what is wanted and can be had, first the slot that had the fewest lives; withdraw what is too much."""
        if (shape := self._shapes.get(zone)) is None:
            return
        wanted, busy, launcher = self.plan[zone], self._busy(zone), self._launcher(zone)
        requests = self._requests.setdefault(zone, Requests(launcher.options, launcher.rest_s))
        free = [name for name in self._of(zone) if self._can_be_had(name) and name not in busy]
        free = [name for name in free if len(self.bindings[name].devices) in (0, shape.gpus)]
        free.sort(key=lambda name: self._lives.get(name, 0))
        for name in free[: max(0, wanted - len(busy))]:
            if (option := requests.choose(self._now(), launcher.room)) is None:
                self._later(zone, requests.wait_s(self._now()))
                break
            self._lives[name] = self._lives.get(name, 0) + 1
            task = asyncio.create_task(self._start(name, zone, shape, option))
            self.requested[name] = Request(zone, shape, option, task)
            task.add_done_callback(functools.partial(self._started, name))
        for name in [name for name in busy if name in self.requested][: max(0, len(busy) - wanted)]:
            self.requested[name].task.cancel()

    def _later(self, zone: Zone, wait_s: float) -> None:
        """Once the option that rests the shortest has rested; without one, when a slot goes."""
        if (timer := self._timers.pop(zone, None)) is not None:
            timer.cancel()
        if wait_s:
            self._timers[zone] = asyncio.get_running_loop().call_later(wait_s, self._reconcile, zone)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _start(self, name: str, zone: Zone, shape: SlotShape, option: str) -> None:
        binding, life = self.bindings[name], self._lives[name]
        try:
            await self.cluster.start_worker(
                name, life, zone, binding.environment(), self.start_s, self._notices(), gpus=shape.gpus,
                threads=shape.threads, option=option,
            )  # fmt: skip
        except BaseException:
            await self._kill(name)
            raise

    def _started(self, name: str, task: asyncio.Task[None]) -> None:
        """It joined (then it is observed already), it was withdrawn, or it failed."""
        if (request := self.requested.get(name)) is None or request.task is not task:
            return
        del self.requested[name]
        zone, option, requests = request.zone, request.option, self._requests[request.zone]
        error = None if task.cancelled() else task.exception()
        if (ended := self.here.reasons.pop(name, None)) or error:
            reason = f"{name}: {ended}" if ended else str(error) or repr(error)
            cause = error.cause if isinstance(error, LaunchFailed) else Cause.OTHER
            if error:
                requests.failed(option, cause, self._now())
            wait_s = requests.wait_s(self._now()) if error else 0.0
            self.on_event(RequestFailed(zone, 1, request.shape, reason, cause, option, wait_s))
        if error is None or self._launcher(zone).rest_s:  # withdrawn or taken: perhaps another one can be had
            self._reconcile(zone)

    async def _end(self, name: str, reason: str) -> None:
        self.here.reasons[name] = reason
        await self._kill(name)

    async def _kill(self, name: str) -> None:
        with contextlib.suppress(ActorTimeout):  # it stays observed while its connection stands
            await self.cluster.kill(name)

    def _member(self, event: MemberEvent) -> None:
        name = event.identity.slot
        joined = event.kind == "joined" and self._known(event.identity)
        if joined and (request := self.requested.pop(name, None)):
            self._requests[request.zone].given(request.option)
        if self.here.apply(event) and event.kind == "left" and self._gone(name):
            self._reconcile(Zone(event.identity.zone))
