"""Busy and idle time of trainer and rollout, from the stream of events and instructions alone.

The trainer is busy from a TrainBatch or PublishSnapshot to its answer; a rollout worker is busy while at least one
request is in flight on it. The window opens with the first dispatched request (before that everything starts up) and
closes at the last entry. Idle ratio = 1 - busy / there, for rollout summed over all slots. A reserved slot is there all
the time, lost or not; a preemptible one between its joining and its loss; an overlap one while it has its GPUs.
"""

from __future__ import annotations

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Zone


class Busy:
    """Seconds during which a count of open things was above zero."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.open = 0
        self.since = 0.0

    def add(self, change: int, now: float) -> None:
        if self.open > 0:
            self.seconds += now - self.since
        self.open = max(0, self.open + change)
        self.since = now

    def until(self, now: float) -> float:
        return self.seconds + (now - self.since if self.open > 0 else 0.0)


class Slot:
    """`there` while the worker could serve as far as its GPUs are concerned, `busy` while it does."""

    def __init__(self, *, stays: bool) -> None:
        self.busy, self.there, self.stays = Busy(), Busy(), stays

    def comes(self, now: float) -> None:
        if not self.there.open:
            self.there.add(+1, now)

    def goes(self, now: float) -> None:
        if not self.stays:
            self.there.add(-1, now)


class Utilisation:
    def __init__(self) -> None:
        self.trainer = Busy()
        self.workers: dict[str, Slot] = {}
        self._overlap: set[str] = set()
        self.began: float | None = None
        self.now = 0.0

    def saw(self, now: float, entry: Event | Instruction) -> None:
        self.now = now
        match entry:
            case ev.RunStarted():
                self._overlap = {slot.name for slot in entry.slots if slot.zone is Zone.OVERLAP}
                self.workers = {name: Slot(stays=name not in self._overlap) for name in entry.rollout_workers}
            case ev.Generate():
                if self.began is None:
                    self._open(now)
                self.workers[entry.worker].busy.add(+1, now)
            case ev.TurnGenerated():
                self.workers[entry.worker].busy.add(-1, now)
            case ev.TrainBatch() | ev.PublishSnapshot():
                self.trainer.add(+1, now)
            case ev.BatchTrained() | ev.SnapshotPublished():
                self.trainer.add(-1, now)
            case ev.SlotJoined():
                self.workers.setdefault(entry.slot.name, Slot(stays=False)).comes(now)
            case ev.SlotLost():
                self.workers[entry.worker].goes(now)
            case ev.StartEngine() | ev.ResumeEngine() if entry.worker in self._overlap:
                self.workers[entry.worker].comes(now)
            case ev.EngineReleased() | ev.WorkerLost() if entry.worker in self._overlap:
                self.workers[entry.worker].goes(now)

    def _open(self, now: float) -> None:
        self.began = now
        for slot in self.workers.values():
            if slot.stays or slot.there.open:
                slot.there = Busy()
                slot.comes(now)

    @property
    def window_s(self) -> float:
        return 0.0 if self.began is None else self.now - self.began

    @property
    def trainer_idle_ratio(self) -> float:
        return _idle(self.trainer.until(self.now), self.window_s)

    @property
    def rollout_idle_ratio(self) -> float:
        slots = self.workers.values()
        return _idle(sum(s.busy.until(self.now) for s in slots), sum(s.there.until(self.now) for s in slots))


def _idle(busy_s: float, there_s: float) -> float:
    return min(1.0, max(0.0, 1.0 - busy_s / there_s)) if there_s > 0 else 0.0
