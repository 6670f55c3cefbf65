"""Preemptible slots: asks the cluster for them, says who comes and goes, gives them back, plays a trace with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from pearl.cluster.adapter import RequestFailed, SlotShape
from pearl.cluster.availability import AvailabilityFollower
from pearl.cluster.binding import Binding
from pearl.cluster.local import LocalCluster
from pearl.cluster.local_adapter import LocalAdapter
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.layout import Zone
from pearl.live.waits import WaitTable
from pearl.sim.availability import Availability, read

ASK_AGAIN_S = 5.0
"""After a slot was lost or could not be started, before it is asked for again."""


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
        cluster: LocalCluster,
        bindings: Mapping[str, Binding],
        config: RunConfig,
        waits: WaitTable,
        post: Callable[[Event], None],
        lost: Callable[[str, int, str], None],
    ) -> None:
        self.config, self.waits, self.post, self.lost = config, waits, post, lost
        own = [binding for binding in bindings.values() if binding.zone == Zone.PREEMPTIBLE]
        self.count = len(own)
        width = config.engine.tensor_parallel
        self.shape = SlotShape(width if any(binding.devices for binding in own) else 0, config.engine.threads)
        trace, a = availability(config), config.elastic.availability
        self.adapter = LocalAdapter(cluster, own, self._happened, config.deadlines.worker_start_s, trace is None)
        self.follower = None
        if trace is not None:
            self.follower = AvailabilityFollower(
                self.adapter, trace, width, notice_s=a.notice_s, scale=a.scale, seed=a.seed
            )
        self._following: asyncio.Task[None] | None = None
        self._again: asyncio.TimerHandle | None = None
        self._failures = 0
        """Losses and failed starts since a slot last joined."""
        self._closing = False

    async def connect(self) -> None:
        if self.count:
            await self.adapter.connect()
            await self._ask()

    def trainer_ready(self) -> None:
        """The trace begins, once."""
        if self.follower is not None and self._following is None:
            self._following = asyncio.create_task(self.follower.run())
            self._following.add_done_callback(self._followed)

    async def release(self, i: ev.ReleaseSlot) -> None:
        here = self.adapter.observed().get(i.worker)
        if here is not None and here.life == i.life:
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
        if isinstance(event, ev.SlotJoined):
            self._failures = 0
        elif isinstance(event, ev.SlotLost | RequestFailed):
            self._failures += 1
            if self._again is None and self._failures <= self.config.pipeline.worker_restarts:
                self._again = asyncio.get_running_loop().call_later(ASK_AGAIN_S, self._asks_again)

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
