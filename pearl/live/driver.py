"""The live interpreter: feeds the schedulers with what happens and carries out what they say.

One task per instruction that waits; each answers with one event. The machines' state is touched by `run` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol

from pearl.cluster.binding import Binding
from pearl.cluster.providers import make_cluster
from pearl.config import RunConfig
from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Zone
from pearl.core.pipeline import Pipeline
from pearl.core.scheduler import Scheduler
from pearl.core.trajectory import Trajectory, TrajectoryId
from pearl.errors import RunFailed
from pearl.live.actors import ActorClasses, Actors
from pearl.live.environments import EnvironmentWorkers
from pearl.live.journal import Journal
from pearl.live.machine import make_scheduler
from pearl.live.resume import Resume
from pearl.live.rollout import RolloutWorkers
from pearl.live.run_directory import RunDirectory
from pearl.live.slots import PreemptibleSlots
from pearl.live.tokens import LiveTrajectory
from pearl.live.trainer import TrainerGroup
from pearl.live.waits import WaitTable


class Observer(Protocol):
    """Sees everything, decides nothing; one that raises is switched off."""

    def saw(self, now: float, entry: Event | Instruction) -> None:
        """An event that was handled, or an instruction that is about to be carried out, at `now` (monotonic s)."""

    def stepped(self, now: float, metrics: dict[str, float], trajectories: list[Trajectory]) -> None:
        """An optimizer step is done, on these trajectories."""

    def ended(self, now: float, end: ev.EndSample, trajectory: Trajectory | None) -> None:
        """A sample ended."""

    def notice(self, text: str) -> None:
        """Something that a person should read."""


class Driver:
    """One run. `run` returns the machine's last instruction; `close` ends every process."""

    def __init__(
        self,
        config: RunConfig,
        model_directory: Path,
        tasks: int,
        bindings: dict[str, Binding],
        directory: RunDirectory,
        observers: list[Observer],
        *,
        classes: ActorClasses | None = None,
        validate: bool = False,
        resume: Resume | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        """`scheduler`: another one than the configuration says. Raises UserError for elastic files it cannot read."""
        self.config, self.directory, self.observers, self.validate = config, directory, observers, validate
        self.scheduler = scheduler or make_scheduler(config, model_directory, tasks)
        self.waits = WaitTable()
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.live: dict[TrajectoryId, LiveTrajectory] = {}
        self.finished: dict[TrajectoryId, Trajectory] = {}
        self.closing = False
        self._tasks: set[asyncio.Task[None]] = set()
        self.journal = Journal(directory.journal)
        self._kept: dict[int, list[Trajectory]] = {}
        """Trained since the newest checkpoint, by step: a rollback trains them again."""
        self.first = (0, 0)
        """(step, version) that the trainer starts at."""
        self._trace_s = 0.0
        """Where an availability trace goes on."""
        if resume is not None:
            self._restore(resume)
        self.cluster = make_cluster(config, directory.workers, self._left)
        self.cluster.on_scheduler_lost = self._scheduler_lost
        actors = Actors(self.cluster, bindings, self.waits, config.deadlines.worker_start_s, classes or ActorClasses())
        parts = (actors, config, model_directory, directory, self.post)
        self.rollout = RolloutWorkers(*parts, self.journal)
        self.environments = EnvironmentWorkers(*parts, self.journal)
        self.trainer = TrainerGroup(*parts)
        self.trainer.on_step = self._stepped
        self.bindings = bindings
        self.slots = PreemptibleSlots(self.cluster, bindings, config, self.waits, self.post, self.rollout.slot_lost)
        self._timers: set[asyncio.TimerHandle] = set()
        self._batch: list[list[Trajectory]] = []
        self._stack = contextlib.AsyncExitStack()

    @property
    def pipeline(self) -> Pipeline:
        return self.scheduler.pipeline

    def post(self, event: Event) -> None:
        self.events.put_nowait(event)

    def _restore(self, resume: Resume) -> None:
        resume.replay.apply(self.pipeline, resume.step)
        tokens = resume.tokens
        members = [m for group in self.pipeline.groups.values() for m in group.members]
        self.finished = {m.finished: tokens.finished[m.finished] for m in members if m.finished and not m.ended}
        self.live = {attempt.id: tokens.live[attempt.id] for attempt in self.pipeline.suspended}
        self.first = (resume.step, resume.replay.newest_version + 1)
        self._trace_s = resume.replay.trace_s
        self.journal.write("rollback", step=resume.step)

    async def run(self) -> ev.FinishRun:
        """Start everything, go on until the machine finishes the run."""
        try:
            await self.waits.until(
                "driver", "the Dask scheduler (deadlines.worker_start_s)", self.config.deadlines.worker_start_s,
                self._stack.enter_async_context(self.cluster),
            )  # fmt: skip
        except TimeoutError as error:
            raise RunFailed(str(error)) from None
        self.post(self._run_started())
        await self.slots.connect()
        self._spawn(self._start_trainer())
        while True:
            event = await self._next()
            now = time.monotonic()
            self._record(event)
            self._tell("saw", now, event)
            for instruction in self.scheduler.handle(event, now):
                self._tell("saw", now, instruction)
                if isinstance(instruction, ev.FinishRun):
                    return instruction
                self._carry_out(instruction, now)
            if self.validate:
                self.scheduler.validate()

    async def _start_trainer(self) -> None:
        """Overlap engines go first: they need the GPUs to start. Their processes stay, so borrowing is quick."""
        overlap = [slot for slot, binding in self.bindings.items() if binding.zone == Zone.OVERLAP]
        await asyncio.gather(*(self.rollout.start_early(slot) for slot in overlap))
        await self.trainer.start(*self.first)

    def _run_started(self) -> ev.RunStarted:
        """Slots that are there to stay; preemptible ones join."""
        rollout = [b.slot_info() for b in self.bindings.values() if b.rollout and b.zone != Zone.PREEMPTIBLE]
        environments = tuple(slot for slot, b in self.bindings.items() if b.zone == "environment")
        return ev.RunStarted(tuple(slot.name for slot in rollout), environments, tuple(rollout))

    async def _next(self) -> Event:
        """The next event. A run in which nothing happens says who waits for whom, and ends if nothing can happen."""
        limit = self.config.deadlines.no_progress_s
        while True:
            try:
                return await asyncio.wait_for(self.events.get(), limit)
            except TimeoutError:
                waits = "; ".join(self.waits.oldest()) or "nothing is awaited"
                text = f"no progress for {limit:g} s (deadlines.no_progress_s): {waits}"
                if not self.waits.any_in_time():
                    return ev.StopRequested(text) if self.closing else ev.TrainerFailed(text)
                self._tell("notice", text)

    def _record(self, event: Event) -> None:
        """Journal what no other place writes, before the machine acts on it."""
        match event:
            case ev.BatchTrained():
                groups = self.pipeline.training
                self.journal.write("trained", step=event.step, groups=[group.number for group in groups])
                if self.pipeline.settings.checkpoints:
                    ids = [m.finished for group in groups for m in group.finished if m.finished]
                    self._kept[event.step] = [self.finished[t] for t in ids]
            case ev.TrainerReady():
                self.slots.trainer_ready(self._trace_s)
                self.journal.write("published", version=event.version, step=event.step)
            case ev.SnapshotPublished():
                self.journal.write("published", version=event.version, step=self.pipeline.steps_done)
            case ev.SlotJoined() | ev.SlotNotice() | ev.SlotLost() if self.slots.follower is not None:
                self.journal.write("trace", seconds=self.slots.follower.seconds)
            case ev.CheckpointWritten():
                if self.slots.follower is not None:
                    self.journal.write("trace", seconds=self.slots.follower.seconds)
                self.journal.write("checkpoint", step=event.step)
                self.journal.sync()
                self._kept = {step: kept for step, kept in self._kept.items() if step > event.step}

    def _carry_out(self, i: Instruction, now: float) -> None:
        match i:
            case ev.Generate():
                self._spawn(self.rollout.generate(i, self.live[i.trajectory]))
            case ev.StepEnvironment():
                self._spawn(self.environments.step(i, self.live[i.trajectory]))
            case ev.OpenEnvironment():
                trajectory = self.live[i.trajectory] = LiveTrajectory(i.trajectory, str(i.task))
                self.journal.write("open", trajectory=i.trajectory)
                self._spawn(self.environments.open(i, trajectory))
            case ev.ScoreTrajectory():
                self._spawn(self.environments.score(i, self.live[i.trajectory], self._scored))
            case ev.CloseEnvironment():
                self.live.pop(i.trajectory, None)
                self._spawn(self.environments.close(i))
            case ev.DiscardTrajectory():
                self.live.pop(i.trajectory, None)
                self.journal.write("discard", trajectory=i.trajectory, infrastructure=i.infrastructure)
            case ev.ReopenEnvironment():
                self._spawn(self.environments.reopen(i, self.live[i.trajectory]))
            case ev.EndSample():
                self.journal.write("end", sample=i.sample, outcome=i.outcome, reason=i.reason)
                trajectory_done = self.finished.pop(i.trajectory, None) if i.trajectory else None
                self._tell("ended", now, i, trajectory_done)
            case ev.TrainBatch():
                self._batch = [[self.finished[t] for t in group] for group in i.groups]
                self._spawn(self.trainer.train(i, self._batch))
            case ev.PublishSnapshot():
                self._spawn(self.trainer.publish(i, self.pipeline.steps_done))
            case ev.RestartTrainer():
                self.journal.write("rollback", step=i.step)
                for kept in self._kept.values():
                    self.finished |= {trajectory.id: trajectory for trajectory in kept}
                self._kept = {}
                self._spawn(self.trainer.start(i.step, i.version))
            case ev.DrawGroup():
                size = self.config.pipeline.group_size
                self.journal.write("draw", group=i.group, task=i.task, cursor=i.cursor, members=size)
            case ev.RetireSnapshots():
                self.trainer.retire(i.version)
                self._spawn(self.rollout.snapshots.retire(i.version))
            case ev.SyncWeights():
                self._spawn(self.rollout.sync(i))
            case ev.AbortRequests():
                self._spawn(self.rollout.abort(i))
            case ev.StartEngine():
                self._spawn(self.rollout.start(i))
            case ev.StopEngine():
                self._spawn(self.rollout.end(i))
            case ev.SwitchRole():
                self._spawn(self.rollout.switch(i))
            case ev.ReleaseEngine():
                self._spawn(self.rollout.release(i))
            case ev.ResumeEngine():
                self._spawn(self.rollout.resume(i))
            case ev.RequestSlots():
                self._spawn(self.slots.want(i))
            case ev.ReleaseSlot():
                self._spawn(self.slots.release(i))
            case ev.OffloadTrainer():
                self._spawn(self.trainer.offload(i))
            case ev.ReloadTrainer():
                self._spawn(self.trainer.reload(i))
            case ev.SetTimer():
                self._set_timer(i, now)
            case ev.RecordDecision() | ev.RecordGate() | ev.RecordOperation():
                pass  # observers have seen it
            case ev.StartEnvironmentWorker():
                self._spawn(self.environments.start(i))
            case ev.QuarantineTask():
                self.journal.write("quarantine", task=i.task)
                self._tell("notice", f"task {i.task} is quarantined: {i.reason}")
            case _:
                raise AssertionError(f"nobody carries out {i}")

    def _scored(self, trajectory: Trajectory) -> None:
        self.finished[trajectory.id] = trajectory
        self.journal.finished(trajectory)

    def _stepped(self, metrics: dict[str, float]) -> None:
        now = time.monotonic()
        trajectories = [t for group in self._batch for t in group]
        self._tell("stepped", now, metrics, trajectories)

    def _tell(self, what: str, *arguments: Any) -> None:
        """Watching must never end a run: an observer that raises is dropped, and the others say so."""
        for observer in list(self.observers):
            try:
                getattr(observer, what)(*arguments)
            except Exception as error:
                self.observers.remove(observer)
                self._tell("notice", f"{type(observer).__name__} failed and is switched off: {error!r}")

    def _left(self, slot: str, incarnation: int, reason: str) -> None:
        """Called by the cluster when a worker process left it, for whatever reason."""
        if self.closing:
            return
        if self.rollout.actors.comes_and_goes(slot):
            return  # `slots` tells of it
        match self.bindings[slot].zone:
            case "environment":
                self.environments.left(slot, incarnation, reason)
            case "training":
                self.trainer.left(slot, incarnation, reason)
            case Zone.RESERVED | Zone.OVERLAP:
                self.rollout.left(slot, incarnation, reason)

    def _scheduler_lost(self, reason: str) -> None:
        """Nothing can be started any more, and every worker ends; the run goes on from its journal."""
        if not self.closing:
            remedy = "start its cluster anew, then go on with --resume"
            self.post(ev.TrainerFailed(f"the Dask scheduler at {self.cluster.contact} is gone ({reason}); {remedy}"))

    def _set_timer(self, i: ev.SetTimer, now: float) -> None:
        def fire() -> None:
            self._timers.discard(handle)
            self.post(ev.TimerFired(i.name))

        handle = asyncio.get_running_loop().call_later(max(0.0, i.at_s - now), fire)
        self._timers.add(handle)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """An executor that raises is a fault of ours: the run must not go on as if it had answered."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            if self.cluster.connected:
                self.post(ev.TrainerFailed(f"internal fault: {error!r}"))
            else:
                self._scheduler_lost("the connection to it broke")

    async def close(self, *, finish_writing: bool) -> None:
        """End all processes within `deadlines.shutdown_s`, by force where they do not end by themselves.

        `finish_writing`: let a checkpoint that is being written become whole first.
        """
        self.closing = True
        limit = self.config.deadlines.shutdown_s
        try:
            if finish_writing:
                try:
                    await self.trainer.idle(self.config.deadlines.checkpoint_s)
                except TimeoutError as error:
                    self._tell("notice", f"the last checkpoint may be missing: {error} (deadlines.checkpoint_s)")
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for timer in self._timers:
                timer.cancel()
            # A rank in the middle of a step would answer only behind it; its process is killed next, which is safe.
            stops = [self.rollout.stop(limit), self.environments.stop(limit), self.rollout.snapshots.close()]
            stops += [self.trainer.stop(limit)] if finish_writing else []
            await asyncio.gather(*stops, return_exceptions=True)
            with contextlib.suppress(TimeoutError):
                await self.slots.close(limit)
        finally:
            await self._stack.aclose()
            self.journal.close()
