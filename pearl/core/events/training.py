"""The trainer: batches, weights, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.events.base import Event, Instruction
from pearl.core.trajectory import TrajectoryId


@dataclass(frozen=True, slots=True)
class TrainerReady(Event):
    """All ranks are up at optimizer step `step`; their weights are published as `version`."""

    version: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class BatchTrained(Event):
    """Optimizer step `step` (counted from 1) is done; its weights are to be published."""

    step: int


@dataclass(frozen=True, slots=True)
class SnapshotPublished(Event):
    version: int


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """The state after `step` is on disk; the run can go back to it."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainerLost(Event):
    """A rank died or fell silent. What was trained since the newest checkpoint is lost with it.

    Nothing else of this life of the trainer comes behind it.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class TrainerFailed(Event):
    """The trainer cannot go on, and a restart would not help."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestartTrainer(Instruction):
    """Form the group anew from the checkpoint of `step` (0: the initial model) and publish it as `version`.

    All that was trained after that step is rolled back. Answer: TrainerReady, TrainerLost or TrainerFailed.
    """

    step: int
    version: int


@dataclass(frozen=True, slots=True)
class TrainBatch(Instruction):
    """Train on these groups, members in order. Answer: BatchTrained, TrainerLost or TrainerFailed."""

    step: int
    groups: tuple[tuple[TrajectoryId, ...], ...]


@dataclass(frozen=True, slots=True)
class PublishSnapshot(Instruction):
    """Export the trainer's weights as `version`. Answer: SnapshotPublished, TrainerLost or TrainerFailed."""

    version: int


@dataclass(frozen=True, slots=True)
class RetireSnapshots(Instruction):
    """No worker will read `version` or an older one again."""

    version: int


@dataclass(frozen=True, slots=True)
class OffloadTrainer(Instruction):
    """Move the training state of these overlap slots' ranks off their GPUs. Answer: TrainerOffloaded or TrainerLost."""

    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainerOffloaded(Event):
    """The GPUs of these slots are free of training state, as checked on the device."""

    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ReloadTrainer(Instruction):
    """Bring the training state of these slots' ranks back. Answer: TrainerReloaded or TrainerLost."""

    slots: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrainerReloaded(Event):
    slots: tuple[str, ...]
