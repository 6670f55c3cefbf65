"""Plays the cloud on this machine: real workers come, get notice and are killed as a trace says, in scaled time.

The plan of who comes and goes is the simulator's own, so the same trace and seed name the same slots there and here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pearl.cluster.binding import Binding
from pearl.cluster.local_adapter import LocalAdapter
from pearl.core.events.base import Event
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice
from pearl.core.layout import Zone
from pearl.errors import UserError
from pearl.sim.availability import Availability
from pearl.sim.cluster import make_cluster


def preemptible_bindings(
    availability: Availability, gpus_per_slot: int, devices: Sequence[int], threads: int
) -> list[Binding]:
    """Bindings of all slots that the trace ever has; `devices` are this machine's GPUs for them, none on a CPU.

    Raises UserError if the GPUs do not suffice.
    """
    count = max((gpus for _, gpus in availability), default=0) // gpus_per_slot
    if devices and count * gpus_per_slot > len(devices):
        raise UserError(
            f"the trace has up to {count} slots of {gpus_per_slot} GPUs, this machine has {len(devices)} GPUs for them",
            "Scale the trace down.",
        )
    spans = [tuple(devices[i * gpus_per_slot : (i + 1) * gpus_per_slot]) for i in range(count)]
    return [Binding(f"{Zone.PREEMPTIBLE}-{i}", Zone.PREEMPTIBLE, span, threads) for i, span in enumerate(spans)]


class AvailabilityFollower:
    """One trace, played once."""

    def __init__(
        self,
        adapter: LocalAdapter,
        availability: Availability,
        gpus_per_slot: int,
        *,
        notice_s: float | None,
        scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        """`scale`: real seconds a second of the trace; `notice_s` (of the trace) None: slots go unannounced.

        The slots that leave are drawn from `seed`.
        """
        self.adapter, self.scale = adapter, scale
        self._began: float | None = None
        cluster = make_cluster(
            training_gpus=0,
            reserved_gpus=0,
            availability=availability,
            gpus_per_slot=gpus_per_slot,
            notice_s=notice_s,
            seed=seed,
        )
        self.changes = cluster.changes
        """(seconds of the trace, SlotJoined, SlotNotice or SlotLost), in order."""
        if notice_s is not None:
            adapter.grace(notice_s * scale)

    async def run(self, from_s: float = 0.0) -> None:
        """From `from_s` of the trace on, with the slots that are there then, until its last change is done."""
        loop = asyncio.get_running_loop()
        self._began = loop.time() - from_s * self.scale
        for change in self._standing(from_s):
            await self.apply(change)
        for seconds, change in self.changes:
            if seconds > from_s or not from_s:
                await asyncio.sleep(self._began + seconds * self.scale - loop.time())
                await self.apply(change)

    @property
    def seconds(self) -> float:
        """Of the trace, up to now."""
        return 0.0 if self._began is None else (asyncio.get_running_loop().time() - self._began) / self.scale

    def _standing(self, at_s: float) -> list[Event]:
        """Slots that joined up to `at_s` and neither went nor were told to."""
        here: dict[str, Event] = {}
        for seconds, change in self.changes:
            if not at_s or seconds > at_s:
                break
            if isinstance(change, SlotJoined):
                here[change.slot.name] = change
            elif isinstance(change, SlotNotice | SlotLost):
                here.pop(change.worker, None)
        return list(here.values())

    async def apply(self, change: Event) -> None:
        """Do to the worker what one of `changes` says; its lives are the adapter's to count, as it may crash."""
        match change:
            case SlotJoined():
                self.adapter.offer(change.slot.name)
            case SlotNotice():
                self.adapter.warn(change.worker)
            case SlotLost():
                await self.adapter.take(change.worker)
