"""The rollout half of the Pipeline Scheduler: environments are opened, turns routed, trajectories scored.

Fates that are decided here:
* A request interrupted by a weight update, a change of the workers or a lost engine keeps its tokens; the turn goes on
  from them elsewhere.
* An attempt whose environment is lost starts again; its sample fails after too many attempts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from pearl.core import events as ev
from pearl.core.environments import EnvironmentTable
from pearl.core.events import Instruction, Outcome
from pearl.core.fleet import Fleet
from pearl.core.groups import Attempt, Member, Phase
from pearl.core.lineage import Lineage
from pearl.core.routing import Choice, Prefix
from pearl.core.samples import Samples
from pearl.core.settings import PipelineSettings
from pearl.core.trajectory import FinishReason, StopReason, TrajectoryId

INFRASTRUCTURE_ATTEMPTS = 10
"""Restarts of one sample for reasons that are not its own, before it fails: a bound against endless loops."""
LOSSES_PER_TRAJECTORY = 5
"""Engines that may die under one trajectory before it is suspected of killing them."""


class Rollout:
    """Live trajectories. `emit` takes each instruction."""

    def __init__(
        self,
        settings: PipelineSettings,
        samples: Samples,
        lineage: Lineage,
        fleet: Fleet,
        environments: EnvironmentTable,
        emit: Callable[[Instruction], None],
    ) -> None:
        self.settings, self.samples, self.lineage, self.fleet = settings, samples, lineage, fleet
        self.environments, self.emit = environments, emit
        self.attempts: dict[TrajectoryId, Attempt] = {}
        self.waiting: deque[Member] = deque()
        """Samples without an open environment."""
        self.queue: list[TrajectoryId] = []
        """Trajectories that wait for a worker: a heap, oldest group first."""
        self.suspended: deque[Attempt] = deque()
        """Trajectories of an interrupted run whose environments are to be rebuilt."""
        self._astray = 0.0
        """Turns that are to forget where their prefix is, so far, less those that did."""

    def open(self) -> None:
        """Environments for waiting samples, as far as there is room."""
        while (self.suspended or self.waiting) and len(self.attempts) < self.settings.max_concurrent_trajectories:
            slot = self.environments.take()
            if slot is None:
                return
            if self.suspended:
                attempt = self.suspended.popleft()
                attempt.environment_worker = slot.name
                self.attempts[attempt.id] = attempt
                self.emit(ev.ReopenEnvironment(attempt.id, slot.name, attempt.task))
                continue
            member = self.waiting.popleft()
            trajectory = TrajectoryId(*member.sample, member.attempts)
            member.attempts += 1
            task = self.samples.groups[member.sample.group].task
            self.attempts[trajectory] = Attempt(trajectory, task, slot.name)
            self.emit(ev.OpenEnvironment(trajectory, slot.name, task))

    def opened(self, event: ev.EnvironmentOpened) -> None:
        if attempt := self._attempt(event.trajectory, Phase.OPENING):
            attempt.tokens = event.prompt_tokens
            if self.room(attempt) > 0:
                self._enqueue(attempt)
            else:
                reason = (
                    f"a prompt of {event.prompt_tokens} tokens leaves no room under pipeline.max_trajectory_tokens "
                    f"= {self.settings.max_trajectory_tokens}"
                )
                self.discard(attempt, reason, infrastructure=False, retry=False)

    def reopened(self, event: ev.EnvironmentReopened) -> None:
        if attempt := self._attempt(event.trajectory, Phase.OPENING):
            if attempt.resume_at is Phase.STEPPING:
                self._responded(attempt)
            elif self.room(attempt) > 0:
                self._enqueue(attempt)
            else:
                self._score(attempt, StopReason.TOKEN_LIMIT)

    def room(self, attempt: Attempt) -> int:
        """Tokens that the present turn may still generate."""
        s = self.settings
        return min(s.max_response_tokens - attempt.turn_tokens, s.max_trajectory_tokens - attempt.tokens)

    def _enqueue(self, attempt: Attempt) -> None:
        attempt.phase = Phase.QUEUED
        self._astray += 1.0 - self.settings.affinity
        if self._astray >= 1.0:
            self._astray -= 1.0
            self._cached(attempt, 0)
            attempt.prefix = attempt.prefill_prefix = None
        heapq.heappush(self.queue, attempt.id)

    def dispatch(self) -> None:
        """Turns to workers, oldest group first, until nobody has room."""
        while self.queue:
            attempt = self.attempts.get(self.queue[0])
            if attempt is None or attempt.phase is not Phase.QUEUED:
                heapq.heappop(self.queue)
                continue
            choice = self.fleet.router.choose(attempt.tokens, attempt.prefix, attempt.prefill_prefix)
            if choice is None:
                return
            heapq.heappop(self.queue)
            self._generate(attempt, choice)

    def _generate(self, attempt: Attempt, choice: Choice) -> None:
        worker, prefill = choice
        attempt.phase = Phase.GENERATING
        attempt.sent_to = (worker.name, worker.incarnation)
        self._cached(attempt, 0)
        attempt.prefix = Prefix(worker.name, worker.cache)
        attempt.prefill_prefix = Prefix(prefill.name, prefill.cache) if prefill else None
        self._cached(attempt, attempt.tokens)
        self.fleet.sent(attempt.id, attempt.tokens, choice)
        self.emit(
            ev.Generate(
                attempt.id,
                worker.name,
                worker.incarnation,
                self.fleet.version,
                self.room(attempt),
                prefill.name if prefill else "",
                prefill.incarnation if prefill else 0,
            )
        )

    def _cached(self, attempt: Attempt, tokens: int) -> None:
        """The worker of its prefix holds so many tokens of it, unless that cache is gone."""
        worker = self.fleet.workers.get(attempt.prefix.worker) if attempt.prefix else None
        if worker is not None and attempt.prefix is not None and worker.cache == attempt.prefix.cache:
            worker.cached_tokens += tokens - attempt.cached_tokens
        attempt.cached_tokens = tokens

    def generated(self, event: ev.TurnGenerated) -> None:
        self.fleet.returned(event)
        attempt = self._attempt(event.trajectory, Phase.GENERATING)
        if attempt is None or attempt.sent_to != (event.worker, event.incarnation):
            return
        if event.tokens:
            attempt.tokens += event.tokens
            attempt.turn_tokens += event.tokens
            attempt.generated_tokens += event.tokens
            self._cached(attempt, attempt.tokens)
            step, oldest = self.lineage.step_of[event.version], attempt.oldest_step
            attempt.oldest_step = step if oldest is None else min(oldest, step)
        if event.finish is FinishReason.FAILED:
            self.discard(attempt, f"generation failed: {event.reason}", infrastructure=False)
        elif event.finish in (FinishReason.ABORT, FinishReason.LOST) and self.room(attempt) > 0:
            attempt.losses += event.finish is FinishReason.LOST and self.fleet.blames(event.worker)
            if attempt.losses > LOSSES_PER_TRAJECTORY:
                self.discard(attempt, f"{attempt.losses} engines died under it: {event.reason}", infrastructure=False)
            else:
                self._enqueue(attempt)
        elif not attempt.turn_tokens:
            self.discard(attempt, "an empty response", infrastructure=False)
        else:
            attempt.turns += 1
            attempt.cut = event.finish is not FinishReason.STOP
            self._responded(attempt)

    def _responded(self, attempt: Attempt) -> None:
        """A turn's response is whole; one that the trajectory's limit cut off is not for the environment."""
        if attempt.cut and attempt.tokens >= self.settings.max_trajectory_tokens:
            self._score(attempt, StopReason.TOKEN_LIMIT)
        else:
            attempt.phase = Phase.STEPPING
            self.emit(ev.StepEnvironment(attempt.id, attempt.environment_worker))

    def stepped(self, event: ev.EnvironmentStepped) -> None:
        if attempt := self._attempt(event.trajectory, Phase.STEPPING):
            if event.stop is not None:
                self._score(attempt, event.stop)
                return
            attempt.tokens += event.observation_tokens
            attempt.turn_tokens = 0
            if self.room(attempt) > 0:
                self._enqueue(attempt)
            else:
                self._score(attempt, StopReason.TOKEN_LIMIT)

    def _score(self, attempt: Attempt, stop: StopReason) -> None:
        attempt.phase = Phase.SCORING
        self.emit(ev.ScoreTrajectory(attempt.id, attempt.environment_worker, stop, attempt.turns))

    def scored(self, event: ev.TrajectoryScored) -> None:
        if attempt := self._attempt(event.trajectory, Phase.SCORING):
            group, member = self.samples.of(attempt.id)
            member.finished, member.reward = attempt.id, event.reward
            member.oldest_step = attempt.oldest_step or 0
            self._close(attempt)
            self.samples.settle(group)

    def failed(self, event: ev.EnvironmentFailed) -> None:
        if attempt := self.attempts.get(event.trajectory):
            self.discard(attempt, f"{event.stage}: {event.reason}", infrastructure=event.infrastructure)

    def environment_lost(self, event: ev.EnvironmentWorkerLost) -> str | None:
        """The reason why the run cannot go on, if so."""
        news, end = self.environments.lost(event)
        if news:
            for attempt in [a for a in self.attempts.values() if a.environment_worker == event.worker]:
                self.discard(attempt, f"{event.worker}: {event.reason}", infrastructure=True, close=False)
        return end

    def _attempt(self, trajectory: TrajectoryId, phase: Phase) -> Attempt | None:
        """The live attempt, unless this is a late answer to one that was given up."""
        attempt = self.attempts.get(trajectory)
        return attempt if attempt is not None and attempt.phase is phase else None

    def _close(self, attempt: Attempt, *, tell: bool = True) -> None:
        del self.attempts[attempt.id]
        self._cached(attempt, 0)
        if tell:
            self.environments.give_back(attempt.environment_worker)
            self.emit(ev.CloseEnvironment(attempt.id, attempt.environment_worker))

    def discard(
        self, attempt: Attempt, reason: str, *, infrastructure: bool, retry: bool = True, close: bool = True
    ) -> None:
        """Give up one attempt; its sample tries again or fails."""
        self._close(attempt, tell=close)
        self.emit(ev.DiscardTrajectory(attempt.id, reason, infrastructure))
        group, member = self.samples.of(attempt.id)
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
        self.samples.end(member, None, Outcome.FAILED, reason)
        self.samples.settle(group)
