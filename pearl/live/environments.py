"""Environment workers as actors: carries out what is asked of trajectories' environments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pearl.cluster.actor_ref import ActorRef
from pearl.cluster.errors import ActorCallFailed, ActorError, ActorTimeout
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event
from pearl.core.trajectory import SegmentKind, StopReason, Trajectory, TrajectoryId
from pearl.errors import RunFailed, UserError
from pearl.live.actors import Actors
from pearl.live.journal import Journal
from pearl.live.run_directory import RunDirectory
from pearl.live.tokens import LiveTrajectory

INFRASTRUCTURE = ("InfrastructureError", "OSError", "TimeoutError")
"""Exceptions of an environment that are not the task's own fault."""


class EnvironmentWorkers:
    """The present life of each environment slot. Every method answers with events, never with an exception."""

    def __init__(
        self,
        actors: Actors,
        config: RunConfig,
        model_directory: Path,
        directory: RunDirectory,
        post: Callable[[Event], None],
        journal: Journal,
    ) -> None:
        self.actors, self.config, self.directory, self.post = actors, config, directory, post
        self.journal = journal
        self.model_directory = model_directory
        self.refs: dict[str, tuple[int, ActorRef]] = {}

    async def start(self, i: ev.StartEnvironmentWorker) -> None:
        environment = self.config.environment
        self.refs.pop(i.worker, None)
        try:
            ref = await self.actors.start(i.worker, i.incarnation, self.actors.classes.environment)
            self.refs[i.worker] = (i.incarnation, ref)
            reply = await self.actors.call(
                ref,
                "start",
                environment.model_dump(mode="json"),
                str(self.model_directory),
                str(self.directory.path),
                f"{i.worker}.{i.incarnation}",
                timeout_s=self.config.deadlines.worker_start_s,
            )
            if reply and reply.get("builds"):
                await self.actors.call(ref, "prepare", timeout_s=self.config.deadlines.environment_build_s)
            self.post(ev.EnvironmentWorkerReady(i.worker, i.incarnation, environment.sandboxes_per_worker))
        except (ActorError, RunFailed, UserError) as error:
            self.refs.pop(i.worker, None)
            await self.actors.kill(i.worker, i.incarnation)
            self.post(ev.EnvironmentWorkerLost(i.worker, i.incarnation, str(error)))

    async def open(self, i: ev.OpenEnvironment, trajectory: LiveTrajectory) -> None:
        limit = self.config.deadlines.environment_start_s
        reply = await self._ask(i.trajectory, i.environment_worker, "open", list(i.trajectory), i.task, limit=limit)
        if reply is not None:
            trajectory.task = reply["task"]
            prompt = reply["prompt_ids"]
            trajectory.add_context(SegmentKind.PROMPT, prompt)
            self.journal.write("prompt", trajectory=i.trajectory, token_ids=prompt, task=trajectory.task)
            self.post(ev.EnvironmentOpened(i.trajectory, len(reply["prompt_ids"])))

    async def reopen(self, i: ev.ReopenEnvironment, trajectory: LiveTrajectory) -> None:
        """Play the turns of an interrupted run's trajectory again and compare what comes back."""
        limit = self.config.deadlines.environment_start_s + len(trajectory.states) * (
            self.config.deadlines.environment_step_s
        )
        prompt = list(trajectory.segments[0].token_ids)
        history = [[*turn, state] for turn, state in zip(trajectory.turns(), trajectory.states, strict=True)]
        arguments = (list(i.trajectory), i.task, prompt, history)
        reply = await self._ask(i.trajectory, i.environment_worker, "reopen", *arguments, limit=limit)
        if reply is not None:
            if reply["difference"]:
                self._failed(i.trajectory, "replay", reply["difference"], infrastructure=True)
            else:
                self.post(ev.EnvironmentReopened(i.trajectory))

    async def step(self, i: ev.StepEnvironment, trajectory: LiveTrajectory) -> None:
        limit = self.config.deadlines.environment_step_s
        response = trajectory.response_ids
        reply = await self._ask(
            i.trajectory, i.environment_worker, "advance", list(i.trajectory), response, limit=limit
        )
        if reply is not None:
            stop = None if reply["stop"] is None else StopReason(reply["stop"])
            observation = [] if stop else reply["observation_ids"]  # nothing follows a stop: nothing to train on
            trajectory.add_context(SegmentKind.OBSERVATION, observation)
            if stop is None:
                state = reply["state"]
                trajectory.states.append(state)
                self.journal.write("observation", trajectory=i.trajectory, token_ids=observation, state=state)
            self.post(ev.EnvironmentStepped(i.trajectory, len(observation), stop))

    async def score(
        self, i: ev.ScoreTrajectory, trajectory: LiveTrajectory, finished: Callable[[Trajectory], None]
    ) -> None:
        reply = await self._ask(
            i.trajectory, i.environment_worker, "score", list(i.trajectory), limit=self.config.deadlines.score_s
        )
        if reply is not None:
            finished(trajectory.finish(i.turns, i.stop, reply["reward"]))
            self.post(ev.TrajectoryScored(i.trajectory, reply["reward"]))

    async def close(self, i: ev.CloseEnvironment) -> None:
        current = self.refs.get(i.environment_worker)
        if current:
            try:
                limit = self.config.deadlines.environment_step_s
                await self.actors.call(
                    current[1], "close", list(i.trajectory), timeout_s=limit, waiter=str(i.trajectory)
                )
            except ActorTimeout as error:
                await self._condemn(i.environment_worker, current[0], str(error))
            except ActorError:
                pass  # a worker that cannot close is lost, and that is noticed by itself

    async def _ask(self, trajectory: TrajectoryId, slot: str, method: str, *args: Any, limit: float) -> Any:
        """The actor's reply, or None after an EnvironmentFailed (or an EnvironmentWorkerLost) was posted."""
        current = self.refs.get(slot)
        if current is None:
            self._failed(trajectory, method, f"{slot} is gone", infrastructure=True)
            return None
        try:
            return await self.actors.call(current[1], method, *args, limit, timeout_s=limit, waiter=str(trajectory))
        except ActorCallFailed as error:
            self._failed(trajectory, method, str(error), infrastructure=error.kind in INFRASTRUCTURE)
        except ActorTimeout as error:
            await self._condemn(slot, current[0], str(error))
        except ActorError as error:
            self._failed(trajectory, method, str(error), infrastructure=True)
        return None

    def _failed(self, trajectory: TrajectoryId, stage: str, reason: str, *, infrastructure: bool) -> None:
        self.post(ev.EnvironmentFailed(trajectory, stage, reason, infrastructure))

    async def _condemn(self, slot: str, incarnation: int, reason: str) -> None:
        """A worker that does not keep its own deadlines keeps nothing: end it, and say so first, so that what waits
        for it is not sent to it again."""
        self.left(slot, incarnation, reason)
        await self.actors.kill(slot, incarnation)

    def left(self, slot: str, incarnation: int, reason: str) -> None:
        """The slot's process left the cluster."""
        current = self.refs.get(slot)
        if current and current[0] == incarnation:
            del self.refs[slot]
        self.post(ev.EnvironmentWorkerLost(slot, incarnation, reason))

    async def stop(self, timeout_s: float) -> None:
        async def one(ref: ActorRef) -> None:
            try:
                await self.actors.call(ref, "stop", timeout_s=timeout_s, margin=False)
            except ActorError:
                pass  # the process group is killed next

        await asyncio.gather(*(one(ref) for _, ref in self.refs.values()))
