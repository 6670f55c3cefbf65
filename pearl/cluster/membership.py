"""The driver's view of who is there: the plugin's events, each handed on once and in order.

A gap (the driver or the network was away) is closed by asking the plugin for its compacted log; the same happens every
RESYNC_S, because a Dask client that reconnects does not subscribe again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from distributed import Client
from distributed.client import ClosedClientError

from pearl.cluster.identity import Identity
from pearl.cluster.plugin import REFUSED, TOPIC

RESYNC_S = 10.0
LOST_TURNS = 3
"""A scheduler that answered at none of this many turns is lost, or another one without our plugin is in its place."""
ANSWER_S = 10.0
"""The scheduler answers a query within this time, or is asked again at the next turn."""


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A worker joined, has notice, or left."""

    kind: Literal["joined", "notice", "left"]
    identity: Identity
    address: str
    seconds_left: float = 0.0
    """Of a notice."""
    source: str = ""
    """Of a notice."""
    reason: str = ""
    """Of a departure: "closed" (it ended in good order), "drained" (it was given back) or "lost"."""
    detail: str = ""
    time: float = 0.0
    """When the scheduler knew, seconds since 1970 by its clock."""


@dataclass(frozen=True, slots=True)
class Position:
    """How far a driver has read: what it needs to go on where it was."""

    epoch: str
    seq: int
    present: tuple[MemberEvent, ...]
    """The newest `joined` of each slot that is there."""


class Membership:
    """Follows one scheduler on behalf of one driver."""

    def __init__(
        self,
        client: Client,
        on_event: Callable[[MemberEvent], None],
        start: Position | None = None,
        on_lost: Callable[[str], None] = lambda reason: None,
        on_refused: Callable[[Identity, str], None] = lambda identity, reason: None,
    ) -> None:
        """`on_lost(reason)`: the scheduler is gone for good; called once. `on_refused`: as `Cluster.on_refused`."""
        self.client, self.on_event, self.on_lost, self.on_refused = client, on_event, on_lost, on_refused
        self.epoch, self.seq = (start.epoch, start.seq) if start else ("", 0)
        self.present = {event.identity.slot: event for event in start.present} if start else {}
        self._behind = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def position(self) -> Position:
        return Position(self.epoch, self.seq, tuple(self.present.values()))

    async def start(self) -> None:
        """Subscribe and learn what there is. Raises OSError or TimeoutError if the scheduler does not answer."""
        await self._catch_up()
        self._task = asyncio.create_task(self._resync())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _resync(self) -> None:
        unanswered = 0
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._behind.wait(), RESYNC_S)
            self._behind.clear()
            try:
                await self._catch_up()
                unanswered = 0
            except (OSError, TimeoutError, AttributeError) as error:  # no connection: the next turn asks again
                unanswered += 1
                if unanswered == LOST_TURNS:
                    self.on_lost(f"it did not answer {unanswered} times: {error}")
            except ClosedClientError:
                if unanswered < LOST_TURNS:
                    self.on_lost("the connection to it broke and could not be made again")
                return

    def _live(self, event: tuple[float, dict[str, Any]]) -> None:
        wire = event[1]
        if wire["kind"] == REFUSED:  # it changes nobody's state, and has no number
            self.on_refused(Identity(**wire["identity"]), wire["detail"])
            return
        if wire["epoch"] == self.epoch and wire["seq"] <= self.seq:
            return
        if wire["epoch"] != self.epoch or wire["seq"] > self.seq + 1:
            self._behind.set()
            return
        self.seq = wire["seq"]
        self._apply(wire)

    async def _catch_up(self) -> None:
        self.client.subscribe_topic(TOPIC, self._live)
        query = self.client.scheduler.pearl_members(epoch=self.epoch, since=self.seq)
        try:
            reply = await asyncio.wait_for(query, ANSWER_S)
        except TimeoutError:
            said = f"driver waited in vain for the Dask scheduler's list of members: {ANSWER_S:g} s passed"
            raise TimeoutError(said) from None
        if reply["epoch"] != self.epoch:
            self._other_scheduler(reply)
        for wire in reply["events"]:
            if wire["seq"] > self.seq:
                self.seq = wire["seq"]
                self._apply(wire)
        self.seq = max(self.seq, reply["seq"])

    def _other_scheduler(self, reply: dict[str, Any]) -> None:
        self.epoch, self.seq = reply["epoch"], 0
        here = {(w["identity"]["slot"], w["identity"]["incarnation"]) for w in reply["events"] if w["kind"] == "joined"}
        for known in list(self.present.values()):
            if (known.identity.slot, known.identity.incarnation) not in here:
                self._gone(known, "the scheduler began anew without it")

    def _apply(self, wire: dict[str, Any]) -> None:
        fields = {name: wire[name] for name in ("seconds_left", "source", "reason", "detail", "time") if name in wire}
        event = MemberEvent(wire["kind"], Identity(**wire["identity"]), wire["address"], **fields)
        slot, known = event.identity.slot, self.present.get(event.identity.slot)
        if known and known.identity.incarnation < event.identity.incarnation:
            self._gone(known, f"unseen, before life {event.identity.incarnation} came")
        elif known and event.kind == "joined":
            return
        if event.kind == "joined":
            self.present[slot] = event
        elif event.kind == "left":
            self.present.pop(slot, None)
        self.on_event(event)

    def _gone(self, known: MemberEvent, detail: str) -> None:
        del self.present[known.identity.slot]
        self.on_event(MemberEvent("left", known.identity, known.address, reason="lost", detail=detail))
