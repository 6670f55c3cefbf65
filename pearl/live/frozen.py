"""Weights that nobody trains: what stands in a trainer's place when a run only plays.

Step s of such a run is the play of subject s, all of it by weights of version s - 1; "training" it notes the rewards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pearl.config import TrainerConfig
from pearl.core import events as ev
from pearl.core.trajectory import Trajectory
from pearl.kept import is_run, kept_weights
from pearl.live.trainer import TrainerGroup
from pearl.live.waits import in_own_thread
from pearl.models import resolve_model
from pearl.weights.snapshot import SnapshotError, config_hash, read_tensors, write_snapshot

UNIMPORTANT = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Keys of config.json that do not change what a model computes."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that is played: `model_directory`, with the weights of `snapshot` in place of its own if there is one."""

    name: str
    model_directory: Path
    snapshot: Path | None = None
    version: int | None = None
    run: Path | None = None

    @classmethod
    def find(cls, text: str) -> Subject:
        """A run directory (its newest kept weights) or what `model.path` takes. Raises UserError."""
        path = Path(text).expanduser()
        if is_run(path):
            kept = kept_weights(path)
            return cls(text, kept.model_directory, kept.snapshot, kept.version, kept.run)
        return cls(text, resolve_model(text))

    def tensors(self, dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names that a trainer gives them. Raises SnapshotError if they are damaged."""
        wanted = getattr(torch, dtype)
        if self.snapshot is not None:
            yield from ((name, tensor.to(wanted)) for name, tensor in read_tensors(self.snapshot))
        else:
            from trainer.engine import load_model

            model = load_model(self.model_directory, TrainerConfig(dtype=dtype))
            yield from model.named_parameters()

    def computes_like(self, other: Subject) -> bool:
        """Whether one engine can play both: they differ in weights only, not in configuration or tokenizer."""
        return _character(self.model_directory) == _character(other.model_directory)


def _character(directory: Path) -> dict[str, Any]:
    config = json.loads((directory / "config.json").read_text())
    files = [*directory.glob("tokenizer*"), *directory.glob("*.jinja"), *directory.glob("generation_config.json")]
    texts = {path.name: path.read_bytes() for path in files if path.is_file()}
    return {"config": {key: value for key, value in config.items() if key not in UNIMPORTANT}, **texts}


class FrozenWeights(TrainerGroup):
    """Takes the place of a driver's trainer group."""

    def __init__(self, group: TrainerGroup, subjects: list[Subject]) -> None:
        super().__init__(group.actors, group.config, group.model_directory, group.directory, group.post)
        self.subjects = subjects
        self.played: list[list[list[Trajectory]]] = []
        """By subject and task, in the order of the draws."""

    @property
    def done(self) -> bool:
        return len(self.played) == len(self.subjects)

    async def start(self, step: int = 0, version: int = 0) -> None:
        if await self._put_out(version):
            self.post(ev.TrainerReady(version, step))

    async def train(self, i: ev.TrainBatch, groups: list[list[Trajectory]]) -> None:
        self.played.append(groups)
        self.post(ev.BatchTrained(i.step))

    async def publish(self, i: ev.PublishSnapshot, step: int) -> None:
        if self.done:
            self.post(ev.StopRequested("all tasks are played"))
        elif await self._put_out(i.version):
            self.post(ev.SnapshotPublished(i.version))

    async def _put_out(self, version: int) -> bool:
        """Write the snapshot of the subject that is next; answers TrainerFailed if that fails."""
        subject, limit = self.subjects[version], self.config.deadlines.publish_s
        try:
            self.checksums[version] = await self.actors.waits.until(
                "driver",
                f"the weights of {subject.name} (deadlines.publish_s)",
                limit,
                in_own_thread(self._write, subject, version),
            )
        except (OSError, ValueError, SnapshotError) as error:
            reason = str(error)
        else:
            return True
        self.post(ev.TrainerFailed(f"the weights of {subject.name}: {reason}"))
        return False

    def _write(self, subject: Subject, version: int) -> str:
        tensors = subject.tensors(self.config.model.dtype)
        root, shapes = self.directory.snapshots, config_hash(subject.model_directory)
        return write_snapshot(root, version, shapes, tensors).checksum
