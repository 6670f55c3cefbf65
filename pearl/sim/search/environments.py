"""Environment workers and what they play: turns of a trajectory, failures, their own ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.trajectory import StopReason, TrajectoryId
from pearl.sim.search.case import Kind
from pearl.sim.search.deadlines import TYPICAL_AND_DEADLINE_S

if TYPE_CHECKING:
    from pearl.sim.search.world import World

PROMPT_TOKENS, OBSERVATION_TOKENS = 10, 7
MOST_TURNS = 3
OWN_FAULT = 0.5
"""Share of the failures that are the task's own."""

Asked = ev.OpenEnvironment | ev.ReopenEnvironment | ev.StepEnvironment | ev.ScoreTrajectory


@dataclass(slots=True)
class EnvironmentWorker:
    name: str
    incarnation: int
    ready: bool = False
    alive: bool = True
    asked: dict[TrajectoryId, tuple[str, Event]] = field(default_factory=dict)
    """What it is at, by trajectory: the stage and the answer to come."""


class EnvironmentWorkers:
    def __init__(self, world: World) -> None:
        self.world, self.chance = world, world.chance
        self.workers: dict[str, EnvironmentWorker] = {}
        self.turns: dict[TrajectoryId, int] = {}

    def begin(self) -> tuple[str, ...]:
        self.workers = {}
        return tuple(f"environment-{i}" for i in range(self.world.case.environment_workers))

    def start(self, i: ev.StartEnvironmentWorker) -> None:
        before = self.workers.get(i.worker)
        assert before is None or not before.alive, f"{i.worker} is started twice"
        worker = self.workers[i.worker] = EnvironmentWorker(i.worker, i.incarnation)
        fate, _ = self.world.fate(i)
        if fate in (Kind.REFUSED, Kind.ANSWER_LOST):
            limit_s = TYPICAL_AND_DEADLINE_S["StartEnvironmentWorker"][1] * (fate is Kind.ANSWER_LOST)
            self.world.after(limit_s, self.die, worker, "did not start")
        else:
            self.world.after(self.world.takes_s(i, i.worker, i.incarnation), self._ready, worker)

    def _ready(self, worker: EnvironmentWorker) -> None:
        if worker.alive:
            worker.ready = True
            capacity = self.world.case.environments_per_worker
            self.world.post(ev.EnvironmentWorkerReady(worker.name, worker.incarnation, capacity))

    def die(self, worker: EnvironmentWorker, reason: str) -> None:
        """What it was asked fails; some answers were on their way. Told in any order."""
        if not worker.alive:
            return
        worker.alive = False
        self.world.post(ev.EnvironmentWorkerLost(worker.name, worker.incarnation, reason))
        for trajectory, (stage, answer) in worker.asked.items():
            name = (worker.name, worker.incarnation, trajectory)
            beat_it = self.chance.uniform("beat it", *name) < 0.4
            failed = ev.EnvironmentFailed(trajectory, stage, f"{worker.name} is gone", True)
            late_s = self.chance.delay_s(0.2, 2.0, "told late", *name)
            self.world.after(late_s, self.world.post, answer if beat_it else failed)
        worker.asked = {}

    def open(self, i: ev.OpenEnvironment) -> None:
        self.turns[i.trajectory] = 0
        self._ask(i, "open", ev.EnvironmentOpened(i.trajectory, PROMPT_TOKENS))

    def reopen(self, i: ev.ReopenEnvironment) -> None:
        self._ask(i, "replay", ev.EnvironmentReopened(i.trajectory))

    def step(self, i: ev.StepEnvironment) -> None:
        self.turns[i.trajectory] = turn = self.turns[i.trajectory] + 1
        last = turn >= MOST_TURNS or self.chance.uniform("submits", i.trajectory, turn) < 0.3
        tokens, stop = (0, StopReason.SUBMITTED) if last else (OBSERVATION_TOKENS, None)
        self._ask(i, "step", ev.EnvironmentStepped(i.trajectory, tokens, stop, 0.5))

    def score(self, i: ev.ScoreTrajectory) -> None:
        reward = self.chance.uniform("reward", i.trajectory)
        self._ask(i, "score", ev.TrajectoryScored(i.trajectory, reward))

    def _ask(self, i: Asked, stage: str, answer: Event) -> None:
        worker = self.workers[i.environment_worker]
        fate, fault = self.world.fate(i)
        if fate is Kind.REFUSED or not worker.alive:
            own = fault is not None and worker.alive and fault.pick < OWN_FAULT
            self.world.post(ev.EnvironmentFailed(i.trajectory, stage, "it broke", not own))
            return
        assert worker.ready, f"{worker.name} is asked and has not started"
        worker.asked[i.trajectory] = (stage, answer)
        if fate is Kind.ANSWER_LOST:
            limit_s = TYPICAL_AND_DEADLINE_S[type(i).__name__][1]
            self.world.after(limit_s, self.die, worker, f"{stage}: no answer in time")
            return
        delay_s = self.world.takes_s(i, i.trajectory, stage, self.turns.get(i.trajectory, 0))
        self.world.after(delay_s, self._answer, worker, i.trajectory, answer)

    def _answer(self, worker: EnvironmentWorker, trajectory: TrajectoryId, answer: Event) -> None:
        if worker.alive and trajectory in worker.asked:
            del worker.asked[trajectory]
            self.world.post(answer)
