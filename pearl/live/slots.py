"""Preemptible slots: asks the cluster for them, says who comes and goes, gives them back, plays a trace with them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from pearl.cluster.adapter import RequestFailed, SlotShape
from pearl.cluster.availability import AvailabilityFollower
from pearl.cluster.binding import Binding
from pearl.cluster.cluster import Cluster
from pearl.cluster.local_adapter import LocalAdapter
from pearl.cluster.providers import make_adapter
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.layout import Zone
from pearl.live.waits import WaitTable
from pearl.sim.availability import Availability, read

ASK_AGAIN_S, ASK_AGAIN_MOST_S = 5.0, 300.0
"""After a slot was lost or could not be had, before it is asked for again: twice as long each time, up to a limit."""
FORGET_S = 600.0
"""What was lost longer ago than this makes nobody wait."""


def availability(config: RunConfig) -> Availability | None:
    """The trace that is to be played, if there is one. Raises UserError for a file that cannot be read."""
    e, width = config.elastic, config.engine.tensor_parallel
    if e.availability.file is None:
        return None
    return read(Path(e.availability.file), e.preemptible_slots * width, width, e.availability.start_s)


class PreemptibleSlots:
    """`post` takes SlotJoined, SlotNotice, SlotLost and RequestFailed; `lost` is told of a loss before."""

    def __init__(
        self,
        cluster: Cluster,
        bindings: Mapping[str, Binding],
        config: RunConfig,
        waits: WaitTable,
        post: Callable[[Event], None],
        lost: Callable[[str, int, str], None],
    ) -> None:
        self.config, self.waits, self.post, self.lost = config, waits, post, lost
        own = [binding for binding in bindings.values() if binding.zone == Zone.PREEMPTIBLE]
        self.most, self.scaled = config.elastic.preemptible_slots, config.elastic.autoscale.on
        self.count = 0 if self.scaled else self.most
        """That are asked for."""
        width = config.engine.tensor_parallel
        self.shape = SlotShape(width if any(b.devices for b in bindings.values()) else 0, config.engine.threads)
        trace, a = availability(config), config.elastic.availability
        self.adapter = make_adapter(config, cluster, own, self._happened, offered=trace is None)
        self.follower = None
        if trace is not None and isinstance(self.adapter, LocalAdapter):
            self.follower = AvailabilityFollower(
                self.adapter, trace, width, notice_s=a.notice_s, scale=a.scale, seed=a.seed
            )
        self._following: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._losses: deque[float] = deque()
        """When slots were lost or could not be had, in the last FORGET_S (monotonic s)."""
        self._closing = False

    async def connect(self) -> None:
        if self.most:
            await self.adapter.connect()
            await self._ask()

    async def want(self, i: ev.RequestSlots) -> None:
        self.count = i.slots
        await self._ask()

    def trainer_ready(self, from_s: float) -> None:
        """The trace begins, once, where an interrupted run had left it."""
        if self.follower is not None and self._following is None:
            self._following = asyncio.create_task(self.follower.run(from_s))
            self._following.add_done_callback(self._followed)

    async def release(self, i: ev.ReleaseSlot) -> None:
        here = self.adapter.observed().get(i.worker)
        if here is not None and here.life == i.life:
            if here.seconds_left is None and self.follower is None and not self.scaled:
                self.count -= 1  # nobody takes it from us: it is not wanted
            await self.adapter.release([i.worker])

    async def close(self, timeout_s: float) -> None:
        """Give every slot back. TimeoutError if one does not go."""
        self._closing = True
        if self._again is not None:
            self._again.cancel()
        if self._following is not None:
            self._following.cancel()
        await self.waits.until("driver", "the preemptible slots to end", timeout_s, self.adapter.close())

    def _happened(self, event: Event) -> None:
        if self._closing:
            return
        if isinstance(event, ev.SlotLost):
            self.lost(event.worker, event.life, event.reason)
        self.post(event)
        if isinstance(event, ev.SlotLost | RequestFailed):
            loop = asyncio.get_running_loop()
            back_off_s = self._lost_at(loop.time())
            if self._again is None:
                self._again = loop.call_later(back_off_s, self._asks_again)

    def _lost_at(self, now: float) -> float:
        """Seconds to wait after this loss."""
        self._losses.append(now)
        while self._losses[0] < now - FORGET_S:
            self._losses.popleft()
        return min(ASK_AGAIN_MOST_S, ASK_AGAIN_S * 2.0 ** (len(self._losses) - 1))

    def _asks_again(self) -> None:
        self._again = None
        task = asyncio.ensure_future(self._ask())
        task.add_done_callback(lambda done: done.exception())

    async def _ask(self) -> None:
        """A level: what is here or on its way counts, and what is not offered cannot be had."""
        await self.adapter.request(Zone.PREEMPTIBLE, self.count, self.shape)

    def _followed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            self.post(ev.TrainerFailed(f"internal fault: {error!r}"))
