"""Slots of this machine: one worker process each, with fixed bindings.

A preemptible slot can be had while it is *offered*. Who plays the cloud (`AvailabilityFollower`) offers slots, warns
them and takes them; without one, all slots are offered.
"""

from __future__ import annotations

from collections.abc import Sequence

from pearl.cluster.adapter import OnEvent, SlotShape
from pearl.cluster.binding import Binding
from pearl.cluster.cluster import Cluster
from pearl.cluster.launching import LaunchingAdapter
from pearl.config.cluster import NoticesConfig
from pearl.core.layout import Zone


class LocalAdapter(LaunchingAdapter):
    """A ClusterAdapter over a LocalCluster that somebody else opens and closes."""

    def __init__(
        self,
        cluster: Cluster,
        bindings: Sequence[Binding],
        on_event: OnEvent,
        start_s: float,
        offered: bool = True,
    ) -> None:
        """`bindings` are all slots there can be; `start_s` as `deadlines.worker_start_s`.

        `offered` False: preemptible slots cannot be had until somebody offers them; else each request may have them.
        """
        super().__init__(cluster, bindings, on_event, start_s)
        self._always = offered
        self._offered = {b.slot for b in bindings if offered or b.zone != Zone.PREEMPTIBLE}
        self._grace_s = cluster.notices.sigterm_grace_s

    async def request(self, zone: Zone, n: int, shape: SlotShape) -> None:
        self._offered |= set(self._of(zone)) if self._always or zone != Zone.PREEMPTIBLE else set()
        await super().request(zone, n, shape)

    async def close(self) -> None:
        self._offered.clear()
        await super().close()

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
        if slot in self.here.slots:
            await self._end(slot, reason)
        elif slot in self.requested:
            self.here.reasons[slot] = reason
            self.requested[slot].task.cancel()

    def grace(self, seconds: float) -> None:
        """How long workers that start from now on have between a warning and their end."""
        self._grace_s = seconds

    def _whose(self) -> str:
        return "this machine"

    def _can_be_had(self, name: str) -> bool:
        return name in self._offered

    def _given_back(self, name: str) -> None:
        self._offered.discard(name)

    def _gone(self, name: str) -> bool:
        """Taken: another one may be had. A crash is left to the next request."""
        return name not in self._offered

    def _notices(self) -> NoticesConfig:
        return self.cluster.notices.model_copy(update={"sigterm_grace_s": self._grace_s})
