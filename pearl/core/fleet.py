"""The lives of rollout workers: start, load, verify, serve, drain, change role, sleep, leave, start again.

A part of both schedulers. They say what each worker is to become (its goal and its weights' version); `settle` takes
every worker as far as it can go by legal steps, one awaited instruction at a time. So a goal may change at any time,
and counts from the next answer on. Before anything is done to a serving worker, dispatch stops and its requests are
interrupted, and that is acknowledged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pearl.core import events as ev
from pearl.core.events import Instruction
from pearl.core.gpus import Owner, TrainingGpus
from pearl.core.layout import Role, SlotInfo, Zone
from pearl.core.routing import Choice, Router
from pearl.core.state import Activity, Awaited, Goal, WorkerSlot, WorkerTable
from pearl.core.trajectory import TrajectoryId

Emit = Callable[[Instruction], None]

PEERS = 3
"""Holders of the weights that a SyncWeights names."""


@dataclass(slots=True)
class AdmissionGroup:
    """Workers that begin to serve together: the last one that holds the newest weights admits all."""

    number: int
    members: dict[str, None]
    """In a fixed order, so that a run can be repeated."""
    open: bool = False
    """Roles are decided, so weights are fetched. Before that its members wait with their engines loaded."""
    loaded: set[str] = field(default_factory=set)
    synced: set[str] = field(default_factory=set)


class Fleet:
    """Rollout workers. `emit` takes each instruction; a returned string is the reason why the run cannot go on."""

    def __init__(self, emit: Emit, router: Router, *, abort_on_update: bool, restarts: int) -> None:
        self.emit = emit
        self.router = router
        self.abort_on_update = abort_on_update
        self.restarts = restarts
        self.workers = WorkerTable()
        self.gpus = TrainingGpus()
        self.groups: dict[int, AdmissionGroup] = {}
        self.version = -1
        """Newest published weights; -1 before the trainer is ready."""
        self.may_grow = False
        """Slots may come, so a run without workers waits for them."""
        self.prepared: list[int] = []
        """Groups whose members are all loaded, for the Elastic Scheduler to open."""
        self.admitted: list[tuple[int, tuple[str, ...]]] = []
        """Groups that serve now, for the Elastic Scheduler to take note of."""
        self.gone: list[tuple[WorkerSlot, str]] = []
        """Workers whose process is gone and why, for the Elastic Scheduler to take note of."""
        self._unsettled: dict[str, None] = {}
        self._pairs: dict[TrajectoryId, tuple[str, int, str, int]] = {}
        """Prefill worker and decode worker, with incarnations, of a request whose prefill half is not released."""
        self._holders: list[WorkerSlot] = []
        """Workers that loaded the newest weights; they may have changed since."""
        self.loads: Counter[int] = Counter()
        """Outstanding SyncWeights by version."""
        self._retired = -1

    # --- what is wanted ---------------------------------------------------------------------------

    def start_all(self, names: tuple[str, ...], slots: Iterable[SlotInfo] = ()) -> None:
        """Those of the overlap zone sleep until their GPUs are lent."""
        self.workers = WorkerTable.of(names, slots)
        for worker in self.workers.values():
            if worker.overlap:
                self.gpus.add(worker.name)
                worker.goal = Goal.ASLEEP
            self.touch(worker)

    def joined(self, info: SlotInfo, life: int) -> WorkerSlot | None:
        """A slot is there, in a new life; None if that was known. It stays away until somebody wants it."""
        worker = self.workers.get(info.name)
        if worker is None:
            worker = self.workers[info.name] = WorkerSlot(info.name, info, 0)
        if life <= worker.life:
            return None
        worker.info, worker.life, worker.present, worker.restarts = info, life, True, 0
        worker.goal = Goal.AWAY
        return worker

    def aim(self, worker: WorkerSlot, goal: Goal, why: str = "") -> None:
        worker.goal, worker.why = goal, why
        self.touch(worker)

    def assign(self, worker: WorkerSlot, role: Role) -> None:
        worker.goal_role = role
        self.touch(worker)

    def touch(self, worker: WorkerSlot) -> None:
        self._unsettled[worker.name] = None

    def group(self, number: int, names: Iterable[str], *, open: bool = False) -> None:
        """These workers are to begin to serve together."""
        group = self.groups[number] = AdmissionGroup(number, dict.fromkeys(names), open)
        for name in group.members:
            worker = self.workers[name]
            self.ungroup(worker)
            worker.admission = number
            self.touch(worker)

    def extend(self, number: int, worker: WorkerSlot) -> None:
        """One more for a group that is not open yet."""
        self.ungroup(worker)
        self.groups[number].members[worker.name] = None
        worker.admission = number
        self.touch(worker)

    def open(self, number: int) -> None:
        self.groups[number].open = True
        for name in self.groups[number].members:
            self.touch(self.workers[name])

    def ungroup(self, worker: WorkerSlot) -> None:
        """The worker waits for nobody any more, and nobody for it."""
        group = self.groups.get(worker.admission) if worker.admission is not None else None
        worker.admission = None
        if group is None:
            return
        group.members.pop(worker.name, None)
        group.loaded.discard(worker.name)
        group.synced.discard(worker.name)
        if group.members:
            self.touch(self.workers[next(iter(group.members))])
            self._group_ready(group)
        else:
            self.groups.pop(group.number, None)

    def published(self, version: int) -> None:
        """New weights: serving workers drain and load them, waiting ones load them at once."""
        assert version > self.version, "weight versions only grow"
        self.version = version
        self._holders = []
        for worker in self.workers.values():
            self.touch(worker)

    def stop(self, worker: WorkerSlot, reason: str) -> None:
        """End its engine by force, whatever is outstanding; its goal says what comes then."""
        if worker.running and worker.awaits is not Awaited.STOP:
            worker.awaits = Awaited.STOP
            self.emit(ev.StopEngine(worker.name, worker.incarnation, reason))

    # --- what happened ----------------------------------------------------------------------------

    def _answered(self, name: str, incarnation: int, awaited: Awaited) -> WorkerSlot | None:
        """The worker, if this is the answer that it waits for."""
        worker = self.workers.current(name, incarnation)
        if worker is None or worker.awaits is not awaited:
            return None
        worker.awaits = None
        self.touch(worker)
        return worker

    def loaded(self, event: ev.EngineLoaded, now: float) -> None:
        if worker := self._answered(event.worker, event.incarnation, Awaited.START):
            worker.to(Activity.LOADED, now)

    def synced(self, event: ev.WeightsSynced, now: float) -> None:
        worker = self.workers.current(event.worker, event.incarnation)
        if worker is None or worker.syncing != event.version:
            return
        if not self._answered(event.worker, event.incarnation, Awaited.SYNC):
            return
        self._load_ended(worker)
        worker.synced(event.version, now)
        if event.version == self.version:
            self._holders.append(worker)

    def switched(self, event: ev.RoleSwitched, now: float) -> None:
        """A word about the role that it has already is a repeated one, not the answer to the next switch."""
        known = self.workers.current(event.worker, event.incarnation)
        if known is None or known.role is event.role:
            return
        if worker := self._answered(event.worker, event.incarnation, Awaited.SWITCH):
            worker.role = event.role
            worker.flushed()
            worker.story.append((now, worker.activity, f"is {event.role}"))

    def released(self, event: ev.EngineReleased, now: float) -> None:
        if worker := self._answered(event.worker, event.incarnation, Awaited.RELEASE):
            worker.forget()
            worker.to(Activity.INACTIVE, now, worker.why)
            if worker.overlap:
                self.gpus.worker_left(worker.name)

    def asleep(self, event: ev.EngineAsleep, now: float) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or not worker.overlap or worker.goal is not Goal.ASLEEP or worker.running:
            return
        if event.incarnation == worker.incarnation + 1:
            worker.why = "started before the trainer"
            worker.start(now)
            worker.to(Activity.LOADED, now)
            worker.to(Activity.INACTIVE, now)

    def resumed(self, event: ev.EngineResumed, now: float) -> None:
        if worker := self._answered(event.worker, event.incarnation, Awaited.RESUME):
            worker.to(Activity.LOADED, now, "resumed")

    def abort_acknowledged(self, event: ev.AbortAcknowledged) -> None:
        if worker := self.workers.current(event.worker, event.incarnation):
            worker.aborting = False
            self.touch(worker)

    def sent(self, trajectory: TrajectoryId, tokens: int, choice: Choice) -> None:
        """A request on a context of `tokens` goes out."""
        worker, prefill = choice
        worker.in_flight[trajectory] = tokens
        worker.kv_tokens += tokens
        self.router.changed(worker)
        if prefill is not None:
            prefill.prefilling[trajectory] = tokens
            self._pairs[trajectory] = (prefill.name, prefill.incarnation, worker.name, worker.incarnation)
            self.router.changed(prefill)

    def prefilled(self, trajectory: TrajectoryId, name: str, incarnation: int) -> None:
        if (pair := self._pairs.get(trajectory)) and pair[:2] == (name, incarnation):
            del self._pairs[trajectory]
            if worker := self.workers.current(name, incarnation):
                worker.prefilling.pop(trajectory, None)
                self._returned(worker)

    def returned(self, event: ev.TurnGenerated) -> None:
        """A request is back; the last one of a draining worker lets it go on."""
        if (pair := self._pairs.get(event.trajectory)) and pair[2:] == (event.worker, event.incarnation):
            self.prefilled(event.trajectory, *pair[:2])
        if worker := self.workers.current(event.worker, event.incarnation):
            worker.kv_tokens -= worker.in_flight.pop(event.trajectory, 0)
            self._returned(worker)

    def _returned(self, worker: WorkerSlot) -> None:
        self.router.changed(worker)
        if worker.activity is Activity.DRAINING:
            self.touch(worker)

    def lost(self, event: ev.WorkerLost, now: float) -> str | None:
        worker = self.workers.current(event.worker, event.incarnation)
        if worker is None or not worker.running:
            return None
        wanted = worker.goal is Goal.SERVING and worker.awaits is not Awaited.STOP
        self._gone(worker, event.reason, now)
        if not wanted:
            return None
        worker.restarts += 1
        if worker.restarts > self.restarts:
            self.aim(worker, Goal.AWAY, f"its engine was lost {worker.restarts} times; the last time: {event.reason}")
        elif worker.overlap:
            self.aim(worker, Goal.ASLEEP, "its engine was lost")  # until its GPUs are lent again
        else:
            worker.why = event.reason
        return self.hopeless(worker, event.reason)

    def slot_lost(self, worker: WorkerSlot, reason: str, now: float) -> None:
        """The slot itself is gone, in its present life."""
        worker.present = False
        self.aim(worker, Goal.AWAY, reason)
        if worker.running:
            self._gone(worker, reason, now)
        self.ungroup(worker)

    def blames(self, name: str) -> bool:
        """Whether an engine that died may have died of what it was doing, and not of us or of the cloud."""
        worker = self.workers[name]
        return worker.info.zone is not Zone.PREEMPTIBLE and worker.goal is Goal.SERVING

    def hopeless(self, worker: WorkerSlot, reason: str) -> str | None:
        """The reason why the run cannot go on without this worker, if so."""
        if worker.goal is not Goal.AWAY or self.may_grow:
            return None
        if any(w.present and w.goal is not Goal.AWAY for w in self.workers.values() if not w.overlap):
            return None
        return f"no rollout worker is left; the last one, {worker.name}: {reason}"

    def _gone(self, worker: WorkerSlot, reason: str, now: float) -> None:
        self.router.leave(worker)
        self._load_ended(worker)
        worker.awaits = None
        worker.to(Activity.GONE, now, reason)
        self.gone.append((worker, reason))
        if worker.overlap:
            self.gpus.worker_left(worker.name)
        self.touch(worker)
        if group := self.groups.get(worker.admission) if worker.admission is not None else None:
            group.loaded.discard(worker.name)
            group.synced.discard(worker.name)

    def _load_ended(self, worker: WorkerSlot) -> None:
        """It holds the weights, or is gone. Once nobody can be reading an older snapshot, those go."""
        if worker.syncing is None:
            return
        self.loads[worker.syncing] -= 1
        if not self.loads[worker.syncing]:
            del self.loads[worker.syncing]
        worker.syncing = None
        if self.version - 1 > self._retired and not any(v < self.version for v in self.loads):
            self._retired = self.version - 1
            self.emit(ev.RetireSnapshots(self._retired))

    # --- one step closer --------------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """No serving worker is between two versions; of those that wait to be admitted nothing is expected."""
        between = (Activity.DRAINING, Activity.LOADED)
        return not any(w.activity in between and w.admission is None for w in self.workers.values())

    def settle(self, now: float) -> None:
        while self._unsettled:
            name = next(iter(self._unsettled))
            del self._unsettled[name]
            self._advance(self.workers[name], now)

    def _advance(self, w: WorkerSlot, now: float) -> None:
        if w.awaits is Awaited.STOP:
            return
        if not w.running:
            if w.goal is Goal.SERVING and w.present and self._takes_gpus(w):
                w.start(now)
                w.awaits = Awaited.START
                self.emit(ev.StartEngine(w.name, w.incarnation, w.role))
            return
        if w.awaits is not None:
            if w.goal is Goal.AWAY:  # the slot may be gone before the answer
                self.stop(w, w.why)
            return
        if w.activity is Activity.ACTIVE and not self._drains(w, now):
            return
        if w.activity is Activity.DRAINING:
            busy = bool(w.in_flight or w.prefilling)
            if busy and not w.aborted and (self.abort_on_update or not self._only_stale(w)):
                self._abort(w)
            if not w.idle:
                return
            if w.goal is Goal.SERVING:
                w.to(Activity.LOADED, now)
        if w.goal is Goal.AWAY:
            self.stop(w, w.why)
        elif w.goal is Goal.ASLEEP:
            self._sleep(w)
        elif w.activity is Activity.INACTIVE:
            if self._takes_gpus(w):
                w.awaits = Awaited.RESUME
                self.emit(ev.ResumeEngine(w.name, w.incarnation))
        else:
            self._towards_service(w, now)

    def _towards_service(self, w: WorkerSlot, now: float) -> None:
        """From LOADED or SYNCED."""
        group = self.groups.get(w.admission) if w.admission is not None else None
        if group is not None and not group.open:
            group.loaded.add(w.name)
            self._group_ready(group)
            return
        stale = w.version != self.version
        if w.activity is Activity.SYNCED and (stale or w.role is not w.goal_role):
            w.to(Activity.LOADED, now, f"for v{self.version}" if stale else f"to be {w.goal_role}")
            if group is not None:
                group.synced.discard(w.name)
        if w.role is not w.goal_role:
            w.awaits = Awaited.SWITCH
            self.emit(ev.SwitchRole(w.name, w.incarnation, w.goal_role))
        elif stale:
            self._sync(w)
        else:
            if w.activity is Activity.LOADED:  # the role changed, the verified weights did not
                w.to(Activity.SYNCED, now, f"v{w.version}")
            if group is None:
                self._serve(w, now)
            else:
                group.synced.add(w.name)
                self._group_ready(group)
                if group.open and len(group.synced) == len(group.members):
                    self._admit(group, now)

    def _group_ready(self, group: AdmissionGroup) -> None:
        if not group.open and len(group.loaded) == len(group.members) and group.number not in self.prepared:
            self.prepared.append(group.number)

    def _admit(self, group: AdmissionGroup, now: float) -> None:
        """All at once: the router sees none or every one of them."""
        del self.groups[group.number]
        names = tuple(sorted(group.members))
        for name in names:
            self.workers[name].admission = None
            self._serve(self.workers[name], now)
        self.admitted.append((group.number, names))

    def _serve(self, w: WorkerSlot, now: float) -> None:
        w.aborted = False
        w.to(Activity.ACTIVE, now)
        self.router.join(w)

    def _only_stale(self, w: WorkerSlot) -> bool:
        """All that is wrong with it are its weights."""
        return w.goal is Goal.SERVING and w.role is w.goal_role

    def _drains(self, w: WorkerSlot, now: float) -> bool:
        if self._only_stale(w) and w.version == self.version:
            return False
        self.router.leave(w)
        w.to(Activity.DRAINING, now, f"for v{self.version}" if self._only_stale(w) else w.why or f"to be {w.goal_role}")
        return True

    def _abort(self, w: WorkerSlot) -> None:
        w.aborting = w.aborted = True
        self.emit(ev.AbortRequests(w.name, w.incarnation))

    def _sync(self, w: WorkerSlot) -> None:
        if self.version < 0:
            return
        w.awaits, w.syncing = Awaited.SYNC, self.version
        self.loads[self.version] += 1
        self.emit(ev.SyncWeights(w.name, w.incarnation, self.version, self._peers(w)))

    def _peers(self, worker: WorkerSlot) -> tuple[str, ...]:
        """A few holders of the newest weights, other ones for each that asks, so that the load is spread."""
        holders, first = self._holders, self.loads[self.version]
        some = (holders[(first + i) % len(holders)] for i in range(min(2 * PEERS, len(holders))))
        return tuple(w.name for w in some if w.version == self.version and w is not worker)[:PEERS]

    def _sleep(self, w: WorkerSlot) -> None:
        if w.activity is not Activity.INACTIVE:
            w.awaits = Awaited.RELEASE
            self.emit(ev.ReleaseEngine(w.name, w.incarnation))

    def _takes_gpus(self, w: WorkerSlot) -> bool:
        """Whether the worker may use its GPUs; those of the overlap zone only once nobody owns them."""
        if not w.overlap:
            return True
        if self.gpus.owner[w.name] is not Owner.NOBODY:
            return False
        self.gpus.worker_takes(w.name)
        return True
