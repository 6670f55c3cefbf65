"""A small interpreter in virtual time, with faults: it carries the Pipeline's instructions out as badly as allowed.

Every waiting instruction is answered once, after a random delay; with `faults` engines and environment workers die,
answers of dead lives arrive late, attempts fail. The machine's invariants are checked after every event.
"""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field

from pearl.core import events as ev
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.pipeline import Pipeline
from pearl.core.scheduler import Scheduler
from pearl.core.settings import PipelineSettings
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, StopReason, TrajectoryId


def settings(**changes: object) -> PipelineSettings:
    base = {
        "steps": 4, "groups_per_batch": 2, "group_size": 3, "max_staleness_steps": 1, "in_drawn_order": True,
        "abort_on_update": True, "max_response_tokens": 20, "max_trajectory_tokens": 120,
        "max_concurrent_trajectories": 64, "requests_per_worker": 4, "sample_attempts": 3, "min_group_size": 2,
        "quarantine_after": 3, "worker_restarts": 50,
    }  # fmt: skip
    return PipelineSettings(**{**base, **changes})  # type: ignore[arg-type]


@dataclass
class Virtual:
    pipeline: Pipeline
    seed: int = 0
    fault_rate: float = 0.0
    workers: tuple[str, ...] = ("rollout-0", "rollout-1")
    environments: tuple[str, ...] = ("environment-0",)
    capacity: int = 32
    now: float = 0.0
    heap: list[tuple[float, int, Event]] = field(default_factory=list)
    log: list[tuple[float, Event | Instruction]] = field(default_factory=list)
    in_flight: dict[str, dict[tuple[TrajectoryId, int], ev.Generate]] = field(default_factory=dict)
    aborted: set[TrajectoryId] = field(default_factory=set)
    dead: set[tuple[str, int]] = field(default_factory=set)
    budget: int = 20_000

    @property
    def machine(self) -> Pipeline | Scheduler:
        return self.pipeline

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.count = itertools.count()
        self.turns: dict[TrajectoryId, int] = {}

    def at(self, delay: float, event: Event) -> None:
        heapq.heappush(self.heap, (self.now + delay, next(self.count), event))

    def pop(self) -> tuple[float, int, Event]:
        return heapq.heappop(self.heap)

    def run(self) -> ev.FinishRun:
        """Play to the end; the machine must finish by itself."""
        self.at(0.0, ev.RunStarted(self.workers, self.environments))
        self.at(1.0, ev.TrainerReady(0, 0))
        while self.heap:
            self.budget -= 1
            assert self.budget > 0, "the run does not end"
            self.now, _, event = self.pop()
            if end := self.deliver(event):
                return end
        raise AssertionError("nothing is left to happen and the run is not finished")

    def deliver(self, event: Event) -> ev.FinishRun | None:
        if isinstance(event, ev.TurnGenerated):
            sent = self.in_flight[event.worker].pop((event.trajectory, event.incarnation), None)
            if sent is None:
                return None  # it was answered early, by an abort or a death
        self.log.append((self.now, event))
        for instruction in self.machine.handle(event, self.now):
            self.log.append((self.now, instruction))
            if isinstance(instruction, ev.FinishRun):
                return instruction
            self.carry_out(instruction)
        self.machine.validate()
        return None

    def fault(self) -> bool:
        return self.random.random() < self.fault_rate

    def delay(self) -> float:
        return self.random.expovariate(1.0)

    def carry_out(self, i: Instruction) -> None:
        match i:
            case ev.StartEngine():
                self.in_flight.setdefault(i.worker, {})
                if self.fault():
                    self.at(self.delay(), ev.WorkerLost(i.worker, i.incarnation, "did not start"))
                else:
                    self.at(5 * self.delay(), ev.EngineLoaded(i.worker, i.incarnation))
            case ev.SyncWeights():
                if self.fault():
                    self.kill(i.worker, i.incarnation, "sync failed")
                else:
                    self.at(self.delay(), ev.WeightsSynced(i.worker, i.incarnation, i.version))
            case ev.AbortRequests():
                self.interrupt(i.worker, i.incarnation, FinishReason.ABORT)
                self.at(0.0, ev.AbortAcknowledged(i.worker, i.incarnation))
            case ev.StartEnvironmentWorker():
                self.at(self.delay(), ev.EnvironmentWorkerReady(i.worker, i.incarnation, self.capacity))
                if self.fault():
                    self.at(30 * self.delay(), ev.EnvironmentWorkerLost(i.worker, i.incarnation, "killed"))
            case ev.ReopenEnvironment():
                self.turns.setdefault(i.trajectory, 1)
                self.answer_environment(i.trajectory, "replay", ev.EnvironmentReopened(i.trajectory))
            case ev.OpenEnvironment():
                self.turns[i.trajectory] = 0
                self.answer_environment(i.trajectory, "open", ev.EnvironmentOpened(i.trajectory, 10))
            case ev.Generate():
                assert i.max_new_tokens > 0
                self.in_flight[i.worker][i.trajectory, i.incarnation] = i
                if self.fault() and self.fault():
                    self.kill(i.worker, i.incarnation, "engine died")
                    return
                tokens = self.random.randint(1, i.max_new_tokens)
                finish = FinishReason.LENGTH if tokens == i.max_new_tokens else FinishReason.STOP
                self.at(self.delay(), self.turn(i, tokens, finish))
            case ev.StepEnvironment():
                self.turns[i.trajectory] += 1
                last = self.turns[i.trajectory] >= 3 or self.random.random() < 0.3
                stop = StopReason.SUBMITTED if last else None
                self.answer_environment(i.trajectory, "step", ev.EnvironmentStepped(i.trajectory, 7, stop))
            case ev.ScoreTrajectory():
                self.answer_environment(i.trajectory, "score", ev.TrajectoryScored(i.trajectory, self.random.random()))
            case ev.TrainBatch():
                self.answer_trainer(3 * self.delay(), ev.BatchTrained(i.step))
            case ev.PublishSnapshot():
                self.answer_trainer(self.delay(), ev.SnapshotPublished(i.version))
            case ev.RestartTrainer():
                self.answer_trainer(5 * self.delay(), ev.TrainerReady(i.version, i.step))

    def answer_environment(self, trajectory: TrajectoryId, stage: str, answer: Event) -> None:
        if self.fault():
            own = self.random.random() < 0.5
            answer = ev.EnvironmentFailed(trajectory, stage, "fault", infrastructure=not own)
        self.at(self.delay(), answer)

    def answer_trainer(self, delay: float, answer: Event) -> None:
        """The trainer may die instead, if there are checkpoints to go back to."""
        if self.pipeline.settings.checkpoints and self.fault():
            self.at(delay, ev.TrainerLost("a rank died"))
            return
        self.at(delay, answer)
        if isinstance(answer, ev.SnapshotPublished) and self.pipeline.settings.checkpoints:
            step = self.pipeline.steps_done
            if step % 2 == 0:
                self.at(delay, ev.CheckpointWritten(step))

    def turn(self, sent: ev.Generate, tokens: int, finish: FinishReason) -> ev.TurnGenerated:
        return ev.TurnGenerated(sent.trajectory, sent.worker, sent.incarnation, tokens, sent.version, finish)

    def interrupt(self, worker: str, incarnation: int, finish: FinishReason) -> None:
        for sent in list(self.in_flight[worker].values()):
            if sent.incarnation == incarnation:
                tokens = self.random.randint(0, sent.max_new_tokens)
                self.at(0.0, self.turn(sent, tokens, finish))

    def kill(self, worker: str, incarnation: int, reason: str) -> None:
        self.interrupt(worker, incarnation, FinishReason.LOST)
        if (worker, incarnation) not in self.dead:
            self.dead.add((worker, incarnation))
            self.at(0.0, ev.WorkerLost(worker, incarnation, reason))

    # --- what happened ----------------------------------------------------------------------------

    def of(self, kind: type) -> list:
        return [entry for _, entry in self.log if isinstance(entry, kind)]

    def trained(self) -> list[tuple[TrajectoryId, ...]]:
        return [group for batch in self.of(ev.TrainBatch) for group in batch.groups]

    def ends(self) -> dict[Outcome, int]:
        return {o: sum(e.outcome is o for e in self.of(ev.EndSample)) for o in Outcome}


def play(seed: int = 0, fault_rate: float = 0.0, tasks: int = 8, **changes: object) -> Virtual:
    """Run to the end and return what happened."""
    virtual = Virtual(Pipeline(settings(**changes), TaskCursor(tasks, seed)), seed=seed, fault_rate=fault_rate)
    virtual.end = virtual.run()  # type: ignore[attr-defined]
    return virtual
