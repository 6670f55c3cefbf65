"""Preemptible slots that a trace offers, of which as many are taken as are wanted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pearl.core import events as ev
from pearl.core.layout import SlotInfo


class Market:
    """Nobody has said how many are wanted: all. What has notice is not given again, before the trace offers it anew."""

    def __init__(self) -> None:
        self.wanted: int | None = None
        self._offered: dict[str, SlotInfo] = {}
        """Not taken, in the order in which they could be had."""
        self._taken: dict[str, SlotInfo] = {}
        self._doomed: set[str] = set()
        self._lives: Counter[str] = Counter()

    def changed(self, event: ev.SlotJoined | ev.SlotNotice | ev.SlotLost) -> list[ev.Event]:
        """What happens to us if this happens in the trace. Lives are counted by what we took."""
        if isinstance(event, ev.SlotJoined):
            self._offered[event.slot.name] = event.slot
            self._doomed.discard(event.slot.name)
            return self._take()
        name = event.worker
        ours = name in self._taken or name in self._doomed
        self._offered.pop(name, None)
        if isinstance(event, ev.SlotLost):
            self._taken.pop(name, None)
            self._doomed.discard(name)
        elif ours:
            self._doomed.add(name)
        return [*([replace(event, life=self._lives[name])] if ours else []), *self._take()]

    def want(self, slots: int) -> list[ev.Event]:
        self.wanted = slots
        return self._take()

    def released(self, name: str) -> list[ev.Event]:
        """It can be had again, unless it has notice, or nobody counts."""
        slot = self._taken.pop(name, None)
        if slot is not None and self.wanted is not None and name not in self._doomed:
            self._offered[name] = slot
        return self._take()

    def _take(self) -> list[ev.Event]:
        taken: list[ev.Event] = []
        while self._offered and (self.wanted is None or len(self._taken) < self.wanted):
            name = next(iter(self._offered))
            self._taken[name] = self._offered.pop(name)
            self._lives[name] += 1
            taken.append(ev.SlotJoined(self._taken[name], self._lives[name]))
        return taken
