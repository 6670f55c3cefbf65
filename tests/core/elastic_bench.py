"""Both schedulers, driven by hand: answers come only when a test asks for them."""

from __future__ import annotations

from typing import Any

from pearl.core import events as ev
from pearl.core.decision import Decision
from pearl.core.elastic import Elastic
from pearl.core.events import Event, Instruction
from pearl.core.layout import Layout, Role, Zone
from pearl.core.pipeline import Pipeline
from pearl.core.scheduler import Scheduler
from pearl.core.settings import ElasticSettings, Roles
from pearl.core.state import Activity
from pearl.core.tasks import TaskCursor
from pearl.core.trajectory import FinishReason, StopReason, TrajectoryId
from pearl.core.workload import Profile
from tests.core.virtual import settings
from tests.core.virtual_elastic import FixedProfile, slot

FIRST = TrajectoryId(0, 0, 0)
SECOND = TrajectoryId(0, 1, 0)


class Says:
    """A Decision Engine that says what the test wants: a layout by number of workers, and a makespan."""

    def __init__(self, layouts: dict[int, Layout], seconds: dict[int, float] | None = None) -> None:
        self.layouts, self.seconds = layouts, seconds or {}

    def decide(self, profile: Profile, workers: int, batch: float, current: Layout | None = None) -> Decision:
        layout = self.layouts.get(workers, Layout(colocated=workers))
        return Decision(layout, self.makespan(profile, layout, batch), None, False, ("says the test",), ())

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        return self.seconds.get(layout.workers, 100.0 / layout.workers)


class Bench:
    """Both schedulers with serving workers w0, w1 ..., driven by hand. Answers come only when asked for."""

    def __init__(
        self, workers: int = 2, overlap: int = 0, engine: Says | None = None, elastic: Any = None, **changes: Any
    ) -> None:
        pipeline = Pipeline(settings(**{"groups_per_batch": 1, "group_size": 2, **changes}), TaskCursor(4, 0))
        policies = {"inter_scale": True, "roles": Roles.DYNAMIC, **(elastic or {})}
        self.elastic = Elastic(pipeline, ElasticSettings(**policies), engine or Says({}), FixedProfile())
        self.machine = Scheduler(pipeline, self.elastic)
        self.fleet = pipeline.fleet
        self.now = 0.0
        self.out: list[Instruction] = []
        names = tuple(f"w{i}" for i in range(workers))
        lent = tuple(slot(f"o{i}", Zone.OVERLAP) for i in range(overlap))
        self.send(ev.RunStarted((*names, *(o.name for o in lent)), ("e0",), lent))
        self.send(ev.EnvironmentWorkerReady("e0", 1, 16))
        for name in names:
            self.send(ev.EngineLoaded(name, 1))
        self.send(ev.TrainerReady(0))
        self.answer_all(ev.SyncWeights, *names)

    def send(self, event: Event) -> list[Instruction]:
        new = self.machine.handle(event, self.now)
        self.machine.validate()
        self.out += new
        return new

    def answer(self, i: Instruction) -> list[Instruction]:
        match i:
            case ev.StartEngine():
                return self.send(ev.EngineLoaded(i.worker, i.incarnation))
            case ev.SyncWeights():
                return self.send(ev.WeightsSynced(i.worker, i.incarnation, i.version))
            case ev.SwitchRole():
                return self.send(ev.RoleSwitched(i.worker, i.incarnation, i.role))
            case ev.ReleaseEngine():
                return self.send(ev.EngineReleased(i.worker, i.incarnation))
            case ev.ResumeEngine():
                return self.send(ev.EngineResumed(i.worker, i.incarnation))
            case ev.AbortRequests():
                return self.send(ev.AbortAcknowledged(i.worker, i.incarnation))
            case ev.StopEngine():
                return self.send(ev.WorkerLost(i.worker, i.incarnation, i.reason))
            case ev.OffloadTrainer():
                return self.send(ev.TrainerOffloaded(i.slots))
            case ev.ReloadTrainer():
                return self.send(ev.TrainerReloaded(i.slots))
        raise AssertionError(i)

    def answer_all(self, kind: type, *names: str) -> list[Instruction]:
        """Answer the newest instruction of this kind to each of these workers."""
        new: list[Instruction] = []
        for name in names:
            new += self.answer(next(i for i in reversed(kinds(self.out, kind)) if i.worker == name))
        return new

    def join(self, *names: str, life: int = 1, lifetime_s: float | None = None) -> list[Instruction]:
        return [i for name in names for i in self.send(ev.SlotJoined(slot(name), life, lifetime_s))]

    def opened(self, trajectory: TrajectoryId, tokens: int = 10) -> ev.Generate:
        new = self.send(ev.EnvironmentOpened(trajectory, tokens))
        return next(i for i in new if isinstance(i, ev.Generate) and i.trajectory == trajectory)

    def generated(self, sent: ev.Generate, tokens: int, finish: FinishReason) -> list[Instruction]:
        turn = ev.TurnGenerated(sent.trajectory, sent.worker, sent.incarnation, tokens, sent.version, finish)
        return self.send(turn)

    def finish(self, trajectory: TrajectoryId) -> list[Instruction]:
        self.generated(self.opened(trajectory), 5, FinishReason.STOP)
        self.send(ev.EnvironmentStepped(trajectory, 0, StopReason.SUBMITTED))
        return self.send(ev.TrajectoryScored(trajectory, 1.0))

    def activity(self, *names: str) -> list[Activity]:
        return [self.fleet.workers[name].activity for name in names]

    def roles(self) -> dict[str, Role]:
        """Of those who serve."""
        return {name: worker.role for name, worker in self.fleet.router.workers.items()}

    def operations(self, kind: str) -> list[tuple[str, tuple[str, ...], str]]:
        found = [i for i in self.out if isinstance(i, ev.RecordOperation) and i.kind == kind]
        return [(i.phase, i.workers, i.reason) for i in found]


def kinds(instructions: list[Instruction], kind: type) -> list:
    return [i for i in instructions if isinstance(i, kind)]
