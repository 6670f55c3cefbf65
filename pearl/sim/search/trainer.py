"""The trainer as it really is: one thing at a time, a life that may end at any point."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pearl.core import events as ev
from pearl.core.events import Event
from pearl.sim.search.case import Kind
from pearl.sim.search.deadlines import CHECKPOINT_S, TYPICAL_AND_DEADLINE_S

if TYPE_CHECKING:
    from pearl.sim.search.world import World

Asked = ev.TrainBatch | ev.PublishSnapshot | ev.OffloadTrainer | ev.ReloadTrainer | ev.RestartTrainer


class Trainer:
    def __init__(self, world: World) -> None:
        self.world, self.chance, self.engines = world, world.chance, world.engines
        self.life = 0
        self.alive = False
        self.step = 0
        self._free_s = 0.0
        """When it has done what it was asked for so far."""

    def begin(self, step: int, version: int) -> None:
        """A first start, or that of a driver that resumes: answers TrainerReady."""
        self._start(ev.RestartTrainer(step, version))

    def restart(self, i: ev.RestartTrainer) -> None:
        assert not self.alive, "the trainer is restarted and is not lost"
        self.engines.trainer_takes(tuple(self._all()))
        self._start(i)

    def _start(self, i: ev.RestartTrainer) -> None:
        self.life += 1
        self.alive, self.step, self._free_s = True, i.step, self.world.now
        self._answer(i, ev.TrainerReady(i.version, i.step))

    def train(self, i: ev.TrainBatch) -> None:
        self._at_home("trains")
        self._answer(i, ev.BatchTrained(i.step))

    def publish(self, i: ev.PublishSnapshot) -> None:
        self._at_home("publishes")
        self._answer(i, ev.SnapshotPublished(i.version))
        settings = self.world.case.pipeline
        due = settings.checkpoint_due(self.step) or (not settings.checkpoint_every_steps and self.step % 2 == 0)
        if settings.checkpoints and due:
            self._free_s += self.chance.delay_s(*CHECKPOINT_S, "checkpoint", self.life, self.step)
            self.world.at(self._free_s, self._say, self.life, ev.CheckpointWritten(self.step))

    def offload(self, i: ev.OffloadTrainer) -> None:
        assert i.slots and set(i.slots) <= self.engines.trainer_holds, f"the trainer is to leave {i.slots}"
        self._answer(i, ev.TrainerOffloaded(i.slots))

    def reload(self, i: ev.ReloadTrainer) -> None:
        assert not set(i.slots) & self.engines.trainer_holds, f"the trainer is to come back to {i.slots}"
        self.engines.trainer_takes(i.slots)
        self._answer(i, ev.TrainerReloaded(i.slots))

    def lose(self, reason: str) -> None:
        """A rank dies; the others keep their memory until all are started anew."""
        if self.alive:
            self.alive = False
            self.world.post(ev.TrainerLost(reason))

    def _all(self) -> list[str]:
        return [f"overlap-{i}" for i in range(self.world.case.overlap)]

    def _at_home(self, does: str) -> None:
        away = set(self._all()) - self.engines.trainer_holds
        assert not away, f"the trainer {does} without its GPUs of {sorted(away)}"

    def _answer(self, i: Asked, event: Event) -> None:
        if not self.alive:
            return  # its loss is told already
        name = type(i).__name__
        started = name != "RestartTrainer" or self.life > 1  # a run whose trainer never starts fails, rightly
        fate, _ = self.world.fate(i)
        if fate in (Kind.ANSWER_LOST, Kind.REFUSED) and self.world.case.pipeline.checkpoints and started:
            limit_s = TYPICAL_AND_DEADLINE_S[name][1] * (fate is Kind.ANSWER_LOST)
            self.world.after(limit_s, self._lose_life, self.life, f"{name}: no answer in time")
            return
        self._free_s = max(self._free_s, self.world.now) + self.world.takes_s(i, self.life, self.step)
        self.world.at(self._free_s, self._say, self.life, event)

    def _lose_life(self, life: int, reason: str) -> None:
        if life == self.life:
            self.lose(reason)

    def _say(self, life: int, event: Event) -> None:
        if not self.alive or life != self.life:
            return
        match event:
            case ev.BatchTrained():
                self.step = event.step
            case ev.TrainerOffloaded():
                self.engines.trainer_holds.difference_update(event.slots)
        self.world.post(event)
