"""The Pipeline Scheduler: the hot path of a run, as a machine without I/O.

`handle(event, now)` takes what happened and returns what to do. It draws tasks, opens environments, routes every turn,
forms batches of finished groups, trains, publishes and brings each engine to the new weights, while the next batch is
already being rolled out, as far ahead as the staleness bound allows.

Fates that are decided here, and nowhere else:
* A request interrupted by a weight update or a lost engine keeps its tokens; the turn goes on from them elsewhere.
* An attempt whose environment is lost starts again; its sample fails after too many attempts.
* A group with failed members trains with the rest if `min_group_size` are left, else it is dropped and replaced.
* A sample overtaken by the staleness bound ends as stale; what is left of its group follows the same rule.
* A task whose groups keep failing is quarantined.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from typing import Any

from pearl.core import events as ev
from pearl.core.environments import EnvironmentTable
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.fleet import Fleet
from pearl.core.groups import Attempt, Group, Member, Phase
from pearl.core.invariants import check_pipeline
from pearl.core.lineage import Lineage
from pearl.core.routing import choose_worker
from pearl.core.settings import PipelineSettings
from pearl.core.staleness import groups_admissible, is_stale
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, SampleId, StopReason, TrajectoryId

INFRASTRUCTURE_ATTEMPTS = 10
"""Restarts of one sample for reasons that are not its own, before it fails: a bound against endless loops."""
LOSSES_PER_TRAJECTORY = 5
"""Engines that may die under one trajectory before it is suspected of killing them."""


class Pipeline:
    """The machine. Its attributes are its whole state; nobody else writes to them."""

    def __init__(self, settings: PipelineSettings, tasks: TaskCursor) -> None:
        self.settings = settings
        self.tasks = tasks
        self.fleet = Fleet(self._emit, abort_on_update=settings.abort_on_update, restarts=settings.worker_restarts)
        self.environments = EnvironmentTable(self._emit, settings.worker_restarts)
        self.groups: dict[int, Group] = {}
        """Groups that are neither trained nor dropped, by number, in draw order."""
        self.attempts: dict[TrajectoryId, Attempt] = {}
        self.waiting: deque[Member] = deque()
        """Samples without an open environment."""
        self.queue: list[TrajectoryId] = []
        """Trajectories that wait for a worker: a heap, oldest group first."""
        self.ready: deque[int] = deque()
        """Complete groups in the order in which they were completed."""
        self.suspended: deque[Attempt] = deque()
        """Trajectories of an interrupted run whose environments are to be rebuilt."""
        self.lineage = Lineage()
        self.steps_done = 0
        self.training: tuple[Group, ...] = ()
        self.publishing = False
        self.trainer_down = True
        self.trainer_restarts = 0
        self.drawn_groups = 0
        self.dropped_groups = 0
        self.task_failures: dict[int, int] = {}
        self.ended: dict[Outcome, int] = dict.fromkeys(Outcome, 0)
        self.finished = False
        self._now = 0.0
        self._out: list[Instruction] = []
        self._handlers: dict[type[Event], Callable[[Any], None]] = {
            ev.RunStarted: self._run_started,
            ev.EngineLoaded: lambda event: self.fleet.loaded(event, self._now),
            ev.WeightsSynced: lambda event: self.fleet.synced(event, self._now),
            ev.AbortAcknowledged: lambda event: self.fleet.abort_acknowledged(event, self._now),
            ev.WorkerLost: self._worker_lost,
            ev.EnvironmentWorkerReady: self.environments.became_ready,
            ev.EnvironmentWorkerLost: self._environment_worker_lost,
            ev.EnvironmentOpened: self._environment_opened,
            ev.TurnGenerated: self._turn_generated,
            ev.EnvironmentStepped: self._environment_stepped,
            ev.TrajectoryScored: self._trajectory_scored,
            ev.EnvironmentFailed: self._environment_failed,
            ev.EnvironmentReopened: self._environment_reopened,
            ev.TrainerReady: self._trainer_ready,
            ev.TrainerLost: self._trainer_lost,
            ev.CheckpointWritten: lambda event: self.lineage.checkpointed(event.step),
            ev.BatchTrained: self._batch_trained,
            ev.SnapshotPublished: self._snapshot_published,
            ev.TrainerFailed: self._trainer_failed,
            ev.StopRequested: self._stop_requested,
        }

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take one event at time `now` (seconds, monotone) and return what to do, in order."""
        if self.finished:
            return []
        self._now = now
        self._out = []
        self._handlers[type(event)](event)
        if not self.finished and self._done():
            self._finish(False, f"{self.steps_done} steps done")
        if not self.finished:
            self._admit()
            self._open()
            self._dispatch()
            self._train()
        return self._out

    def _emit(self, instruction: Instruction) -> None:
        self._out.append(instruction)

    @property
    def version(self) -> int:
        """Newest published weights; -1 before the trainer is ready."""
        return self.fleet.version

    @property
    def published_step(self) -> int:
        """Optimizer step of the newest published weights; -1 before the trainer is ready."""
        return self.lineage.step_of.get(self.version, -1)

    def _run_started(self, event: ev.RunStarted) -> None:
        self.fleet.start_all(event.rollout_workers, self._now)
        self.environments.start_all(event.environment_workers)

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        if reason := self.fleet.lost(event, self._now):
            self._finish(True, reason)

    def _environment_worker_lost(self, event: ev.EnvironmentWorkerLost) -> None:
        news, end = self.environments.lost(event)
        if news:
            for attempt in [a for a in self.attempts.values() if a.environment_worker == event.worker]:
                self._discard(attempt, f"{event.worker}: {event.reason}", infrastructure=True, close=False)
        if end:
            self._finish(True, end)

    # --- rollout ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        s = self.settings
        if self.version < 0:
            return
        allowed = groups_admissible(self.published_step, s.max_staleness_steps, s.groups_per_batch, s.steps)
        while self.drawn_groups - self.dropped_groups < allowed:
            task = self.tasks.draw()
            if task is None:
                self._finish(True, "every task is quarantined; see the quarantine events for the reasons")
                return
            group = Group(self.drawn_groups, task, open_members=s.group_size)
            group.members = [Member(SampleId(group.number, i)) for i in range(s.group_size)]
            self.drawn_groups += 1
            self.groups[group.number] = group
            self.waiting.extend(group.members)
            self._out.append(ev.DrawGroup(group.number, task, self.tasks.drawn))

    def _open(self) -> None:
        while (self.suspended or self.waiting) and len(self.attempts) < self.settings.max_concurrent_trajectories:
            slot = self.environments.roomiest()
            if slot is None:
                return
            if self.suspended:
                attempt = self.suspended.popleft()
                attempt.environment_worker = slot.name
                slot.live += 1
                self.attempts[attempt.id] = attempt
                self._out.append(ev.ReopenEnvironment(attempt.id, slot.name, attempt.task))
                continue
            member = self.waiting.popleft()
            trajectory = TrajectoryId(*member.sample, member.attempts)
            member.attempts += 1
            slot.live += 1
            task = self.groups[member.sample.group].task
            self.attempts[trajectory] = Attempt(trajectory, task, slot.name)
            self._out.append(ev.OpenEnvironment(trajectory, slot.name, task))

    def _environment_opened(self, event: ev.EnvironmentOpened) -> None:
        if attempt := self._attempt(event.trajectory, Phase.OPENING):
            attempt.tokens = event.prompt_tokens
            if self._room(attempt) > 0:
                self._enqueue(attempt)
            else:
                reason = (
                    f"a prompt of {event.prompt_tokens} tokens leaves no room under pipeline.max_trajectory_tokens "
                    f"= {self.settings.max_trajectory_tokens}"
                )
                self._discard(attempt, reason, infrastructure=False, retry=False)

    def _environment_reopened(self, event: ev.EnvironmentReopened) -> None:
        if attempt := self._attempt(event.trajectory, Phase.OPENING):
            if attempt.resume_at is Phase.STEPPING:
                attempt.phase = Phase.STEPPING
                self._out.append(ev.StepEnvironment(attempt.id, attempt.environment_worker))
            elif self._room(attempt) > 0:
                self._enqueue(attempt)
            else:
                self._score(attempt, StopReason.TOKEN_LIMIT)

    def _room(self, attempt: Attempt) -> int:
        """Tokens that the present turn may still generate."""
        s = self.settings
        return min(s.max_response_tokens - attempt.turn_tokens, s.max_trajectory_tokens - attempt.tokens)

    def _enqueue(self, attempt: Attempt) -> None:
        attempt.phase = Phase.QUEUED
        heapq.heappush(self.queue, attempt.id)

    def _dispatch(self) -> None:
        if not self.queue:
            return
        serving = self.fleet.serving()
        while self.queue:
            attempt = self.attempts.get(self.queue[0])
            if attempt is None or attempt.phase is not Phase.QUEUED:
                heapq.heappop(self.queue)
                continue
            worker = choose_worker(serving, self.settings.requests_per_worker, attempt.last_worker)
            if worker is None:
                return
            heapq.heappop(self.queue)
            attempt.phase = Phase.GENERATING
            attempt.last_worker = worker.name
            worker.in_flight.add(attempt.id)
            room = self._room(attempt)
            self._out.append(ev.Generate(attempt.id, worker.name, worker.incarnation, self.version, room))

    def _turn_generated(self, event: ev.TurnGenerated) -> None:
        self.fleet.returned(event, self._now)
        attempt = self._attempt(event.trajectory, Phase.GENERATING)
        if attempt is None:
            return
        if event.tokens:
            attempt.tokens += event.tokens
            attempt.turn_tokens += event.tokens
            attempt.generated_tokens += event.tokens
            step, oldest = self.lineage.step_of[event.version], attempt.oldest_step
            attempt.oldest_step = step if oldest is None else min(oldest, step)
        if event.finish is FinishReason.FAILED:
            self._discard(attempt, f"generation failed: {event.reason}", infrastructure=False)
        elif event.finish in (FinishReason.ABORT, FinishReason.LOST) and self._room(attempt) > 0:
            attempt.losses += event.finish is FinishReason.LOST
            if attempt.losses > LOSSES_PER_TRAJECTORY:
                self._discard(attempt, f"{attempt.losses} engines died under it: {event.reason}", infrastructure=False)
            else:
                self._enqueue(attempt)
        elif not attempt.turn_tokens:
            self._discard(attempt, "an empty response", infrastructure=False)
        else:
            attempt.turns += 1
            cut = event.finish is not FinishReason.STOP and attempt.tokens >= self.settings.max_trajectory_tokens
            if cut:
                self._score(attempt, StopReason.TOKEN_LIMIT)
            else:
                attempt.phase = Phase.STEPPING
                self._out.append(ev.StepEnvironment(attempt.id, attempt.environment_worker))

    def _environment_stepped(self, event: ev.EnvironmentStepped) -> None:
        if attempt := self._attempt(event.trajectory, Phase.STEPPING):
            if event.stop is not None:
                self._score(attempt, event.stop)
                return
            attempt.tokens += event.observation_tokens
            attempt.turn_tokens = 0
            if self._room(attempt) > 0:
                self._enqueue(attempt)
            else:
                self._score(attempt, StopReason.TOKEN_LIMIT)

    def _score(self, attempt: Attempt, stop: StopReason) -> None:
        attempt.phase = Phase.SCORING
        self._out.append(ev.ScoreTrajectory(attempt.id, attempt.environment_worker, stop, attempt.turns))

    def _trajectory_scored(self, event: ev.TrajectoryScored) -> None:
        if attempt := self._attempt(event.trajectory, Phase.SCORING):
            group, member = self._member(attempt.id)
            member.finished, member.reward = attempt.id, event.reward
            member.oldest_step = attempt.oldest_step or 0
            self._close(attempt)
            self._settle(group)

    def _environment_failed(self, event: ev.EnvironmentFailed) -> None:
        if attempt := self.attempts.get(event.trajectory):
            self._discard(attempt, f"{event.stage}: {event.reason}", infrastructure=event.infrastructure)

    def _attempt(self, trajectory: TrajectoryId, phase: Phase) -> Attempt | None:
        """The live attempt, unless this is a late answer to one that was given up."""
        attempt = self.attempts.get(trajectory)
        return attempt if attempt is not None and attempt.phase is phase else None

    def _member(self, trajectory: TrajectoryId) -> tuple[Group, Member]:
        group = self.groups[trajectory.group]
        return group, group.members[trajectory.member]

    def _close(self, attempt: Attempt) -> None:
        del self.attempts[attempt.id]
        slot = self.environments[attempt.environment_worker]
        slot.live -= 1
        self._out.append(ev.CloseEnvironment(attempt.id, slot.name))

    def _discard(
        self, attempt: Attempt, reason: str, *, infrastructure: bool, retry: bool = True, close: bool = True
    ) -> None:
        """Give up one attempt; its sample tries again or fails."""
        if close:
            self._close(attempt)
        else:
            del self.attempts[attempt.id]
        self._out.append(ev.DiscardTrajectory(attempt.id, reason, infrastructure))
        group, member = self._member(attempt.id)
        if infrastructure:
            member.infrastructure_failures += 1
            retry = retry and member.infrastructure_failures < INFRASTRUCTURE_ATTEMPTS
        else:
            member.own_failures += 1
            retry = retry and member.own_failures < self.settings.sample_attempts
        if retry:
            self.waiting.appendleft(member)
            return
        group.task_failed |= not infrastructure
        self._end(member, None, Outcome.FAILED, reason)
        self._settle(group)

    def _end(self, member: Member, trajectory: TrajectoryId | None, outcome: Outcome, reason: str) -> None:
        assert not member.ended, f"{member.sample} ends twice"
        member.outcome = outcome
        self.ended[outcome] += 1
        self._out.append(ev.EndSample(member.sample, trajectory, outcome, reason))

    def _settle(self, group: Group) -> None:
        """One more member is finished or ended; the last one completes the group."""
        group.open_members -= 1
        if group.open_members:
            return
        if group.task_failed:
            failures = self.task_failures[group.task] = self.task_failures.get(group.task, 0) + 1
            if failures >= self.settings.quarantine_after and group.task not in self.tasks.quarantined:
                self.tasks.quarantined.add(group.task)
                self._out.append(ev.QuarantineTask(group.task, f"{failures} groups in a row lost members to it"))
        else:
            self.task_failures.pop(group.task, None)
        if self._large_enough(group, Outcome.FAILED):
            self.ready.append(group.number)

    def _large_enough(self, group: Group, outcome: Outcome) -> bool:
        """Whether the group can train; if not, it ends here and another is drawn in its place."""
        left = group.finished
        if len(left) >= self.settings.min_group_size:
            return True
        for member in left:
            reason = f"its group was left with {len(left)} of {self.settings.group_size} members"
            self._end(member, member.finished, outcome, reason)
        del self.groups[group.number]
        self.dropped_groups += 1
        return False

    # --- training ---------------------------------------------------------------------------------

    def _train(self) -> None:
        if self.training or self.publishing or self.trainer_down or self.steps_done >= self.settings.steps:
            return
        size = self.settings.groups_per_batch
        while len(self.ready) >= size:
            batch = self._next_batch(size)
            if batch is None:
                return
            fresh = [group for group in batch if self._drop_stale(group)]
            if len(fresh) == size:
                self.training = tuple(fresh)
                for group in fresh:
                    self.ready.remove(group.number)
                members = tuple(tuple(m.finished for m in g.finished if m.finished) for g in fresh)
                self._out.append(ev.TrainBatch(self.steps_done + 1, members))
                return
            self._admit()  # dropped groups are replaced at once
            self._open()

    def _next_batch(self, size: int) -> list[Group] | None:
        if not self.settings.in_drawn_order:
            return [self.groups[number] for number in list(self.ready)[:size]]
        complete = set(self.ready)
        first = [number for number, _ in zip(self.groups, range(size), strict=False)]
        return [self.groups[n] for n in first] if len(first) == size and complete.issuperset(first) else None

    def _drop_stale(self, group: Group) -> bool:
        """End the group's overtaken samples; whether the group can still train."""
        step = self.steps_done + 1
        for member in group.finished:
            if is_stale(member.oldest_step, step, self.settings.max_staleness_steps):
                reason = f"oldest token of the weights after step {member.oldest_step}, now step {step}"
                self._end(member, member.finished, Outcome.STALE, reason)
        if self._large_enough(group, Outcome.STALE):
            return True
        self.ready.remove(group.number)
        return False

    def _trainer_ready(self, event: ev.TrainerReady) -> None:
        self.trainer_down = False
        self.steps_done = event.step
        self.lineage.published(event.version, event.step)
        self.fleet.published(event.version, self._now)

    def _trainer_lost(self, event: ev.TrainerLost) -> None:
        """Go back to the newest checkpoint; rollout goes on meanwhile as far as the staleness bound allows."""
        self.trainer_restarts += 1
        if self.version < 0 or not self.settings.checkpoints:
            self._finish(True, event.reason)
        elif self.trainer_restarts > self.settings.worker_restarts:
            self._finish(True, f"the trainer was lost {self.trainer_restarts} times; the last time: {event.reason}")
        else:
            back = self.lineage.roll_back()
            for group in back:
                for member in group.members:
                    if member.outcome is Outcome.TRAINED:
                        member.outcome = None
                        self.ended[Outcome.TRAINED] -= 1
                self.groups[group.number] = group
            self.groups = dict(sorted(self.groups.items()))
            self.ready.extendleft(group.number for group in reversed([*back, *self.training]))
            self.training, self.publishing, self.trainer_down = (), False, True
            self.steps_done = self.lineage.checkpoint_step
            self._out.append(ev.RestartTrainer(self.steps_done, self.lineage.next_version()))

    def _batch_trained(self, event: ev.BatchTrained) -> None:
        assert event.step == self.steps_done + 1, f"step {event.step} after {self.steps_done}"
        self.steps_done = event.step
        for group in self.training:
            for member in group.finished:
                self._end(member, member.finished, Outcome.TRAINED, f"step {event.step}")
            del self.groups[group.number]
        if self.settings.checkpoints:
            self.lineage.trained(event.step, self.training)
        self.training = ()
        self.publishing = True
        self._out.append(ev.PublishSnapshot(self.lineage.next_version()))

    def _snapshot_published(self, event: ev.SnapshotPublished) -> None:
        self.publishing = False
        self.lineage.published(event.version, self.steps_done)
        self.fleet.published(event.version, self._now)

    def _done(self) -> bool:
        """All steps are trained and published, and no engine is on its way to the last weights."""
        return self.published_step == self.settings.steps and self.fleet.settled and not self.trainer_down

    def _trainer_failed(self, event: ev.TrainerFailed) -> None:
        self._finish(True, event.reason)

    def _stop_requested(self, event: ev.StopRequested) -> None:
        self._finish(False, event.reason)

    def _finish(self, failed: bool, reason: str) -> None:
        self.finished = True
        self._out.append(ev.FinishRun(failed, reason))

    # --- checks -----------------------------------------------------------------------------------

    @property
    def samples_drawn(self) -> int:
        return self.drawn_groups * self.settings.group_size

    @property
    def samples_unfinished(self) -> int:
        """Samples that have not ended in any way (yet)."""
        return self.samples_drawn - sum(self.ended.values())

    def validate(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        check_pipeline(self)
