"""Membership events of the slots that an adapter answers for, as the driver's slot events: each once, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pearl.cluster.adapter import ObservedSlot, OnEvent
from pearl.cluster.identity import Identity
from pearl.cluster.membership import MemberEvent
from pearl.core.events.elastic import SlotJoined, SlotLost, SlotNotice


class Observation:
    """Who is here."""

    def __init__(self, on_event: OnEvent, known: Callable[[Identity], bool]) -> None:
        """`known`: whether that life of that slot is the adapter's."""
        self.on_event, self.known = on_event, known
        self.slots: dict[str, ObservedSlot] = {}
        self.reasons: dict[str, str] = {}
        """Why the adapter ends a slot, until it is gone."""

    def apply(self, event: MemberEvent) -> bool:
        """Whether the event was of the adapter's slots and changed something."""
        name, life = event.identity.slot, event.identity.incarnation
        if not self.known(event.identity):
            return False
        if event.kind == "joined":
            self.slots[name] = ObservedSlot(event.identity.slot_info(), life, event.address)
            self.on_event(SlotJoined(self.slots[name].slot, life))
            return True
        if (here := self.slots.get(name)) is None:
            return False
        if event.kind == "notice":
            self.slots[name] = replace(here, seconds_left=event.seconds_left)
            self.on_event(SlotNotice(name, life, event.seconds_left))
        else:
            del self.slots[name]
            reason = self.reasons.pop(name, None) or f"{event.reason}: {event.detail}"
            self.on_event(SlotLost(name, life, reason))
        return True
