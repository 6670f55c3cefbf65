"""The interpreter in virtual time: carries a machine's instructions out against models, and answers with events.

It decides nothing. What no real run could do (serve with a stopped engine, train on GPUs that are lent out) is a fault
of the machine and raises AssertionError.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Role, SlotInfo, Zone
from pearl.core.scheduler import Scheduler
from pearl.core.settings import Borrowing
from pearl.core.trajectory import FinishReason, StopReason, TrajectoryId
from pearl.core.workload import EngineProfile
from pearl.sim.clock import Clock
from pearl.sim.cluster import Cluster
from pearl.sim.durations import OFFLOAD_SHARE, RELEASE_SHARE, RESUME_SHARE, Durations
from pearl.sim.engine import Engine, EngineOptions
from pearl.sim.market import Market
from pearl.sim.request import Request
from pearl.sim.trainer import TrainerModel
from pearl.sim.weights import WeightLinks
from pearl.sim.workload import Plan, Workload


class Machine(Protocol):
    """A scheduler."""

    def handle(self, event: Event, now: float) -> list[Instruction]: ...

    def validate(self) -> None: ...


class Observer(Protocol):
    def saw(self, now: float, entry: Event | Instruction) -> None: ...


class Live:
    """A trajectory between its opening and its end."""

    __slots__ = ("plan", "prompt", "tokens", "turn", "turn_tokens")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.prompt = self.tokens = plan.new[0]
        self.turn = 0
        self.turn_tokens = 0


class Worker:
    """A slot as the outside has it. An answer of an earlier incarnation never arrives."""

    __slots__ = ("engine", "fresh", "incarnation", "info", "life", "present", "resident")

    def __init__(self, info: SlotInfo) -> None:
        self.info = info
        self.present = True
        self.life = 0
        self.incarnation = -1
        """Of the engine that runs or starts; negative: none."""
        self.engine: Engine | None = None
        self.fresh = True
        """No weights were loaded since it started or resumed."""
        self.resident = False
        """It has its GPUs' memory."""


@dataclass(frozen=True, slots=True)
class Models:
    """What everything costs."""

    engine: EngineProfile
    trainer: TrainerModel
    durations: Durations = field(default_factory=Durations)
    options: EngineOptions = field(default_factory=EngineOptions)
    environment_workers: int = 1
    environments_per_worker: int = 1_000_000
    checkpoint_every_steps: int = 0


@dataclass(slots=True)
class Totals:
    """Counted by the interpreter itself."""

    events: int = 0
    tokens_generated: int = 0
    tokens_delivered: int = 0
    tokens_lost: int = 0
    turns: int = 0


class Simulator:
    """`run` plays until the machine finishes or time is over."""

    def __init__(
        self,
        machine: Machine,
        cluster: Cluster,
        models: Models,
        workload: Workload,
        *,
        seed: int = 0,
        observers: Iterable[Observer] = (),
        validate: bool = False,
    ) -> None:
        self.machine, self.cluster, self.models, self.workload = machine, cluster, models, workload
        self.observers, self.check = list(observers), validate
        self.clock, self.market = Clock(), Market()
        self.totals = Totals()
        self.workers = {slot.name: Worker(slot) for slot in cluster.slots}
        self.live: dict[TrajectoryId, Live] = {}
        self.lengths: dict[TrajectoryId, int] = {}
        """Tokens of scored trajectories until their samples end."""
        self.lent: set[str] = set()
        """Overlap slots whose trainer is off the GPU."""
        self.end: ev.FinishRun | None = None
        self._steps = 0
        self._random = random.Random(f"durations {seed}")
        self._weights = WeightLinks(
            self.clock, models.durations.snapshot_bytes_per_s, lambda name: self.workers[name].present
        )
        self._carry: dict[type[Instruction], Callable[[Any], object]] = {
            ev.Generate: self._generate,
            ev.StepEnvironment: self._step_environment,
            ev.OpenEnvironment: self._open_environment,
            ev.ScoreTrajectory: self._score,
            ev.CloseEnvironment: lambda i: None,
            ev.DiscardTrajectory: lambda i: self.live.pop(i.trajectory, None),
            ev.EndSample: lambda i: self.lengths.pop(i.trajectory, None),
            ev.StartEnvironmentWorker: self._start_environment_worker,
            ev.StartEngine: self._start_engine,
            ev.StopEngine: self._stop_engine,
            ev.AbortRequests: self._abort,
            ev.SyncWeights: self._sync,
            ev.SwitchRole: self._switch_role,
            ev.ReleaseEngine: self._release,
            ev.ResumeEngine: self._resume,
            ev.TrainBatch: self._train,
            ev.PublishSnapshot: self._publish,
            ev.RetireSnapshots: lambda i: self._weights.retire(i.version),
            ev.OffloadTrainer: self._offload,
            ev.ReloadTrainer: self._reload,
            ev.SetTimer: lambda i: self._at(max(i.at_s, self.clock.now), ev.TimerFired(i.name)),
            ev.FinishRun: self._finish,
            ev.RequestSlots: lambda i: self._joining(self.market.want(i.slots)),
            ev.ReleaseSlot: lambda i: self._joining(self.market.released(i.worker)),
        }
        for kind in (
            ev.DrawGroup, ev.QuarantineTask, ev.RecordDecision, ev.RecordGate, ev.RecordOperation,
        ):  # fmt: skip
            self._carry[kind] = lambda i: None

    def run(self, until_s: float = math.inf) -> ev.FinishRun | None:
        """The machine's last instruction, or None if time was over first."""
        slots = self.cluster.slots
        environments = tuple(f"environment-{i}" for i in range(self.models.environment_workers))
        self._at(0.0, ev.RunStarted(tuple(s.name for s in slots), environments, slots))
        for time_s, event in self.cluster.changes:
            self.clock.at(time_s, self._trace, event)
        began_s = self._overlap_engines()
        self._answer(began_s + self.models.durations.trainer_start_s, ev.TrainerReady(0, 0))
        while self.end is None and self.clock.advance(until_s):
            pass
        return self.end

    # --- events -----------------------------------------------------------------------------------

    def _at(self, time_s: float, event: Event) -> None:
        self.clock.at(time_s, self._deliver, event)

    def _answer(self, seconds: float, event: Event) -> None:
        """In about so many seconds."""
        self.clock.after(self.models.durations.jittered(seconds, self._random), self._deliver, event)

    def _deliver(self, event: Event) -> None:
        if self.end is not None:
            return
        kind = type(event)
        if kind is ev.SlotJoined or kind is ev.SlotLost:
            self._slot_changed(event)
        now = self.clock.now
        self.totals.events += 1
        observers = self.observers
        for observer in observers:
            observer.saw(now, event)
        for instruction in self.machine.handle(event, now):
            for observer in observers:
                observer.saw(now, instruction)
            self._carry[type(instruction)](instruction)
        if self.check:
            self.machine.validate()

    def _finish(self, i: ev.FinishRun) -> None:
        self.end = i

    # --- trajectories -----------------------------------------------------------------------------

    def _open_environment(self, i: ev.OpenEnvironment) -> None:
        plan = self.workload.plan(i.task, i.trajectory)
        self.live[i.trajectory] = Live(plan)
        self.clock.after(plan.open_s, self._deliver, ev.EnvironmentOpened(i.trajectory, plan.new[0]))

    def _generate(self, i: ev.Generate) -> None:
        live = self.live[i.trajectory]
        planned = live.plan.response[live.turn] - live.turn_tokens
        wanted = max(1, min(planned, i.max_new_tokens))
        finish = FinishReason.STOP if planned <= i.max_new_tokens else FinishReason.LENGTH
        request = Request(i.trajectory, i.version, live.tokens, live.prompt, wanted, finish)
        engine = self._engine(i.worker, i.incarnation)
        prefill = self._engine(i.prefill_worker, i.prefill_incarnation) if i.prefill_worker else None
        if engine is None or (i.prefill_worker and prefill is None):
            gone = i.prefill_worker if engine is not None else i.worker
            lost = ev.TurnGenerated(
                i.trajectory, i.worker, i.incarnation, 0, i.version, FinishReason.LOST, f"{gone} is gone"
            )
            self._at(self.clock.now, lost)
        else:
            engine.submit(request, prefill)

    def _generated(self, request: Request, tokens: int, finish: FinishReason, reason: str) -> None:
        live = self.live[request.trajectory]
        live.tokens += tokens
        live.turn_tokens += tokens
        totals = self.totals
        totals.turns += 1
        totals.tokens_generated += tokens
        totals.tokens_delivered += tokens
        engine = request.worker
        worker = self.workers[engine.name]
        telemetry = engine.telemetry(request) if tokens else None
        self._at(
            self.clock.now,
            ev.TurnGenerated(
                request.trajectory, engine.name, worker.incarnation, tokens, request.version, finish, reason, telemetry
            ),
        )

    def _handed_on(self, request: Request, sender: Engine) -> None:
        worker = self.workers[sender.name]
        self._at(self.clock.now, ev.PrefillDone(request.trajectory, sender.name, worker.incarnation))

    def _step_environment(self, i: ev.StepEnvironment) -> None:
        live = self.live[i.trajectory]
        seconds = live.plan.seconds[live.turn]
        live.turn += 1
        live.turn_tokens = 0
        if live.turn == live.plan.turns:
            event = ev.EnvironmentStepped(i.trajectory, 0, StopReason.SUBMITTED, seconds)
        else:
            tokens = live.plan.new[live.turn]
            live.tokens += tokens
            event = ev.EnvironmentStepped(i.trajectory, tokens, None, seconds)
        self.clock.after(seconds, self._deliver, event)

    def _score(self, i: ev.ScoreTrajectory) -> None:
        live = self.live.pop(i.trajectory)
        self.lengths[i.trajectory] = live.tokens
        self.clock.after(live.plan.score_s, self._deliver, ev.TrajectoryScored(i.trajectory, live.plan.reward))

    def _start_environment_worker(self, i: ev.StartEnvironmentWorker) -> None:
        ready = ev.EnvironmentWorkerReady(i.worker, i.incarnation, self.models.environments_per_worker)
        self._answer(self.models.durations.environment_worker_start_s, ready)

    # --- workers ----------------------------------------------------------------------------------

    def _engine(self, name: str, incarnation: int) -> Engine | None:
        worker = self.workers[name]
        if worker.incarnation != incarnation:
            return None
        assert worker.engine is not None and worker.resident, f"{name} is asked to serve and has no engine"
        assert worker.info.zone is not Zone.OVERLAP or name in self.lent, f"{name} serves beside the trainer"
        return worker.engine

    def _of_worker(self, seconds: float, event: Any, then: Callable[[Worker], None] | None = None) -> None:
        """Answer with `event` unless the worker's present life has ended by then."""
        self.clock.after(self.models.durations.jittered(seconds, self._random), self._worker_did, (event, then))

    def _worker_did(self, answer: tuple[Any, Callable[[Worker], None] | None]) -> None:
        event, then = answer
        worker = self.workers[event.worker]
        if worker.incarnation == event.incarnation:
            if then is not None:
                then(worker)
            self._deliver(event)

    def _overlap_engines(self) -> float:
        """Where GPUs are lent, their engines start before the trainer and then sleep: when the last one does."""
        d, last_s = self.models.durations, 0.0
        for worker in self.workers.values() if _borrows(self.machine) else ():
            if worker.info.zone is Zone.OVERLAP:
                seconds = d.jittered(d.prepare_s + d.deactivate_s * RELEASE_SHARE, self._random)
                worker.incarnation, last_s = 1, max(last_s, seconds)
                worker.engine = self._new_engine(worker.info.name, Role.COLOCATED)
                self._at(seconds, ev.EngineAsleep(worker.info.name, 1))
        return last_s

    def _new_engine(self, name: str, role: Role) -> Engine:
        m = self.models
        return Engine(name, m.engine, role, self.clock, m.options, self._generated, self._handed_on)

    def _start_engine(self, i: ev.StartEngine) -> None:
        worker = self.workers[i.worker]
        if not worker.present:
            self._at(self.clock.now, ev.WorkerLost(i.worker, i.incarnation, "the slot is gone"))
            return
        worker.incarnation = i.incarnation

        def loaded(worker: Worker) -> None:
            worker.engine = self._new_engine(i.worker, i.role)
            worker.fresh = worker.resident = True

        self._of_worker(self.models.durations.prepare_s, ev.EngineLoaded(i.worker, i.incarnation), loaded)

    def _stop_engine(self, i: ev.StopEngine) -> None:
        worker = self.workers[i.worker]
        if worker.incarnation == i.incarnation:
            self._lose(worker, i.reason, lose_tokens=False)

    def _lose(self, worker: Worker, reason: str, *, lose_tokens: bool) -> None:
        """Its engine ends; what waits for it is answered."""
        name, incarnation = worker.info.name, worker.incarnation
        if incarnation < 0:
            return
        if worker.engine is not None:
            lost = worker.engine.interrupt(FinishReason.LOST, reason, lose_tokens=lose_tokens)
            self.totals.tokens_generated += lost
            self.totals.tokens_lost += lost
        worker.engine, worker.incarnation, worker.resident = None, -1, False
        self._at(self.clock.now, ev.WorkerLost(name, incarnation, reason))

    def _trace(self, event: Any) -> None:
        for change in self.market.changed(event):
            self._deliver(change)

    def _joining(self, joining: Iterable[Event]) -> None:
        for event in joining:
            self._at(self.clock.now, event)

    def _slot_changed(self, event: Any) -> None:
        if isinstance(event, ev.SlotJoined):
            worker = self.workers.setdefault(event.slot.name, Worker(event.slot))
            worker.present, worker.life = True, event.life
        elif (worker := self.workers[event.worker]).life == event.life:
            worker.present = False
            self._lose(worker, event.reason, lose_tokens=True)

    def _abort(self, i: ev.AbortRequests) -> None:
        if engine := self._engine(i.worker, i.incarnation):
            engine.interrupt(FinishReason.ABORT, "aborted")
            self._of_worker(self.models.durations.abort_s, ev.AbortAcknowledged(i.worker, i.incarnation))

    def _sync(self, i: ev.SyncWeights) -> None:
        worker = self.workers[i.worker]
        if worker.incarnation != i.incarnation:
            return
        assert worker.engine is not None and worker.resident, f"{i.worker} is to load weights and has no memory"
        assert not worker.engine.requests, f"{i.worker} is to load weights under its requests"
        worker.engine.kv.clear()
        d = self.models.durations
        if not worker.fresh:
            size = self.models.trainer.shape.snapshot_bytes
            seconds = d.sync_fixed_s + self._weights.seconds(i.version, i.worker, i.peers, size)
        elif worker.info.zone is Zone.OVERLAP and worker.info.name in self.lent:
            seconds = d.activate_s * (1 - OFFLOAD_SHARE - RESUME_SHARE)
        else:
            seconds = d.finalise_s
        worker.fresh = False
        self._of_worker(seconds, ev.WeightsSynced(i.worker, i.incarnation, i.version))

    def _switch_role(self, i: ev.SwitchRole) -> None:
        worker = self.workers[i.worker]
        if worker.incarnation == i.incarnation:
            assert worker.engine is not None
            worker.engine.change_role(i.role)
            self._of_worker(self.models.durations.role_switch_s, ev.RoleSwitched(i.worker, i.incarnation, i.role))

    def _release(self, i: ev.ReleaseEngine) -> None:
        worker = self.workers[i.worker]
        if worker.incarnation == i.incarnation:
            assert worker.engine is not None and not worker.engine.requests, f"{i.worker} is released with requests"
            worker.engine.kv.clear()
            worker.resident = False
            seconds = self.models.durations.deactivate_s * RELEASE_SHARE
            self._of_worker(seconds, ev.EngineReleased(i.worker, i.incarnation))

    def _resume(self, i: ev.ResumeEngine) -> None:
        worker = self.workers[i.worker]

        def resumed(worker: Worker) -> None:
            worker.fresh = worker.resident = True

        if worker.incarnation == i.incarnation:
            seconds = self.models.durations.activate_s * RESUME_SHARE
            self._of_worker(seconds, ev.EngineResumed(i.worker, i.incarnation), resumed)

    # --- the trainer ------------------------------------------------------------------------------

    def _train(self, i: ev.TrainBatch) -> None:
        assert not self.lent, f"training on GPUs that are lent out: {sorted(self.lent)}"
        self._steps = i.step
        lengths = [self.lengths[trajectory] for group in i.groups for trajectory in group]
        self._answer(self.models.trainer.step_s(lengths), ev.BatchTrained(i.step))

    def _publish(self, i: ev.PublishSnapshot) -> None:
        assert not self.lent, f"a snapshot is gathered from GPUs that are lent out: {sorted(self.lent)}"
        m = self.models
        seconds = m.durations.publish_fixed_s + m.trainer.shape.snapshot_bytes / m.durations.snapshot_bytes_per_s
        self._answer(seconds, ev.SnapshotPublished(i.version))
        if m.checkpoint_every_steps and self._steps % m.checkpoint_every_steps == 0:
            self._answer(2 * seconds, ev.CheckpointWritten(self._steps))

    def _offload(self, i: ev.OffloadTrainer) -> None:
        self.clock.after(
            self.models.durations.jittered(self.models.durations.activate_s * OFFLOAD_SHARE, self._random),
            self._offloaded, i.slots,
        )  # fmt: skip

    def _offloaded(self, slots: tuple[str, ...]) -> None:
        self.lent.update(slots)
        self._deliver(ev.TrainerOffloaded(slots))

    def _reload(self, i: ev.ReloadTrainer) -> None:
        for name in i.slots:
            assert not self.workers[name].resident, f"the trainer is to come back beside the engine of {name}"
        seconds = self.models.durations.deactivate_s * (1 - RELEASE_SHARE)
        self.clock.after(self.models.durations.jittered(seconds, self._random), self._reloaded, i.slots)

    def _reloaded(self, slots: tuple[str, ...]) -> None:
        self.lent.difference_update(slots)
        self._deliver(ev.TrainerReloaded(slots))


def _borrows(machine: Machine) -> bool:
    """Whether it may lend training GPUs to rollout."""
    return isinstance(machine, Scheduler) and machine.elastic.settings.intra_scale is not Borrowing.NEVER
