"""Slots and the engines on them: what is really there, whatever the machine believes of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pearl.core import events as ev
from pearl.core.layout import Role, SlotInfo, Zone
from pearl.core.state import Awaited, Goal, WorkerSlot
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason, TrajectoryId
from pearl.sim.search.case import Kind
from pearl.sim.search.deadlines import TYPICAL_AND_DEADLINE_S

if TYPE_CHECKING:
    from pearl.sim.search.world import World

INSTRUCTION = {
    Awaited.START: "StartEngine",
    Awaited.SYNC: "SyncWeights",
    Awaited.SWITCH: "SwitchRole",
    Awaited.RELEASE: "ReleaseEngine",
    Awaited.RESUME: "ResumeEngine",
}
Worded = ev.StartEngine | ev.SyncWeights | ev.SwitchRole | ev.ReleaseEngine | ev.ResumeEngine | ev.AbortRequests
AWAY_S = (6.0, 60.0)
"""Until a slot that left is offered again."""
LEAST_AWAY_S = 2.0
"""By then the word of its loss has been heard."""
SHORT_LIVES = 2
"""Lives of a slot that may be announced as too short to be of use."""


@dataclass(slots=True)
class Request:
    sent: ev.Generate
    prefilled: bool
    """There is no prefill half, or it has handed the KV on."""
    answered: bool = False


@dataclass(slots=True)
class Engine:
    worker: str
    incarnation: int
    role: Role
    alive: bool = True
    resident: bool = True
    """It holds device memory."""
    version: int | None = None
    loading: int = -1
    loaded: int = -1
    """The version that it fetched last; its host has it."""
    stopping: bool = False
    aborting: bool = False
    busy: str = ""
    """The instruction that it is carrying out, an abort excepted."""
    requests: dict[TrajectoryId, Request] = field(default_factory=dict)
    prefills: dict[TrajectoryId, Request] = field(default_factory=dict)

    @property
    def idle(self) -> bool:
        return not self.requests and not self.prefills


@dataclass(slots=True)
class Slot:
    info: SlotInfo
    life: int = 1
    present: bool = True
    leaves_s: float | None = None
    """When a notice that was given runs out."""


class Engines:
    def __init__(self, world: World) -> None:
        self.world, self.chance = world, world.chance
        self.slots: dict[str, Slot] = {}
        self.engines: dict[str, Engine] = {}
        """The newest life of each slot's engine."""
        self.trainer_holds: set[str] = set()
        """Overlap slots with training state on their GPUs."""
        self._extra = 0

    # --- slots ------------------------------------------------------------------------------------

    def begin(self) -> tuple[tuple[str, ...], tuple[SlotInfo, ...]]:
        """Fixed slots are there; preemptible ones come. Also for a driver that starts anew: its processes all ended."""
        case = self.world.case
        self.engines = {}
        fixed = [slot(f"rollout-{i}", Zone.RESERVED) for i in range(case.reserved)]
        fixed += [slot(f"overlap-{i}", Zone.OVERLAP) for i in range(case.overlap)]
        self.slots = {info.name: Slot(info) for info in fixed}
        self.trainer_holds = {info.name for info in fixed if info.zone is Zone.OVERLAP}
        for i in range(case.preemptible):
            self.offer(slot(f"spot-{i}", Zone.PREEMPTIBLE), 1)
        return tuple(self.slots), tuple(fixed)

    def offer(self, info: SlotInfo, life: int) -> None:
        """The slot comes (again), some time."""
        delay_s = LEAST_AWAY_S + self.chance.delay_s(*AWAY_S, "joins", info.name, life, self.world.driver)
        self.world.after(delay_s, self._join, info, life)

    def offer_another(self) -> None:
        """A preemptible slot that was never there before."""
        self._extra += 1
        self.offer(slot(f"extra-{self._extra}", Zone.PREEMPTIBLE), 1)

    def _join(self, info: SlotInfo, life: int) -> None:
        slot = self.slots.get(info.name)
        if slot is not None and (slot.present or slot.life >= life):
            return
        self.slots[info.name] = Slot(info, life)
        short = life <= SHORT_LIVES and self.chance.uniform("short", info.name, life) < 0.2
        self.world.post(ev.SlotJoined(info, life, 1.0 if short else None))

    def notice(self, name: str, seconds: float) -> None:
        slot = self.slots[name]
        if slot.leaves_s is not None:
            return
        slot.leaves_s = self.world.now + seconds
        self.world.post(ev.SlotNotice(name, slot.life, seconds))
        self.world.after(seconds, self.take_away, name, slot.life, "its notice ran out")

    def take_away(self, name: str, life: int, reason: str) -> None:
        """The slot is gone with everything on it; the words about it come in any order."""
        slot = self.slots[name]
        if not slot.present or slot.life != life:
            return
        slot.present = False
        engine = self.engines.get(name)
        lost = ev.SlotLost(name, life, reason)
        first = self.chance.uniform("slot first", name, life) < 0.5
        if first:
            self.world.post(lost)
        if engine is not None:
            self.world.rules.taken_away(slot, engine, self.world.now)
            self.die(engine, reason, with_tokens=False)
        if not first:
            self.world.post(lost)
        self.offer(slot.info, life + 1)

    def release_slot(self, i: ev.ReleaseSlot) -> None:
        slot = self.slots[i.worker]
        engine = self.engines.get(i.worker)
        assert engine is None or not engine.alive, f"{i.worker} is given back with an engine on it"
        if slot.present and slot.life == i.life:
            slot.present = False
            if self.chance.uniform("told of release", i.worker, i.life) < 0.5:
                self.world.post(ev.SlotLost(i.worker, i.life, "given back"))
            self.offer(slot.info, i.life + 1)

    def present(self, *zones: Zone) -> list[str]:
        return [name for name, slot in self.slots.items() if slot.present and slot.info.zone in zones]

    def running(self) -> list[str]:
        return [name for name, engine in self.engines.items() if engine.alive]

    # --- lives ------------------------------------------------------------------------------------

    def alive(self, worker: str, incarnation: int) -> Engine | None:
        engine = self.engines.get(worker)
        return engine if engine is not None and engine.alive and engine.incarnation == incarnation else None

    def start(self, i: ev.StartEngine) -> None:
        before = self.engines.get(i.worker)
        assert before is None or not before.alive, f"{i.worker} is started twice"
        assert i.worker not in self.trainer_holds, f"{i.worker} starts beside the trainer"
        if not self.slots[i.worker].present:  # the word of its loss is on its way
            self.world.post(ev.WorkerLost(i.worker, i.incarnation, "the slot is gone"))
            return
        engine = self.engines[i.worker] = Engine(i.worker, i.incarnation, i.role)
        self._carry(engine, i, ev.EngineLoaded(i.worker, i.incarnation))

    def sync(self, i: ev.SyncWeights) -> None:
        engine = self._asked(i)
        if engine is None:
            return
        for peer in i.peers:
            assert peer != i.worker, f"{i.worker} is to fetch weights from itself"
            holder = self.engines[peer]
            assert not holder.alive or holder.loaded == i.version, f"{peer} is named as a holder of v{i.version}"
        engine.version, engine.loading = None, i.version
        self._carry(engine, i, ev.WeightsSynced(i.worker, i.incarnation, i.version))

    def switch(self, i: ev.SwitchRole) -> None:
        if engine := self._asked(i):
            self._carry(engine, i, ev.RoleSwitched(i.worker, i.incarnation, i.role))

    def release(self, i: ev.ReleaseEngine) -> None:
        if engine := self._asked(i):
            engine.version = None
            self._carry(engine, i, ev.EngineReleased(i.worker, i.incarnation))

    def resume(self, i: ev.ResumeEngine) -> None:
        engine = self.alive(i.worker, i.incarnation)
        if engine is None:
            return
        assert not engine.resident and not engine.busy, f"{i.worker} is woken and does not sleep"
        assert i.worker not in self.trainer_holds, f"{i.worker} wakes beside the trainer"
        engine.resident = True
        self._carry(engine, i, ev.EngineResumed(i.worker, i.incarnation))

    def stop(self, i: ev.StopEngine) -> None:
        if engine := self.alive(i.worker, i.incarnation):
            engine.stopping = True
            delay_s = self.world.takes_s(i, i.worker, i.incarnation)
            self.world.after(delay_s, self.die, engine, i.reason)

    def _asked(self, i: Worded) -> Engine | None:
        """The engine, if it lives: an instruction to a dead one needs no answer, its loss is told already."""
        engine = self.alive(i.worker, i.incarnation)
        if engine is not None:
            what = type(i).__name__
            assert engine.idle, f"{i.worker} gets {what} with requests in flight"
            assert not engine.busy, f"{i.worker} gets {what} while it is at {engine.busy}"
            assert engine.resident, f"{i.worker} gets {what} and has no memory"
        return engine

    def _carry(self, engine: Engine, i: Worded, answer: Any) -> None:
        name = type(i).__name__
        engine.busy = name
        fate, _ = self.world.fate(i)
        if fate is Kind.REFUSED:
            self.world.after(self.world.takes_s(i, i.worker, i.incarnation), self.die, engine, f"{name} failed")
        elif fate is Kind.ANSWER_LOST:
            self.world.after(TYPICAL_AND_DEADLINE_S[name][1], self.die, engine, f"{name}: no answer in time")
        else:
            self.world.after(self.world.takes_s(i, i.worker, i.incarnation), self._did, engine, answer)

    def _did(self, engine: Engine, answer: Any) -> None:
        if engine.alive:
            engine.busy = ""
            match answer:
                case ev.WeightsSynced():
                    engine.version = engine.loaded = answer.version
                case ev.RoleSwitched():
                    engine.role = answer.role
                case ev.EngineReleased():
                    engine.resident = False
        elif self.chance.uniform("late word", answer.worker, answer.incarnation, type(answer).__name__) > 0.3:
            return  # else it was on its way when the engine died
        self.world.post(answer)

    def die(self, engine: Engine, reason: str, *, with_tokens: bool = True) -> None:
        """The engine ends: it and its requests are told of, in any order."""
        if not engine.alive:
            return
        engine.alive = engine.resident = False
        lost = ev.WorkerLost(engine.worker, engine.incarnation, reason)
        first = self.chance.uniform("loss first", engine.worker, engine.incarnation) < 0.6
        if first:
            self.world.post(lost)
        for request in list(engine.requests.values()):
            self._end(request, FinishReason.LOST, with_tokens=with_tokens)
        for request in list(engine.prefills.values()):
            self._end(request, FinishReason.LOST, with_tokens=False)
        if not first:
            self.world.post(lost)

    def retire(self, i: ev.RetireSnapshots) -> None:
        """The snapshots are removed."""
        for engine in self.engines.values():
            reads = engine.alive and engine.busy == "SyncWeights" and engine.loading <= i.version
            assert not reads, f"{engine.worker} reads v{engine.loading}, which is retired"

    # --- requests ---------------------------------------------------------------------------------

    def generate(self, i: ev.Generate) -> None:
        request = Request(i, prefilled=not i.prefill_worker)
        engine = self._serving(i.worker, i.incarnation, i.version, Role.DECODE if i.prefill_worker else Role.COLOCATED)
        prefill = None
        if i.prefill_worker:
            prefill = self._serving(i.prefill_worker, i.prefill_incarnation, i.version, Role.PREFILL)
        if engine is None or (i.prefill_worker and prefill is None):
            self._end(request, FinishReason.LOST, with_tokens=False)
            return
        engine.requests[i.trajectory] = request
        assert len(engine.requests) <= self.world.case.pipeline.requests_per_worker, f"{i.worker} is overloaded"
        fate, fault = self.world.fate(i)
        delay_s = self.world.takes_s(i, i.trajectory, self.world.turn_of(i.trajectory))
        if prefill is not None:
            prefill.prefills[i.trajectory] = request
            share = self.chance.uniform("prefill", i.trajectory, i.max_new_tokens)
            self.world.after(delay_s * share, self._handed_on, request)
            if fault is not None and fate is Kind.PREFILL_DIES:
                self.world.after(fault.wait_s, self.die, prefill, "died in a transfer")
        if fate is Kind.ANSWER_LOST:
            limit_s = TYPICAL_AND_DEADLINE_S["Generate"][1]
            self.world.after(limit_s, self._overdue, engine, request)
        elif fate is Kind.REFUSED and fault is not None:
            finish = FinishReason.FAILED if fault.pick < 0.5 else FinishReason.STOP
            self.world.after(delay_s, self._end, request, finish, with_tokens=False)  # or it says nothing at all
        else:
            self.world.after(delay_s, self._complete, request)

    def _serving(self, worker: str, incarnation: int, version: int, role: Role) -> Engine | None:
        engine = self.alive(worker, incarnation)
        if engine is not None:
            assert not engine.busy, f"{worker} is asked to serve while it is at {engine.busy}"
            assert engine.resident, f"{worker} is asked to serve and has no memory"
            assert engine.version == version, f"{worker} serves v{engine.version} as v{version}"
            assert engine.role is role, f"{worker} is asked to be {role} and is {engine.role}"
        return engine

    def _handed_on(self, request: Request) -> None:
        sent = request.sent
        if request.answered or request.prefilled:
            return
        request.prefilled = True
        if engine := self.alive(sent.prefill_worker, sent.prefill_incarnation):
            engine.prefills.pop(sent.trajectory, None)
            if self.chance.uniform("says prefilled", sent.trajectory, sent.max_new_tokens) < 0.7:
                self.world.post(ev.PrefillDone(sent.trajectory, sent.prefill_worker, sent.prefill_incarnation))

    def _complete(self, request: Request) -> None:
        self._handed_on(request)
        self._end(request, FinishReason.STOP)

    def _overdue(self, engine: Engine, request: Request) -> None:
        if not request.answered:
            self.die(engine, "a request got no answer in time", with_tokens=False)

    def _end(self, request: Request, finish: FinishReason, *, with_tokens: bool = True) -> None:
        """The one answer to a request."""
        if request.answered:
            return
        request.answered = True
        sent = request.sent
        if (engine := self.engines.get(sent.worker)) and engine.requests.get(sent.trajectory) is request:
            del engine.requests[sent.trajectory]
        if (prefill := self.engines.get(sent.prefill_worker)) and prefill.prefills.get(sent.trajectory) is request:
            del prefill.prefills[sent.trajectory]
        interrupted = finish in (FinishReason.ABORT, FinishReason.LOST)
        tokens, turn = 0, self.world.turn_of(sent.trajectory)
        if with_tokens and request.prefilled and finish is not FinishReason.FAILED:
            least = 0 if interrupted else 1
            tokens = self.chance.integer(least, sent.max_new_tokens, "tokens", sent.trajectory, turn)
        if finish is FinishReason.STOP and tokens == sent.max_new_tokens:
            finish = FinishReason.LENGTH
        telemetry = TurnTelemetry(10, 0, prefill_s=0.01, decode_s=0.1, decode_batch=2.0, decode_kv_tokens=40.0)
        reason = f"{sent.worker} or {sent.prefill_worker} is gone" if finish is FinishReason.LOST else ""
        answer = ev.TurnGenerated(
            sent.trajectory,
            sent.worker,
            sent.incarnation,
            tokens,
            sent.version,
            finish,
            reason,
            telemetry if tokens else None,
        )
        self.world.post(answer, sent)

    def abort(self, i: ev.AbortRequests) -> None:
        engine = self.alive(i.worker, i.incarnation)
        if engine is None:
            return
        worker = self.world.pipeline.fleet.workers[i.worker]
        stays = worker.goal is Goal.SERVING and worker.role is worker.goal_role
        assert self.world.case.pipeline.abort_on_update or not stays, f"{i.worker} is to drain, and is interrupted"
        engine.aborting = True
        fate, _ = self.world.fate(i)
        if fate in (Kind.ANSWER_LOST, Kind.REFUSED):
            limit_s = TYPICAL_AND_DEADLINE_S["AbortRequests"][1] * (fate is Kind.ANSWER_LOST)
            self.world.after(limit_s, self.die, engine, "abort: no answer in time")
        else:
            self.world.after(self.world.takes_s(i, i.worker, i.incarnation), self._aborted, engine)

    def _aborted(self, engine: Engine) -> None:
        """What it answers comes back before it says so; a decode half may hear of it a little later."""
        if not engine.alive:
            return
        for request in list(engine.requests.values()):
            self._end(request, FinishReason.ABORT)
        for request in list(engine.prefills.values()):
            late_s = self.chance.delay_s(0.3, 2.0, "half aborted", request.sent.trajectory)
            self.world.after(late_s, self._half_aborted, request)
        engine.aborting = False
        self.world.post(ev.AbortAcknowledged(engine.worker, engine.incarnation))

    def _half_aborted(self, request: Request) -> None:
        self._end(request, FinishReason.ABORT, with_tokens=False)

    def check_awaited(self, worker: WorkerSlot) -> None:
        """What the machine waits for has been asked for: holds while no word is on its way to the driver."""
        engine = self.alive(worker.name, worker.incarnation)
        if worker.awaits is not None:
            assert engine is not None, f"{worker.name} is dead, and its {worker.awaits} is awaited"
            asked = engine.stopping if worker.awaits is Awaited.STOP else engine.busy == INSTRUCTION[worker.awaits]
            assert asked, f"{worker.name}: {worker.awaits} is awaited and was not asked for"
        assert worker.running or engine is None, f"{worker.name} is thought to be gone, and its engine runs"
        assert not (worker.running and worker.aborting) or (engine is not None and engine.aborting), (
            f"{worker.name}: nobody aborts"
        )
        here = engine.requests.keys() if engine is not None else set()
        assert worker.in_flight.keys() == here, f"{worker.name} has other requests than the machine knows of"

    # --- the trainer's GPUs -----------------------------------------------------------------------

    def holds(self, name: str) -> bool:
        """An engine has memory on the slot's GPUs."""
        engine = self.engines.get(name)
        return engine is not None and engine.alive and engine.resident

    def trainer_takes(self, names: tuple[str, ...]) -> None:
        for name in names:
            assert not self.holds(name), f"the trainer comes back beside the engine of {name}"
            self.trainer_holds.add(name)


def slot(name: str, zone: Zone = Zone.PREEMPTIBLE) -> SlotInfo:
    return SlotInfo(name, zone, (f"{name}/0",), name)
