"""The Pipeline Scheduler: the hot path of a run, as a machine without I/O.

`handle(event, now)` takes what happened and returns what to do. It draws tasks, opens environments, routes every turn,
forms batches of finished groups, trains, publishes and brings each engine to the new weights, while the next batch is
already being rolled out, as far ahead as the staleness bound allows.

Its parts share one list of instructions: `samples` keeps the books, `rollout` plays trajectories, `step` trains on
them, `fleet` moves rollout workers, `environments` environment workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pearl.core import events as ev
from pearl.core.environments import EnvironmentTable
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.fleet import Fleet
from pearl.core.groups import Attempt, Group, Member
from pearl.core.invariants import check_pipeline
from pearl.core.lineage import Lineage
from pearl.core.rollout import Rollout
from pearl.core.routing import Router
from pearl.core.samples import Samples
from pearl.core.settings import PipelineSettings
from pearl.core.staleness import groups_admissible
from pearl.core.tasks import TaskCursor
from pearl.core.training import Training
from pearl.core.trajectory import TrajectoryId


class Pipeline:
    """The machine. Its parts' attributes are its whole state; nobody else writes to them."""

    def __init__(self, settings: PipelineSettings, tasks: TaskCursor) -> None:
        self.settings = settings
        self.lineage = Lineage()
        router = Router(settings.requests_per_worker, settings.kv_tokens_per_worker)
        self.fleet = Fleet(
            self.emit, router, abort_on_update=settings.abort_on_update, restarts=settings.worker_restarts
        )
        self.environments = EnvironmentTable(self.emit, settings.worker_restarts)
        self.samples = Samples(settings, tasks, self.emit)
        self.rollout = Rollout(settings, self.samples, self.lineage, self.fleet, self.environments, self.emit)
        self.step = Training(settings, self.samples, self.lineage, self.fleet, self.emit)
        self.finished = False
        self.now = 0.0
        self._out: list[Instruction] = []
        fleet, rollout, step = self.fleet, self.rollout, self.step
        self._handlers: dict[type[Event], Callable[[Any], str | None]] = {
            ev.RunStarted: self._run_started,
            ev.EngineLoaded: lambda event: fleet.loaded(event, self.now),
            ev.WeightsSynced: lambda event: fleet.synced(event, self.now),
            ev.RoleSwitched: lambda event: fleet.switched(event, self.now),
            ev.EngineReleased: lambda event: fleet.released(event, self.now),
            ev.EngineAsleep: lambda event: fleet.asleep(event, self.now),
            ev.EngineResumed: lambda event: fleet.resumed(event, self.now),
            ev.AbortAcknowledged: fleet.abort_acknowledged,
            ev.PrefillDone: lambda event: fleet.prefilled(event.trajectory, event.worker, event.incarnation),
            ev.WorkerLost: lambda event: fleet.lost(event, self.now),
            ev.EnvironmentWorkerReady: self.environments.became_ready,
            ev.EnvironmentWorkerLost: rollout.environment_lost,
            ev.EnvironmentOpened: rollout.opened,
            ev.EnvironmentReopened: rollout.reopened,
            ev.EnvironmentStepped: rollout.stepped,
            ev.EnvironmentFailed: rollout.failed,
            ev.TurnGenerated: rollout.generated,
            ev.TrajectoryScored: rollout.scored,
            ev.TrainerReady: step.ready,
            ev.TrainerLost: step.lost,
            ev.BatchTrained: step.trained,
            ev.SnapshotPublished: step.published,
            ev.CheckpointWritten: step.checkpointed,
            ev.TrainerFailed: lambda event: event.reason,
            ev.StopRequested: self._stop_requested,
        }

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at time `now` (seconds, monotone) and return what to do, in order.

        With an Elastic Scheduler beside it, `Scheduler.handle` takes these three steps instead.
        """
        if self.finished:
            return []
        self.absorb(event, now)
        self.train()
        self.roll_out()
        self.fleet.gone.clear()  # nobody else takes note
        return self.taken()

    def absorb(self, event: Event, now: float) -> None:
        """What happened. Events that are the Elastic Scheduler's alone mean nothing here."""
        self.now = now
        handler = self._handlers.get(type(event))
        if handler is not None and (reason := handler(event)):
            self.finish(True, reason)

    def train(self) -> None:
        if not self.finished:
            self.step.train()

    def roll_out(self) -> None:
        """Workers towards their goals, then trajectories onto workers."""
        if not self.finished:
            self.fleet.settle(self.now)
            if self._done():
                self.finish(False, f"{self.steps_done} steps done")
        if not self.finished:
            self._admit()
        if not self.finished:
            self.rollout.open()
            self.rollout.dispatch()

    def taken(self) -> list[Instruction]:
        """The instructions so far, once."""
        out, self._out = self._out, []
        return out

    def emit(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    def _run_started(self, event: ev.RunStarted) -> None:
        self.fleet.start_all(event.rollout_workers, event.slots)
        self.environments.start_all(event.environment_workers)

    def _admit(self) -> None:
        s = self.settings
        if self.version < 0:
            return
        allowed = groups_admissible(self.published_step, s.max_staleness_steps, s.groups_per_batch, s.steps)
        while self.drawn_groups - self.samples.dropped_groups < allowed:
            group = self.samples.draw()
            if group is None:
                self.finish(True, "every task is quarantined; see the quarantine events for the reasons")
                return
            self.rollout.waiting.extend(group.members)

    def _done(self) -> bool:
        """All steps are trained and published, and no engine is on its way to the last weights."""
        return self.published_step == self.settings.steps and not self.step.down and self.fleet.settled

    def _stop_requested(self, event: ev.StopRequested) -> None:
        self.finish(False, event.reason)

    def finish(self, failed: bool, reason: str) -> None:
        self.finished = True
        self.emit(ev.FinishRun(failed, reason))

    # --- what one may look at ---------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Newest published weights; -1 before the trainer is ready."""
        return self.fleet.version

    @property
    def published_step(self) -> int:
        """Optimizer step of the newest published weights; -1 before the trainer is ready."""
        return self.lineage.step_of.get(self.version, -1)

    @property
    def tasks(self) -> TaskCursor:
        return self.samples.tasks

    @property
    def groups(self) -> dict[int, Group]:
        return self.samples.groups

    @property
    def ready(self) -> deque[int]:
        return self.samples.ready

    @property
    def ended(self) -> dict[Outcome, int]:
        return self.samples.ended

    @property
    def drawn_groups(self) -> int:
        return self.samples.drawn_groups

    @property
    def samples_drawn(self) -> int:
        return self.samples.drawn

    @property
    def samples_unfinished(self) -> int:
        return self.samples.unfinished

    @property
    def attempts(self) -> dict[TrajectoryId, Attempt]:
        return self.rollout.attempts

    @property
    def waiting(self) -> deque[Member]:
        return self.rollout.waiting

    @property
    def queue(self) -> list[TrajectoryId]:
        return self.rollout.queue

    @property
    def suspended(self) -> deque[Attempt]:
        return self.rollout.suspended

    @property
    def steps_done(self) -> int:
        return self.step.steps_done

    @property
    def training(self) -> tuple[Group, ...]:
        """The batch in training."""
        return self.step.batch

    @property
    def publishing(self) -> bool:
        return self.step.publishing

    def validate(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        check_pipeline(self)
