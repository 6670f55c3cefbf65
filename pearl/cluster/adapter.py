"""What every kind of cluster can do for the driver: ask for slots, give them back, say what there is.

An adapter keeps three things apart: the *plan* (what was asked for), the *requested* (asked of the provider, not here
yet) and the *observed* (here, by the scheduler's word alone). It brings the second to the first; it never believes in a
slot that has not joined, and never ends one that it was not told to release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from pearl.core.events.base import Event
from pearl.core.layout import SlotInfo, Zone
from pearl.core.requests import Cause


@dataclass(frozen=True, slots=True)
class SlotShape:
    """What one slot needs: GPUs of one host (0 on a CPU) and CPU threads."""

    gpus: int
    threads: int = 1


@dataclass(frozen=True, slots=True)
class RequestFailed(Event):
    """The provider did not give `count` of the slots that were asked for.

    A provider with options is asked again by the adapter, in another one at once, in this one when it has rested; this
    machine by `request` only.
    """

    zone: Zone
    count: int
    shape: SlotShape
    reason: str
    cause: Cause = Cause.OTHER
    option: str = ""
    """Instance type, availability zone, partition or host that was asked."""
    again_s: float = 0.0
    """Before that nothing of it is worth asking for."""


@dataclass(frozen=True, slots=True)
class ObservedSlot:
    """A slot that is here."""

    slot: SlotInfo
    life: int
    address: str
    """Of its Dask worker."""
    seconds_left: float | None = None
    """As its notice said when it came, None without one."""


OnEvent = Callable[[Event], None]
"""Takes SlotJoined, SlotNotice, SlotLost (each once, in order) and RequestFailed; must not block."""


class ClusterAdapter(Protocol):
    """One way to get slots. All calls are idempotent; none waits for a slot to come or go."""

    async def connect(self) -> None:
        """Make sure that the provider can be reached. Raises UserError, with the remedy, if it cannot."""

    async def request(self, zone: Zone, n: int, shape: SlotShape) -> None:
        """From now on `n` slots are wanted in `zone`, those that are here included.

        Asks for what is missing. Fewer than before withdraws what has not come yet and ends nothing.
        """

    async def release(self, workers: Iterable[str]) -> None:
        """Give slots back: their processes end, `SlotLost` follows. Names that are not here mean nothing.

        The plan falls so that they are not asked for again, except for slots under notice, which the provider would
        have taken anyway.
        """

    def observed(self) -> dict[str, ObservedSlot]:
        """Who is here, by name."""

    async def close(self) -> None:
        """Withdraw every request and give every slot back."""
