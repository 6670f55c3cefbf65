"""What the live driver's journal would hold, in the order in which it would hold it (see `pearl/live/journal.py`)."""

from __future__ import annotations

from typing import Any

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.pipeline import Pipeline


class Records:
    """Tokens are written when they come back, before the event is posted; the rest when the driver takes its turn."""

    def __init__(self) -> None:
        self.list: list[dict[str, Any]] = []

    def write(self, kind: str, **fields: Any) -> None:
        self.list.append({"kind": kind, **fields})

    def posted(self, event: Event, sent: ev.Generate | None) -> None:
        """Whoever carried an instruction out is about to say so."""
        match event:
            case ev.TurnGenerated() if sent is not None:
                self.write(
                    "turn",
                    trajectory=event.trajectory,
                    token_ids=[1] * event.tokens,
                    versions=[[event.version, event.tokens]] if event.tokens else [],
                    finish=event.finish,
                    full=event.tokens >= sent.max_new_tokens,
                )
            case ev.EnvironmentOpened():
                self.write("prompt", trajectory=event.trajectory, token_ids=[0] * event.prompt_tokens)
            case ev.EnvironmentStepped() if event.stop is None:
                self.write("observation", trajectory=event.trajectory, token_ids=[2] * event.observation_tokens)
            case ev.TrajectoryScored():
                self.write("finished", trajectory={"id": event.trajectory, "reward": event.reward})

    def saw(self, entry: Event | Instruction, pipeline: Pipeline) -> None:
        """The driver is about to hand an event on, or to carry an instruction out."""
        match entry:
            case ev.DrawGroup():
                members = pipeline.settings.group_size
                self.write("draw", group=entry.group, task=entry.task, cursor=entry.cursor, members=members)
            case ev.OpenEnvironment():
                self.write("open", trajectory=entry.trajectory)
            case ev.DiscardTrajectory():
                self.write("discard", trajectory=entry.trajectory, infrastructure=entry.infrastructure)
            case ev.EndSample():
                self.write("end", sample=entry.sample, outcome=entry.outcome, reason=entry.reason)
            case ev.BatchTrained():
                self.write("trained", step=entry.step, groups=[group.number for group in pipeline.training])
            case ev.TrainerReady():
                self.write("published", version=entry.version, step=entry.step)
            case ev.SnapshotPublished():
                self.write("published", version=entry.version, step=pipeline.steps_done)
            case ev.CheckpointWritten():
                self.write("checkpoint", step=entry.step)
            case ev.RestartTrainer():
                self.write("rollback", step=entry.step)
            case ev.QuarantineTask():
                self.write("quarantine", task=entry.task)
