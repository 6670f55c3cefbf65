"""Environment workers as the Pipeline Scheduler sees them: how many environments each holds, and its restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pearl.core import events as ev
from pearl.core.events import Instruction
from pearl.core.routing import LoadIndex


@dataclass(slots=True)
class EnvironmentSlot:
    name: str
    incarnation: int = 0
    ready: bool = False
    capacity: int = 0
    live: int = 0
    restarts: int = 0


class EnvironmentTable(dict[str, EnvironmentSlot]):
    """Slots by name. `emit` takes each instruction."""

    def __init__(self, emit: Callable[[Instruction], None], restarts: int) -> None:
        super().__init__()
        self.emit = emit
        self.restarts = restarts
        self._free = LoadIndex()
        """Ready workers with room, by live environments."""

    def start_all(self, names: tuple[str, ...]) -> None:
        for name in names:
            self[name] = EnvironmentSlot(name)
            self._start(self[name])

    def _start(self, slot: EnvironmentSlot) -> None:
        slot.incarnation += 1
        self.emit(ev.StartEnvironmentWorker(slot.name, slot.incarnation))

    def take(self) -> EnvironmentSlot | None:
        """Room on the ready worker with the fewest live environments, None if all are full."""
        name = self._free.least()
        if name is None:
            return None
        slot = self[name]
        slot.live += 1
        self._changed(slot)
        return slot

    def give_back(self, name: str) -> None:
        self[name].live -= 1
        self._changed(self[name])

    def _changed(self, slot: EnvironmentSlot) -> None:
        if slot.ready and slot.live < slot.capacity:
            self._free.put(slot.name, slot.live)
        else:
            self._free.drop(slot.name)

    def became_ready(self, event: ev.EnvironmentWorkerReady) -> None:
        slot = self[event.worker]
        if slot.incarnation == event.incarnation and not slot.ready:
            slot.ready, slot.capacity, slot.live = True, event.capacity, 0
            self._changed(slot)

    def lost(self, event: ev.EnvironmentWorkerLost) -> tuple[bool, str | None]:
        """Whether this was news, and the reason why the run cannot go on, if so."""
        slot = self[event.worker]
        if slot.incarnation != event.incarnation:
            return False, None
        slot.ready, slot.live = False, 0
        self._changed(slot)
        slot.restarts += 1
        if slot.restarts <= self.restarts:
            self._start(slot)
        else:
            slot.incarnation += 1  # nothing more is believed of it
            if not any(s.ready or s.restarts <= self.restarts for s in self.values()):
                return True, f"no environment worker is left; the last one, {slot.name}: {event.reason}"
        return True, None
