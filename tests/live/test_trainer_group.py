"""What the trainer's ranks say, and what they do not say any more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from pearl.config.load import make_config
from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.live.actors import Actors
from pearl.live.run_directory import RunDirectory
from pearl.live.trainer import TrainerGroup


class Ranks(TrainerGroup):
    """All ranks answer; with `dies` one of them is gone before its group hears of the answers."""

    dies = False

    async def _all(self, method: str, args: Callable[[int], tuple[Any, ...]], timeout_s: float) -> list[Any]:
        if self.dies:
            self.left("trainer-0", self.incarnation, "killed")
        return [{"checksum": "c"}]


def ranks(posted: list[Event]) -> Ranks:
    config = make_config({"checkpoint": {"every_steps": 1, "keep_weights": False}}, "test")
    directory = RunDirectory(Path("unused"))
    return Ranks(cast(Actors, None), config, Path("unused"), directory, posted.append)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize(
    ("instruction", "answers"),
    [
        (ev.TrainBatch(1, ()), [ev.BatchTrained(1)]),
        (ev.PublishSnapshot(1), [ev.SnapshotPublished(1), ev.CheckpointWritten(1)]),
    ],
)
async def test_nothing_of_a_life_comes_behind_its_loss(dies: bool, instruction: Instruction, answers: list) -> None:
    """Else a step would count that is rolled back already, or a checkpoint of an abandoned line."""
    posted: list[Event] = []
    group = ranks(posted)
    group.dies = dies
    if isinstance(instruction, ev.TrainBatch):
        await group.train(instruction, [])
    else:
        assert isinstance(instruction, ev.PublishSnapshot)
        await group.publish(instruction, 1)
    assert posted == ([ev.TrainerLost("trainer-0 is gone: killed")] if dies else answers)
