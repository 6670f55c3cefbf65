"""Busy and idle time of trainer and rollout, from the stream of events and instructions alone.

The trainer is busy from a TrainBatch or PublishSnapshot to its answer; a rollout worker is busy while at least one
request is in flight on it. The window opens with the first dispatched request (before that everything starts up) and
closes at the last entry. Idle ratio = 1 - busy / window, for rollout the mean over all slots, lost ones included.
"""

from __future__ import annotations

from pearl.core import events as ev
from pearl.core.events import Event, Instruction


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


class Utilisation:
    def __init__(self) -> None:
        self.trainer = Busy()
        self.workers: dict[str, Busy] = {}
        self.began: float | None = None
        self.now = 0.0

    def saw(self, now: float, entry: Event | Instruction) -> None:
        self.now = now
        match entry:
            case ev.RunStarted():
                self.workers = {name: Busy() for name in entry.rollout_workers}
            case ev.Generate():
                if self.began is None:
                    self.began = now
                self.workers[entry.worker].add(+1, now)
            case ev.TurnGenerated():
                self.workers[entry.worker].add(-1, now)
            case ev.TrainBatch() | ev.PublishSnapshot():
                self.trainer.add(+1, now)
            case ev.BatchTrained() | ev.SnapshotPublished():
                self.trainer.add(-1, now)

    @property
    def window_s(self) -> float:
        return 0.0 if self.began is None else self.now - self.began

    @property
    def trainer_idle_ratio(self) -> float:
        return self._idle([self.trainer])

    @property
    def rollout_idle_ratio(self) -> float:
        return self._idle(list(self.workers.values()))

    def _idle(self, parts: list[Busy]) -> float:
        if not parts or self.window_s <= 0:
            return 0.0
        busy = sum(part.until(self.now) for part in parts) / len(parts)
        return min(1.0, max(0.0, 1.0 - busy / self.window_s))
