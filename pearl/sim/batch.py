"""One batch's rollout on a fixed layout: what a makespan model predicts, played.

`OneBatch` is a machine of its own, the smallest there can be: all trajectories at once, each turn where
`pearl.core.routing` says, no weight updates, nobody comes or goes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Layout, Role
from pearl.core.routing import Prefix, Router
from pearl.core.state import WorkerSlot
from pearl.core.trajectory import StopReason, TrajectoryId
from pearl.core.workload import EngineProfile
from pearl.sim.cluster import make_cluster
from pearl.sim.durations import Durations
from pearl.sim.engine import EngineOptions
from pearl.sim.simulator import Models, Observer, Simulator
from pearl.sim.trainer import ModelShape, TrainerModel
from pearl.sim.workload import Workload

NO_TRAINER = TrainerModel(ModelShape("", 0, 0, 0, 0), gpus=1)
NO_LIMIT = 1 << 30


@dataclass(frozen=True, slots=True)
class BatchRun:
    """`makespan_s`: from the first dispatch to the last answer of an environment, without its scoring."""

    makespan_s: float
    turns: int
    prompt_tokens: int
    """Sum over turns of the whole contexts."""
    cached_tokens: int
    generated_tokens: int
    prefill_s: float
    """Sum over engines of the time in prefill iterations."""
    busy_s: float
    """The same of all iterations."""


def run_batch(
    layout: Layout,
    engine: EngineProfile,
    workload: Workload,
    trajectories: int,
    *,
    group_size: int = 16,
    first_task: int = 0,
    max_tokens: int = 32_768,
    affinity: float = 1.0,
    options: EngineOptions | None = None,
    observers: Iterable[Observer] = (),
) -> BatchRun:
    """Play it. The same for the same arguments; other tasks from `first_task` on are another batch.

    `affinity`: share of turns that ask for the worker with their prefix.
    """
    machine = OneBatch(layout, trajectories, group_size, first_task, max_tokens, affinity)
    durations = Durations(jitter_cv=0.0)
    models = Models(engine, NO_TRAINER, durations, options or EngineOptions())
    cluster = make_cluster(training_gpus=0, reserved_gpus=layout.workers, gpus_per_slot=1)
    simulator = Simulator(machine, cluster, models, workload, observers=observers)
    simulator.run()
    engines = [worker.engine for worker in simulator.workers.values() if worker.engine is not None]
    return BatchRun(
        machine.ended_s - machine.began_s,
        machine.turns,
        machine.prompt_tokens,
        machine.cached_tokens,
        machine.generated_tokens,
        sum(engine.prefill_s for engine in engines),
        sum(engine.busy_s for engine in engines),
    )


class OneBatch:
    def __init__(
        self,
        layout: Layout,
        trajectories: int,
        group_size: int,
        first_task: int,
        max_tokens: int,
        affinity: float = 1.0,
    ) -> None:
        if not layout.whole:
            raise ValueError(f"{layout} cannot serve")
        self.affinity, self._astray = affinity, 0.0
        self.layout, self.trajectories, self.max_tokens = layout, trajectories, max_tokens
        self.group_size, self.first_task = group_size, first_task
        self.router = Router(NO_LIMIT)
        self.workers: dict[str, WorkerSlot] = {}
        self.starting = layout.workers
        self.tokens: dict[TrajectoryId, int] = {}
        """Contexts of the live ones."""
        self.decoded: dict[TrajectoryId, Prefix] = {}
        self.prefilled: dict[TrajectoryId, Prefix] = {}
        self.turns_of: dict[TrajectoryId, int] = {}
        self.ready: list[TrajectoryId] = []
        """Have a prompt, wait for the engines."""
        self.left = trajectories
        self.began_s = self.ended_s = -1.0
        self.turns = self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0

    def handle(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case ev.TurnGenerated():
                return self._generated(event, now)
            case ev.EnvironmentStepped():
                if event.stop is not None:
                    return self._ended(event.trajectory, event.stop, now)
                self.tokens[event.trajectory] += event.observation_tokens
                return self._dispatch(event.trajectory, now)
            case ev.TrajectoryScored():
                return self._scored()
            case ev.PrefillDone():
                worker = self.workers[event.worker]
                worker.prefilling.pop(event.trajectory)
                self.router.changed(worker)
            case ev.EnvironmentOpened():
                self.tokens[event.trajectory] = event.prompt_tokens
                if self.starting:
                    self.ready.append(event.trajectory)
                else:
                    return self._dispatch(event.trajectory, now)
            case ev.RunStarted():
                return self._start(event.rollout_workers)
            case ev.EngineLoaded():
                return [ev.SyncWeights(event.worker, event.incarnation, 0)]
            case ev.WeightsSynced():
                self.router.join(self.workers[event.worker])
                self.starting -= 1
                if not self.starting:
                    return [i for trajectory in self.ready for i in self._dispatch(trajectory, now)]
        return []

    def validate(self) -> None:
        assert len(self.tokens) <= self.trajectories

    def _start(self, names: tuple[str, ...]) -> list[Instruction]:
        roles = [role for role in Role for _ in range(self.layout.count(role))]
        for name, role in zip(names, roles, strict=True):
            self.workers[name] = WorkerSlot(name, role=role, incarnation=1)
        starts: list[Instruction] = [ev.StartEngine(w.name, 1, w.role) for w in self.workers.values()]
        return starts + [
            ev.OpenEnvironment(TrajectoryId(g, m, 0), "environment-0", self.first_task + g)
            for g, m in (divmod(i, self.group_size) for i in range(self.trajectories))
        ]

    def _dispatch(self, trajectory: TrajectoryId, now: float) -> list[Instruction]:
        tokens = self.tokens[trajectory]
        room = self.max_tokens - tokens
        if room <= 0:
            return self._ended(trajectory, StopReason.TOKEN_LIMIT, now)
        if self.began_s < 0:
            self.began_s = now
        self._astray += 1.0 - self.affinity
        if self._astray >= 1.0:
            self._astray -= 1.0
            choice = self.router.choose(tokens)
        else:
            choice = self.router.choose(tokens, self.decoded.get(trajectory), self.prefilled.get(trajectory))
        assert choice is not None
        worker, prefill = choice
        worker.in_flight[trajectory] = tokens
        self.router.changed(worker)
        self.decoded[trajectory] = Prefix(worker.name, worker.cache)
        if prefill is None:
            return [ev.Generate(trajectory, worker.name, 1, 0, room)]
        prefill.prefilling[trajectory] = tokens
        self.router.changed(prefill)
        self.prefilled[trajectory] = Prefix(prefill.name, prefill.cache)
        return [ev.Generate(trajectory, worker.name, 1, 0, room, prefill.name, 1)]

    def _generated(self, event: ev.TurnGenerated, now: float) -> list[Instruction]:
        worker = self.workers[event.worker]
        del worker.in_flight[event.trajectory]
        self.router.changed(worker)
        self.turns += 1
        self.turns_of[event.trajectory] = self.turns_of.get(event.trajectory, 0) + 1
        self.tokens[event.trajectory] += event.tokens
        self.generated_tokens += event.tokens
        if event.telemetry:
            self.prompt_tokens += event.telemetry.prompt_tokens
            self.cached_tokens += event.telemetry.cached_tokens
        if not event.tokens or self.tokens[event.trajectory] >= self.max_tokens:
            return self._ended(event.trajectory, StopReason.TOKEN_LIMIT, now)
        return [ev.StepEnvironment(event.trajectory, "environment-0")]

    def _ended(self, trajectory: TrajectoryId, stop: StopReason, now: float) -> list[Instruction]:
        self.ended_s = now
        return [ev.ScoreTrajectory(trajectory, "environment-0", stop, self.turns_of.get(trajectory, 0))]

    def _scored(self) -> list[Instruction]:
        self.left -= 1
        return [] if self.left else [ev.FinishRun(False, "the batch is rolled out")]
