"""What a tracker is shown of batches that are played without a trainer."""

from __future__ import annotations

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.profile import RuntimeTracker
from pearl.core.trajectory import TrajectoryId
from pearl.core.workload import Profile


class Watcher:
    """Observer that shows a tracker the batches and, as a trainer would, that they are trained."""

    def __init__(self, prior: Profile) -> None:
        self.tracker = RuntimeTracker(prior)
        self._groups: dict[int, list[TrajectoryId]] = {}

    def saw(self, now: float, entry: Event | Instruction) -> None:
        self.tracker.observe(entry, now)
        if isinstance(entry, ev.TrajectoryScored):
            self._groups.setdefault(entry.trajectory.group, []).append(entry.trajectory)
        elif isinstance(entry, ev.FinishRun):
            self.tracker.observe(ev.TrainBatch(1, tuple(tuple(group) for group in self._groups.values())), now)
            self.tracker.observe(ev.BatchTrained(1), now)
            self._groups = {}
