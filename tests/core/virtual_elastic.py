"""The interpreter in virtual time with elasticity: slots that come and go, roles that change, GPUs that are lent.

It is as unkind as the vocabulary allows: engines fail to start, to sync, to switch, to wake; notices come at any time,
also none; acknowledgements are late; words about slots and lives come twice; a trainer dies while its GPUs are lent.
And it checks what the world would check: two owners of a GPU, requests to what does not serve.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pearl.core import events as ev
from pearl.core.decision import DecisionEngine, DecisionSettings
from pearl.core.elastic import Elastic
from pearl.core.events import Event, Instruction
from pearl.core.layout import Role, SlotInfo, Zone
from pearl.core.makespan import ClosedForm
from pearl.core.pipeline import Pipeline
from pearl.core.scheduler import Scheduler
from pearl.core.settings import ElasticSettings
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, TrajectoryId
from pearl.core.workload import EngineProfile, Profile, TurnShape, WorkloadProfile
from tests.core.virtual import Virtual, settings

ENGINE = EngineProfile(0.001, 0.0001, 0.0, 0.01, 0.0002, 0.0, 1000.0, 10_000, 1e9)
WORKLOAD = WorkloadProfile((TurnShape(1.0, 10.0, 10.0, 1.0, 0.0),) * 3, 3.0, 10.0, 10.0, 1.0)


class FixedProfile:
    """A tracker that has always known."""

    def observe(self, entry: Event | Instruction, now: float) -> None:
        pass

    def profile(self) -> Profile:
        return Profile(ENGINE, WORKLOAD)


def scheduler(elastic: ElasticSettings, tasks: int = 8, seed: int = 0, **changes: object) -> Scheduler:
    pipeline = Pipeline(settings(**changes), TaskCursor(tasks, seed))
    engine = DecisionEngine(DecisionSettings(), ClosedForm())
    return Scheduler(pipeline, Elastic(pipeline, elastic, engine, FixedProfile()))


def slot(name: str, zone: Zone = Zone.PREEMPTIBLE) -> SlotInfo:
    return SlotInfo(name, zone, (f"{name}/0",), name)


TRAINER = (
    ev.TrainerReady, ev.BatchTrained, ev.SnapshotPublished, ev.CheckpointWritten, ev.TrainerOffloaded,
    ev.TrainerReloaded, ev.TrainerLost,
)  # fmt: skip


@dataclass
class ElasticVirtual(Virtual):
    """`spot`: preemptible slots that come and go; `overlap`: slots on the trainer's GPUs."""

    scheduler: Scheduler = None  # type: ignore[assignment]
    spot: tuple[str, ...] = ()
    overlap: tuple[str, ...] = ()
    churn_s: float = 8.0
    lives: dict[str, int] = field(default_factory=dict)
    pairs: dict[TrajectoryId, ev.Generate] = field(default_factory=dict)
    prefills: dict[int, ev.Generate] = field(default_factory=dict)
    """Which request a PrefillDone is of."""
    trainer_life: int = 0
    said: dict[int, tuple[Event, int]] = field(default_factory=dict)
    """What the trainer says in which of its lives."""
    owner: dict[str, str] = field(default_factory=dict)
    up: dict[str, int] = field(default_factory=dict)
    """Running engines by slot, with their incarnation."""

    @property
    def machine(self) -> Scheduler:
        return self.scheduler

    def run(self) -> ev.FinishRun:
        infos = (*(slot(n, Zone.RESERVED) for n in self.workers), *(slot(n, Zone.OVERLAP) for n in self.overlap))
        self.owner = dict.fromkeys(self.overlap, "trainer")
        self.at(0.0, ev.RunStarted((*self.workers, *self.overlap), self.environments, infos))
        self.at(1.0, ev.TrainerReady(0, 0))
        for name in self.spot:
            self.come(name)
        while self.heap:
            self.budget -= 1
            assert self.budget > 0, "the run does not end"
            self.now, _, event = self.pop()
            if end := self.deliver(event):
                return end
        raise AssertionError("nothing is left to happen and the run is not finished")

    def at(self, delay: float, event: Event) -> None:
        if isinstance(event, TRAINER):
            self.said[id(event)] = (event, self.trainer_life)
        super().at(delay, event)

    def deliver(self, event: Event) -> ev.FinishRun | None:
        if isinstance(event, TRAINER) and self.said[id(event)][1] != self.trainer_life:
            return None  # the trainer died before it could say so
        match event:
            case ev.TrainerLost():
                self.trainer_life += 1
            case ev.SlotLost() if event.life == self.lives[event.worker]:
                self.vanish(event.worker)
            case ev.PrefillDone():
                if self.pairs.get(event.trajectory) is not self.prefills[id(event)]:
                    return None  # the request ended before
                del self.pairs[event.trajectory]
            case ev.TurnGenerated() if (event.trajectory, event.incarnation) in self.in_flight[event.worker]:
                self.pairs.pop(event.trajectory, None)
            case ev.EngineReleased() if self.alive(event.worker, event.incarnation):
                self.take(event.worker, "worker", "nobody")
            case ev.TrainerOffloaded():
                for name in event.slots:
                    self.take(name, "trainer", "nobody")
        repeated = isinstance(event, ev.SlotJoined | ev.SlotNotice | ev.SlotLost | ev.WorkerLost | ev.EngineLoaded)
        if repeated and self.fault():
            self.at(self.delay(), event)
        if isinstance(event, ev.WorkerLost):
            self.down(event.worker, event.incarnation)
        return super().deliver(event)

    # --- slots ------------------------------------------------------------------------------------

    def come(self, name: str) -> None:
        """The next life of a slot: joins, then is noticed or dies, then comes again."""
        life = self.lives[name] = self.lives.get(name, 0) + 1
        at = self.churn_s * self.delay()
        lifetime = self.random.choice([None, 1.0, 1000.0])
        self.at(at, ev.SlotJoined(slot(name), life, lifetime))
        end = at + 4 * self.churn_s * self.delay()
        notice = self.random.choice([0.0, 0.0, 3.0, 30.0])
        if notice:
            self.at(end, ev.SlotNotice(name, life, notice))
        self.at(end + notice, ev.SlotLost(name, life, "reclaimed"))
        if notice and self.fault():
            self.at(end + notice / 2, ev.SlotNotice(name, life, notice / 2))

    def vanish(self, name: str) -> None:
        """The slot is gone with everything on it; it comes back some time."""
        if name in self.up:
            self.kill(name, self.up[name], "its slot is gone")
        self.come(name)

    def down(self, worker: str, incarnation: int) -> None:
        if self.up.get(worker) == incarnation:
            del self.up[worker]
            if self.owner.get(worker) == "worker":
                self.owner[worker] = "nobody"

    def kill(self, worker: str, incarnation: int, reason: str) -> None:
        """An engine ends: its requests are lost, and those whose prefill it was doing."""
        for sent in list(self.pairs.values()):
            if (sent.prefill_worker, sent.prefill_incarnation) == (worker, incarnation):
                self.at(0.0, self.turn(sent, 0, FinishReason.LOST))
        super().kill(worker, incarnation, reason)

    # --- instructions -----------------------------------------------------------------------------

    def alive(self, worker: str, incarnation: int) -> bool:
        return self.up.get(worker) == incarnation and (worker, incarnation) not in self.dead

    def works(self, worker: str, incarnation: int) -> bool:
        prefills = ((sent.prefill_worker, sent.prefill_incarnation) for sent in self.pairs.values())
        return any(key[1] == incarnation for key in self.in_flight[worker]) or (worker, incarnation) in prefills

    def take(self, name: str, source: str, target: str) -> None:
        if name in self.owner:
            assert self.owner[name] == source, f"{target} takes {name} from {self.owner[name]}"
            self.owner[name] = target

    def answer(self, i: ev.SwitchRole | ev.ReleaseEngine | ev.ResumeEngine, event: Event) -> None:
        assert self.alive(i.worker, i.incarnation) or (i.worker, i.incarnation) in self.dead
        if self.fault():
            self.at(self.delay(), ev.WorkerLost(i.worker, i.incarnation, f"{type(i).__name__} failed"))
            self.dead.add((i.worker, i.incarnation))
        else:
            self.at(self.delay(), event)

    def carry_out(self, i: Instruction) -> None:
        match i:
            case ev.StartEngine():
                assert i.worker not in self.up, f"{i.worker} is started twice"
                self.take(i.worker, "nobody", "worker")
                self.up[i.worker] = i.incarnation
                super().carry_out(i)
            case ev.SyncWeights():
                assert i.worker not in i.peers
                super().carry_out(i)
            case ev.AbortRequests():
                for sent in list(self.pairs.values()):
                    if (sent.prefill_worker, sent.prefill_incarnation) == (i.worker, i.incarnation):
                        self.at(self.delay(), self.turn(sent, 0, FinishReason.ABORT))
                self.interrupt(i.worker, i.incarnation, FinishReason.ABORT)
                self.at(self.random.choice([0.0, self.delay()]), ev.AbortAcknowledged(i.worker, i.incarnation))
            case ev.Generate():
                if i.prefill_worker:
                    assert i.prefill_worker != i.worker
                    self.pairs[i.trajectory] = i
                    if self.random.random() < 0.7:
                        done = ev.PrefillDone(i.trajectory, i.prefill_worker, i.prefill_incarnation)
                        self.prefills[id(done)] = i
                        self.at(0.2 * self.delay(), done)
                super().carry_out(i)
            case ev.SwitchRole():
                assert not self.works(i.worker, i.incarnation), "an engine changes its role with work in it"
                self.answer(i, ev.RoleSwitched(i.worker, i.incarnation, i.role))
            case ev.ReleaseEngine():
                assert not self.works(i.worker, i.incarnation), "an engine is put to sleep with work in it"
                self.answer(i, ev.EngineReleased(i.worker, i.incarnation))
            case ev.ResumeEngine():
                self.take(i.worker, "nobody", "worker")
                self.answer(i, ev.EngineResumed(i.worker, i.incarnation))
            case ev.StopEngine():
                if (i.worker, i.incarnation) not in self.dead:
                    self.kill(i.worker, i.incarnation, i.reason)
            case ev.OffloadTrainer():
                assert all(self.owner[name] == "trainer" for name in i.slots)
                self.answer_trainer(self.delay(), ev.TrainerOffloaded(i.slots))
            case ev.ReloadTrainer():
                for name in i.slots:
                    self.take(name, "nobody", "trainer")
                self.answer_trainer(self.delay(), ev.TrainerReloaded(i.slots))
            case ev.TrainBatch() | ev.PublishSnapshot():
                assert set(self.owner.values()) <= {"trainer"}, "the trainer works without all its GPUs"
                super().carry_out(i)
            case ev.RestartTrainer():
                assert "worker" not in self.owner.values(), "the trainer restarts while its GPUs are lent"
                self.owner = dict.fromkeys(self.owner, "trainer")
                super().carry_out(i)
            case ev.SetTimer():
                self.at(max(0.0, i.at_s - self.now), ev.TimerFired(i.name))
            case _:
                super().carry_out(i)


def play_elastic(
    elastic: ElasticSettings,
    seed: int = 0,
    fault_rate: float = 0.0,
    spot: int = 0,
    overlap: int = 0,
    reserved: int = 2,
    **changes: object,
) -> ElasticVirtual:
    """Run to the end and return what happened."""
    machine = scheduler(elastic, seed=seed, **changes)
    virtual = ElasticVirtual(
        machine.pipeline,
        seed=seed,
        fault_rate=fault_rate,
        workers=tuple(f"rollout-{i}" for i in range(reserved)),
        scheduler=machine,
        spot=tuple(f"spot-{i}" for i in range(spot)),
        overlap=tuple(f"overlap-{i}" for i in range(overlap)),
    )
    virtual.end = virtual.run()  # type: ignore[attr-defined]
    return virtual


def roles_of(entry: ev.RecordDecision) -> dict[str, Role]:
    return {name: Role(role) for name, _, role in entry.role_changes}
