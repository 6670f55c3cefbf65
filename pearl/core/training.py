"""The training half of the Pipeline Scheduler: batches of complete groups, weights, checkpoints, a lost trainer.

The trainer works only while it owns all its GPUs. While some are lent it says that it wants them, and the Elastic
Scheduler sees to it.
"""

from __future__ import annotations

from collections.abc import Callable

from pearl.core import events as ev
from pearl.core.events import Instruction
from pearl.core.fleet import Fleet
from pearl.core.groups import Group
from pearl.core.lineage import Lineage
from pearl.core.samples import Samples
from pearl.core.settings import PipelineSettings


class Training:
    """`emit` takes each instruction."""

    def __init__(
        self,
        settings: PipelineSettings,
        samples: Samples,
        lineage: Lineage,
        fleet: Fleet,
        emit: Callable[[Instruction], None],
    ) -> None:
        self.settings, self.samples, self.lineage, self.fleet, self.emit = settings, samples, lineage, fleet, emit
        self.steps_done = 0
        self.batch: tuple[Group, ...] = ()
        """In training."""
        self.publishing = False
        self.checkpointing = False
        self.down = True
        self.restarts = 0
        self.wants_gpus = False
        """A batch, or a restart, waits for GPUs that are lent."""
        self._restart: ev.RestartTrainer | None = None

    @property
    def restarting(self) -> ev.RestartTrainer | None:
        """A restart that waits for GPUs."""
        return self._restart

    @property
    def idle(self) -> bool:
        """It has nothing to do before the next batch is complete, and there is one to come."""
        busy = self.batch or self.publishing or self.checkpointing or self.down or self.wants_gpus
        return not busy and 0 <= self.steps_done < self.settings.steps

    def train(self) -> None:
        """Begin the next step, or the restart, if there is one to begin."""
        if self._restart is not None:
            self.wants_gpus = self.fleet.gpus.lent
            if not self.wants_gpus:
                self.fleet.gpus.trainer_restarts()
                self.emit(self._restart)
                self._restart = None
            return
        if self.batch or self.publishing or self.down or self.steps_done >= self.settings.steps:
            return
        self.wants_gpus = False
        while batch := self.samples.next_batch():
            fresh = [group for group in batch if self.samples.drop_stale(group, self.steps_done + 1)]
            if len(fresh) < len(batch):
                continue
            if not self.fleet.gpus.trainer_home:
                self.wants_gpus = True
                return
            self.batch = self.samples.take(batch)
            members = tuple(tuple(m.finished for m in g.finished if m.finished) for g in batch)
            self.emit(ev.TrainBatch(self.steps_done + 1, members))
            return

    def ready(self, event: ev.TrainerReady) -> None:
        self.down = False
        self.steps_done = event.step
        self._publish(event.version)

    def trained(self, event: ev.BatchTrained) -> None:
        assert event.step == self.steps_done + 1, f"step {event.step} after {self.steps_done}"
        self.steps_done = event.step
        self.samples.trained(self.batch, event.step)
        if self.settings.checkpoints:
            self.lineage.trained(event.step, self.batch)
        self.batch = ()
        self.publishing = True
        self.checkpointing = self.settings.checkpoint_due(event.step)
        self.emit(ev.PublishSnapshot(self.lineage.next_version()))

    def published(self, event: ev.SnapshotPublished) -> None:
        self.publishing = False
        self._publish(event.version)

    def _publish(self, version: int) -> None:
        self.lineage.published(version, self.steps_done)
        self.fleet.published(version)

    def checkpointed(self, event: ev.CheckpointWritten) -> None:
        self.lineage.checkpointed(event.step)
        self.checkpointing = self.checkpointing and event.step < self.steps_done

    def lost(self, event: ev.TrainerLost) -> str | None:
        """Go back to the newest checkpoint; rollout goes on meanwhile as far as the staleness bound allows.

        Returns the reason why the run cannot go on, if so.
        """
        self.restarts += 1
        self.fleet.gpus.trainer_lost()
        if self.fleet.version < 0 or not self.settings.checkpoints:
            return event.reason
        if self.restarts > self.settings.worker_restarts:
            return f"the trainer was lost {self.restarts} times; the last time: {event.reason}"
        self.samples.give_back(self.lineage.roll_back(), self.batch)
        self.batch, self.publishing, self.checkpointing, self.down = (), False, False, True
        self.steps_done = self.lineage.checkpoint_step
        self._restart = ev.RestartTrainer(self.steps_done, self.lineage.next_version())
        return None
