"""The interpreter: carries instructions out with adversarial timing, and lets a schedule's faults happen.

It answers as the live side does. Whoever carries an instruction out writes what it got to the records and posts an
event; the driver takes posted events in order, sometimes late, and dies between any two entries if a fault says so.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from pearl.core import events as ev
from pearl.core.decision import DecisionEngine, DecisionSettings
from pearl.core.elastic import Elastic, Tracker
from pearl.core.events import Event, Instruction
from pearl.core.layout import Zone
from pearl.core.makespan import ClosedForm
from pearl.core.pipeline import Pipeline
from pearl.core.profile import RuntimeTracker
from pearl.core.restore import Replay
from pearl.core.scheduler import Scheduler
from pearl.core.settings import Borrowing
from pearl.core.state import Goal
from pearl.core.tasks import TaskCursor
from pearl.core.toggle import Phase
from pearl.core.trajectory import TrajectoryId
from pearl.core.workload import EngineProfile, Profile, TurnShape, WorkloadProfile
from pearl.sim.search.case import ANY, AWAITED, Case, Fault, Kind
from pearl.sim.search.chance import Chance
from pearl.sim.search.deadlines import EVENTS, LATE_SHARE, RUN_S, TIMER_LATE_S, TYPICAL_AND_DEADLINE_S
from pearl.sim.search.engines import Engines
from pearl.sim.search.environments import EnvironmentWorkers
from pearl.sim.search.records import Records
from pearl.sim.search.rules import LAG_S, Rules
from pearl.sim.search.trainer import Trainer

PROFILE = Profile(
    EngineProfile(0.001, 0.0001, 0.0, 0.01, 0.0002, 0.0, 1000.0, 10_000, 1e9),
    WorkloadProfile((TurnShape(1.0, 10.0, 10.0, 1.0, 0.0),) * 3, 3.0, 10.0, 10.0, 1.0),
)
"""Of a small engine on which roles and borrowing are close calls."""
BUSY_SHARE, BUSY_S, BURST = 0.15, 0.4, 4
"""How often, how long and for how many events the driver does not listen."""
AT_ONCE = frozenset({Kind.ANSWER_LOST, Kind.ANSWER_LATE, Kind.REFUSED, Kind.PREFILL_DIES})
"""Faults of the instruction itself."""
ANY_TIME = (ev.SlotJoined, ev.SlotNotice, ev.SlotLost, ev.WorkerLost, ev.EnvironmentWorkerLost, ev.EngineLoaded,
            ev.TimerFired)  # fmt: skip
"""Words that may come again at any time; a repeated answer comes directly behind itself."""
FREES_TRAINER = (ev.TrainerReady, ev.SnapshotPublished, ev.CheckpointWritten)
UNPLANNED: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(AWAITED, (Kind.REFUSED, Kind.REFUSED, Kind.REFUSED, Kind.ANSWER_LATE, Kind.ANSWER_LOST)),
    "Generate": (Kind.REFUSED, Kind.ANSWER_LATE, Kind.ENGINE_DIES, Kind.PROCESS_DIES, Kind.PREFILL_DIES),
    "SlotJoined": (Kind.NOTICE, Kind.SLOT_LOST),
    "EnvironmentWorkerReady": (Kind.ENVIRONMENT_LOST,),
}
"""By what they happen to."""
NOTICES_S = (0.0, 1.0, 4.0, 30.0)


class FixedProfile:
    """A tracker that has always known."""

    def observe(self, entry: Event | Instruction, now: float) -> None:
        pass

    def profile(self) -> Profile:
        return PROFILE


class DriverDied(Exception):
    """A fault, not an error."""


class World:
    """`run` plays the case to its end; raises whatever the machine or a rule raises."""

    def __init__(self, case: Case) -> None:
        self.case, self.chance, self.now, self.driver = case, Chance(case.seed), 0.0, 0
        self.log: list[tuple[float, Event | Instruction]] = []
        self.records, self.rules = Records(), Rules(case)
        self.engines = Engines(self)
        self.trainer, self.environments = Trainer(self), EnvironmentWorkers(self)
        self.machine: Pipeline | Scheduler
        self.pipeline: Pipeline
        self.struck: list[Fault] = []
        """Faults that happened."""
        self._triggers: dict[tuple[str, int], list[Fault]] = {}
        for fault in case.faults:
            self._triggers.setdefault((fault.on, fault.nth), []).append(fault)
        self.counts: Counter[str] = Counter()
        """Entries of the log by kind, over all drivers."""
        self._turns: Counter[TrajectoryId] = Counter()
        self._posted: deque[Event] = deque()
        self._heap: list[tuple[float, float, int, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        self._number = itertools.count()
        self._returning: tuple[float, tuple[str, ...]] = (math.inf, ())
        """Since when which borrowed slots are on their way back."""
        deadline_s = case.elastic.return_deadline_s if case.elastic else 0.0
        self._return_limit_s = deadline_s + TIMER_LATE_S + TYPICAL_AND_DEADLINE_S["StopEngine"][1] + LAG_S
        self._fault: Fault | None = None
        """Of the instruction that is being carried out."""
        self._carry: dict[type[Instruction], Callable[[Any], object]] = {
            ev.StartEngine: self.engines.start,
            ev.StopEngine: self.engines.stop,
            ev.SyncWeights: self.engines.sync,
            ev.SwitchRole: self.engines.switch,
            ev.ReleaseEngine: self.engines.release,
            ev.ResumeEngine: self.engines.resume,
            ev.AbortRequests: self.engines.abort,
            ev.Generate: self.engines.generate,
            ev.ReleaseSlot: self.engines.release_slot,
            ev.TrainBatch: self.trainer.train,
            ev.PublishSnapshot: self.trainer.publish,
            ev.OffloadTrainer: self.trainer.offload,
            ev.ReloadTrainer: self.trainer.reload,
            ev.RestartTrainer: self.trainer.restart,
            ev.RetireSnapshots: self.engines.retire,
            ev.StartEnvironmentWorker: self.environments.start,
            ev.OpenEnvironment: self.environments.open,
            ev.ReopenEnvironment: self.environments.reopen,
            ev.StepEnvironment: self.environments.step,
            ev.ScoreTrajectory: self.environments.score,
            ev.SetTimer: self._set_timer,
            ev.RecordOperation: self._check_return,
        }

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> ev.FinishRun:
        while True:
            try:
                self._begin()
                return self._live()
            except DriverDied:
                self.driver += 1

    def _begin(self) -> None:
        """A driver starts, from the records if there are any. Everything that ran under another one has ended."""
        self._heap, self._posted, self._fault = [], deque(), None
        self._returning = (math.inf, ())
        self._make_machine()
        self.rules.new_driver()
        step, version = 0, 0
        if self.records.list:
            replay = Replay().read(self.records.list)
            step, version = max(replay.checkpoints, default=0), replay.newest_version + 1
            replay.apply(self.pipeline, step)
            self.records.write("rollback", step=step)
            self.rules.roll_back(step)
            self.pipeline.validate()
            self.rules.resumed(self.pipeline)
        names, infos = self.engines.begin()
        self.post(ev.RunStarted(names, self.environments.begin(), infos))
        self.trainer.begin(step, version)

    def _make_machine(self) -> None:
        case = self.case
        self.pipeline = Pipeline(case.pipeline, TaskCursor(case.tasks, case.task_seed))
        self.machine = self.pipeline
        if case.elastic is not None:
            tracker: Tracker = RuntimeTracker(PROFILE) if case.tracked else FixedProfile()
            engine = DecisionEngine(DecisionSettings(), ClosedForm())
            self.machine = Scheduler(self.pipeline, Elastic(self.pipeline, case.elastic, engine, tracker))

    def _live(self) -> ev.FinishRun:
        while True:
            while self._posted:
                if end := self._handle(self._posted.popleft()):
                    return end
            assert self._heap, "nothing is left to happen and the run is not finished"
            number = self._next()
            if self.chance.uniform("busy", number) < BUSY_SHARE:
                until_s = self.now + BUSY_S
                for _ in range(BURST):
                    if self._heap and self._heap[0][0] <= until_s:
                        self._next()

    def _next(self) -> int:
        self.now, _, number, action, arguments, options = heapq.heappop(self._heap)
        assert self.now < RUN_S, f"the run does not end in {RUN_S:g} s"
        action(*arguments, **options)
        return number

    def _handle(self, event: Event) -> ev.FinishRun | None:
        assert len(self.log) < EVENTS, f"the run does not end with {EVENTS} events"
        self._entry(event)
        self.rules.heard(event, self.now, self.pipeline)
        for instruction in self.machine.handle(event, self.now):
            self._entry(instruction)
            self.rules.asked(instruction, self.now)
            if isinstance(instruction, ev.FinishRun):
                self.rules.finished(instruction, self.pipeline)
                return instruction
            if carry := self._carry.get(type(instruction)):
                carry(instruction)
            if isinstance(instruction, ev.Generate):
                self._turns[instruction.trajectory] += 1
        self.machine.validate()
        self.rules.check(self.now, self.pipeline)
        if not self._posted:
            for worker in self.pipeline.fleet.workers.values():
                self.engines.check_awaited(worker)
            if isinstance(event, ev.WeightsSynced):
                self._check_retired()
        since_s, slots = self._returning
        for name in slots if self.now > since_s + self._return_limit_s else ():
            assert not self.engines.holds(name), (
                f"{name} has an engine {self.now - since_s:.1f} s after its return began"
            )
        if isinstance(event, FREES_TRAINER):
            self._check_borrowing()
        return None

    # --- for those that carry out -----------------------------------------------------------------

    def at(self, time_s: float, action: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """What is due at the same time happens in any order."""
        number = next(self._number)
        heapq.heappush(self._heap, (time_s, self.chance.uniform("tie", number), number, action, arguments, options))

    def after(self, delay_s: float, action: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self.at(self.now + delay_s, action, *arguments, **options)

    def post(self, event: Event, sent: ev.Generate | None = None) -> None:
        self.records.posted(event, sent)
        self.rules.posted(event)
        self._posted.append(event)

    def turn_of(self, trajectory: TrajectoryId) -> int:
        """Requests that were sent for it."""
        return self._turns[trajectory]

    def fate(self, i: Instruction) -> tuple[Kind | None, Fault | None]:
        """What goes wrong with the instruction that is being carried out."""
        return (self._fault.kind, self._fault) if self._fault is not None else (None, None)

    def takes_s(self, i: Instruction, *name: object) -> float:
        kind = type(i).__name__
        typical_s, deadline_s = TYPICAL_AND_DEADLINE_S[kind]
        if self._fault is not None and self._fault.kind is Kind.ANSWER_LATE:
            return LATE_SHARE * deadline_s
        return self.chance.delay_s(typical_s, deadline_s, kind, self.driver, *name)

    def _set_timer(self, i: ev.SetTimer) -> None:
        late_s = TIMER_LATE_S * self.chance.uniform("timer", i.name, self.driver)
        self.at(max(i.at_s, self.now) + late_s, self.post, ev.TimerFired(i.name))

    def _check_return(self, i: ev.RecordOperation) -> None:
        """Borrowed GPUs are kept as long as somebody serves on them and the trainer does not need them."""
        if i.kind != "return":
            return
        if i.phase in ("began", "done"):
            self._returning = (self.now, i.workers) if i.phase == "began" else (math.inf, ())
        if i.phase == "began" and self.trainer.alive:
            engines = [self.engines.engines.get(name) for name in i.workers]
            serving = [e.worker for e in engines if e is not None and e.alive and e.version is not None]
            assert not serving or self.rules.batch_waits(self.pipeline), f"{serving} serve, and their GPUs go back"

    def _check_retired(self) -> None:
        """Once nobody loads an older one, all snapshots but the newest are removed."""
        fleet = self.pipeline.fleet
        newest = any(w.version == fleet.version for w in fleet.workers.values())
        older = any(w.syncing is not None and w.syncing < fleet.version for w in fleet.workers.values())
        removed = not newest or older or self.rules.retired == fleet.version - 1
        assert removed or fleet.version == 0, (
            f"v{self.rules.retired} is the last one removed, v{fleet.version} the newest"
        )

    def _check_borrowing(self) -> None:
        """With `always`, GPUs are lent whenever the trainer begins to wait."""
        if not isinstance(self.machine, Scheduler) or self.machine.elastic.settings.intra_scale is not Borrowing.ALWAYS:
            return
        waits = self.pipeline.step.idle and self.pipeline.samples.remaining
        asleep = [w for w in self.pipeline.fleet.workers.values() if w.overlap and w.goal is Goal.ASLEEP]
        home = self.machine.elastic.toggle.phase is Phase.HOME
        assert not (waits and asleep and home), "the trainer waits, and its GPUs are not lent"

    # --- faults -----------------------------------------------------------------------------------

    def _entry(self, entry: Event | Instruction) -> None:
        """The driver is at this entry: log it, write its record, let faults happen that wait for it."""
        name = type(entry).__name__
        self.counts[name] += 1
        # Taken out, since a driver that dies in front of an entry meets the same number again.
        planned = (self._triggers.pop(key, ()) for key in ((name, self.counts[name]), (ANY, len(self.log))))
        faults = tuple(itertools.chain(*planned)) if self._triggers else ()
        faults = faults or self._besides(name)
        self._fault = None
        if any(f.kind is Kind.DRIVER_DIES and not f.wait_s and f.pick < 0.5 for f in faults):
            self.struck += faults
            raise DriverDied
        self.log.append((self.now, entry))
        self.records.saw(entry, self.pipeline)
        for fault in faults:
            self.struck.append(fault)
            if fault.kind in AT_ONCE:
                self._fault = fault
            elif fault.kind is Kind.REPEATED and isinstance(entry, Event):
                if isinstance(entry, ANY_TIME):
                    self.after(fault.wait_s, self._posted.append, entry)
                else:
                    self._posted.appendleft(entry)
            else:
                self.after(fault.wait_s, self._strike, fault, entry)

    def _besides(self, name: str) -> tuple[Fault, ...]:
        """A fault that nobody planned, by the case's rate."""
        kinds = UNPLANNED.get(name, ())
        number = self.counts[name]
        if not self.case.fault_rate or not kinds or self.chance.uniform("rate", name, number) >= self.case.fault_rate:
            return ()
        kind = self.chance.choice(kinds, "unplanned", name, number)
        wait_s = self.chance.choice((0.0, 1.0, 20.0), "when", name, number)
        return (Fault(kind, name, number, wait_s, self.chance.uniform("pick", name, number)),)

    def _strike(self, fault: Fault, entry: Event | Instruction) -> None:
        match fault.kind:
            case Kind.ENGINE_DIES | Kind.PROCESS_DIES:
                if worker := _struck(entry, self.engines.running(), fault.pick):
                    engine = self.engines.engines[worker]
                    self.engines.die(engine, str(fault.kind), with_tokens=fault.kind is Kind.ENGINE_DIES)
            case Kind.NOTICE | Kind.SLOT_LOST:
                worker = _struck(entry, self.engines.present(Zone.RESERVED, Zone.PREEMPTIBLE), fault.pick)
                if worker and fault.kind is Kind.NOTICE:
                    self.engines.notice(worker, self.chance.choice(NOTICES_S, "notice", str(fault)))
                elif worker:
                    self.engines.take_away(worker, self.engines.slots[worker].life, "it was reclaimed")
            case Kind.SLOT_JOINS:
                self.engines.offer_another()
            case Kind.ENVIRONMENT_LOST:
                workers = list(self.environments.workers.values())
                name = getattr(entry, "environment_worker", None)
                named = [w for w in workers if w.name == name] or workers
                if named:
                    self.environments.die(named[int(fault.pick * len(named))], str(fault.kind))
            case Kind.TRAINER_LOST:
                self.trainer.lose(str(fault.kind))
            case Kind.DRIVER_DIES:
                raise DriverDied


def _struck(entry: Event | Instruction, names: list[str], pick: float) -> str | None:
    """The slot of the entry if it is one of `names`; where it names none, one that is picked."""
    named = entry.slot.name if isinstance(entry, ev.SlotJoined) else getattr(entry, "worker", None)
    if named is None and names:
        return names[int(pick * len(names))]
    return named if named in names else None
