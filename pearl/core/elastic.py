"""The Elastic Scheduler: the cold path of a run, as a machine without I/O.

For every elastic event: ① update the budget ② decide the layout ③ plan the least change ④ execute, through the
Rebuilder and the Toggle Manager. Events are taken one by one, operations overlap. Everything that is executed is a goal
of a worker, so a later event supersedes what has not begun, and what has begun ends at its next answer.

The *members* are the workers that the layout counts: those that serve, or will again without being admitted anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Layout, Role
from pearl.core.pipeline import Pipeline
from pearl.core.plan import Plan, minimal_change
from pearl.core.rebuilder import Rebuilder
from pearl.core.roles import DecisionEngine, RolePolicy
from pearl.core.scaling import Scaling
from pearl.core.settings import Borrowing, ElasticSettings, Roles
from pearl.core.state import Goal, WorkerSlot
from pearl.core.toggle import Toggle
from pearl.core.workload import Profile


class Tracker(Protocol):
    """See `pearl.core.profile.RuntimeTracker`."""

    def observe(self, entry: Event | Instruction, now: float) -> None: ...

    def profile(self) -> Profile: ...


class Elastic:
    """The machine. It shares the table of workers with `pipeline`, and its list of instructions."""

    def __init__(
        self,
        pipeline: Pipeline,
        settings: ElasticSettings,
        engine: DecisionEngine | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        predicts = settings.roles is Roles.DYNAMIC or settings.intra_scale is Borrowing.GATED or settings.autoscale
        if predicts and (engine is None or tracker is None):
            raise ValueError(
                "dynamic roles, gated borrowing and autoscaling need a Decision Engine and a Runtime Tracker"
            )
        self.pipeline, self.settings, self.tracker = pipeline, settings, tracker
        self.fleet = pipeline.fleet
        self.fleet.may_grow = settings.inter_scale
        batch = pipeline.settings.groups_per_batch * pipeline.settings.group_size
        self.policy = RolePolicy(settings.roles, settings.fixed_ratio, engine, batch, settings.overlap)
        self.members: dict[str, None] = {}
        self.rebuilder = Rebuilder(self)
        self.toggle = Toggle(self)
        self.scaling = Scaling(self, settings.autoscale) if settings.autoscale is not None else None
        self._targets: dict[int, Layout] = {}
        """Layouts that were decided for groups which are not admitted yet."""
        self._switches: dict[int, float] = {}
        """When changes of roles began, by group."""
        self._numbers = 0
        rebuilder, toggle = self.rebuilder, self.toggle
        self._handlers: dict[type[Event], Callable[[Any, float], None]] = {
            ev.RunStarted: self._run_started,
            ev.SlotJoined: rebuilder.joined,
            ev.SlotNotice: self._slot_notice,
            ev.SlotLost: self._slot_lost,
            ev.TimerFired: self._timer_fired,
            ev.TrainerReady: lambda event, now: self._trainer_free(),
            ev.SnapshotPublished: self._step_ended,
            ev.CheckpointWritten: lambda event, now: self._trainer_free(),
            ev.TrainerLost: lambda event, now: toggle.trainer_lost(now),
            ev.TrainerOffloaded: lambda event, now: toggle.offloaded(event),
            ev.TrainerReloaded: lambda event, now: toggle.reloaded(event),
        }

    def absorb(self, event: Event, now: float) -> None:
        """What happened, and new goals; behind the Pipeline's `absorb`."""
        if self.scaling is not None:
            self.scaling.observe(event, now)
        if handler := self._handlers.get(type(event)):
            handler(event, now)

    def follow(self, now: float) -> None:
        """Workers towards their goals, and whatever follows from where they get, until nothing follows."""
        if self.scaling is not None and (self.pipeline.step.batch or self.pipeline.step.wants_gpus):
            self.scaling.training_began(now)
        while True:
            self.fleet.settle(now)
            if not self._take_notes(now) and not self.toggle.follow(now):
                return

    def profile(self) -> Profile | None:
        return self.tracker.profile() if self.tracker is not None else None

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def record(
        self, kind: str, number: int, phase: str, workers: Iterable[str], reason: str, now: float, began_s: float
    ) -> None:
        self.fleet.emit(ev.RecordOperation(kind, number, phase, tuple(workers), reason, now - began_s))

    # --- ① events ---------------------------------------------------------------------------------

    def _run_started(self, event: ev.RunStarted, now: float) -> None:
        names = [w.name for w in self.fleet.workers.values() if not w.overlap]
        plan = self._decide(names, "start", now)
        self.members = dict.fromkeys(names)
        for name, role in plan.roles.items() if plan else ():
            self.fleet.assign(self.fleet.workers[name], role)
        if self.scaling is not None:
            self.scaling.ask(now)

    def _present(self, name: str, life: int) -> WorkerSlot | None:
        worker = self.fleet.workers.get(name)
        return worker if worker is not None and worker.present and worker.life == life else None

    def _slot_notice(self, event: ev.SlotNotice, now: float) -> None:
        worker = self._present(event.worker, event.life)
        if worker is not None and worker.name not in self.rebuilder.leaving:
            self.rebuilder.notice(event, worker, now)
            self.left([worker.name], "notice", now)

    def _slot_lost(self, event: ev.SlotLost, now: float) -> None:
        if worker := self._present(event.worker, event.life):
            self.slot_lost(worker, event.reason, now)

    def slot_lost(self, worker: WorkerSlot, reason: str, now: float) -> None:
        """Nobody waits for an answer of it any more."""
        if expansion := self.rebuilder.expansion_of(worker):
            self.rebuilder.cancel(expansion, worker, f"{worker.name}: {reason}", now)
        self.fleet.slot_lost(worker, reason, now)
        self.rebuilder.gone(worker, now)
        self.left([worker.name], "loss", now)

    def _timer_fired(self, event: ev.TimerFired, now: float) -> None:
        kind, _, rest = event.name.partition(":")
        if kind == "return":
            self.toggle.deadline(int(rest), now)
        elif kind == "notice":
            name, _, life = rest.rpartition(":")
            if worker := self._present(name, int(life)):
                self.rebuilder.notice_over(worker)

    def _trainer_free(self) -> None:
        self.toggle.ask = True

    def _step_ended(self, event: ev.SnapshotPublished, now: float) -> None:
        """The profile is new, and all workers drain anyway."""
        self._trainer_free()
        if self.settings.roles is Roles.DYNAMIC and self.members:
            self._rearrange("step", now)
        if self.scaling is not None:
            self.scaling.ask(now)

    # --- what workers did -------------------------------------------------------------------------

    def _take_notes(self, now: float) -> bool:
        fleet = self.fleet
        if not (fleet.gone or fleet.prepared or fleet.admitted):
            return False
        gone, prepared, admitted = fleet.gone, fleet.prepared, fleet.admitted
        fleet.gone, fleet.prepared, fleet.admitted = [], [], []
        for worker, reason in gone:
            self._gone(worker, reason, now)
        for number, names in admitted:
            self._admitted(number, names, now)
        for number in prepared:
            if number in self.rebuilder.expansions:
                self.rebuilder.prepared(number, now)
            elif number in fleet.groups:
                self.toggle.prepared(number, now)
        return True

    def _gone(self, worker: WorkerSlot, reason: str, now: float) -> None:
        if expansion := self.rebuilder.expansion_of(worker):
            self.rebuilder.cancel(expansion, worker, f"{worker.name}: {reason}", now)
        self.fleet.ungroup(worker)
        if worker.overlap:
            self.toggle.gone(now)
        elif worker.goal is Goal.SERVING:
            self.rebuilder.expand([worker], "restarted", now)
        if worker.goal is Goal.AWAY:
            self.rebuilder.gone(worker, now)
        self.left([worker.name], "loss", now)

    def _admitted(self, number: int, names: tuple[str, ...], now: float) -> None:
        if (began_s := self._switches.pop(number, None)) is not None:
            self.record("roles", number, "done", names, "", now, began_s)
            return
        self.members.update(dict.fromkeys(names))
        if number in self.rebuilder.expansions:
            self.rebuilder.admitted(number, now)
        else:
            self.toggle.admitted(now)
        target = self._targets.pop(number, None)
        if target is not None and target.workers == len(self.members):
            self._switch(self._plan(target), now)
        else:  # others joined or left since it was decided
            self._rearrange("admission", now)
        self.toggle.ask = True

    # --- ② decide ③ plan ④ execute ----------------------------------------------------------------

    def layout(self) -> Layout | None:
        """Of the members, as it is to be."""
        roles = Counter(self.fleet.workers[name].goal_role for name in self.members)
        return Layout(roles[Role.PREFILL], roles[Role.DECODE], roles[Role.COLOCATED]) if roles else None

    def decide_joiners(self, number: int, names: list[str], trigger: str, now: float) -> None:
        """Roles for workers that are about to be admitted; members change theirs at the admission."""
        plan = self._decide(names, trigger, now)
        assert plan is not None
        roles = Counter(plan.roles.values())
        self._targets[number] = Layout(roles[Role.PREFILL], roles[Role.DECODE], roles[Role.COLOCATED])
        for name in names:
            self.fleet.assign(self.fleet.workers[name], plan.roles[name])

    def forget(self, number: int) -> None:
        self._targets.pop(number, None)

    def left(self, names: Iterable[str], trigger: str, now: float) -> None:
        """These serve no more: decide for those that remain."""
        mattered = [name for name in names if name in self.members]
        for name in mattered:
            del self.members[name]
        if mattered:
            self.toggle.ask = True
            self._rearrange(trigger, now)

    def _rearrange(self, trigger: str, now: float) -> None:
        """Decide for the members, and change roles at once. Groups under way are decided anew."""
        if self.pipeline.finished:
            return
        if self.members and (plan := self._decide([], trigger, now)):
            self._switch(plan, now)
        for number in list(self._targets):
            self.decide_joiners(number, sorted(self.fleet.groups[number].members), trigger, now)

    def _decide(self, joiners: list[str], trigger: str, now: float) -> Plan | None:
        workers = len(self.members) + len(joiners)
        if not workers:
            return None
        current = self.layout()
        decision = self.policy.decide(self.profile(), workers, current)
        plan = self._plan(decision.layout, joiners)
        present = {name: self.fleet.workers[name].goal_role for name in self.members}
        changes = [(name, str(present.get(name, "")), str(plan.roles[name])) for name in (*plan.changed, *plan.add)]
        self.fleet.emit(ev.RecordDecision(trigger, current, workers, decision, tuple(changes)))
        return plan

    def _plan(self, target: Layout, joiners: list[str] | None = None) -> Plan:
        workers = self.fleet.workers
        present = {name: workers[name].goal_role for name in self.members}
        cost = {name: workers[name].interruption_cost for name in present}
        return minimal_change(present, target, joiners or [], cost=cost)

    def _switch(self, plan: Plan, now: float) -> None:
        """They drain, change and begin to serve together, so that no half of a pair is flooded before the others."""
        if not plan.changed:
            return
        for old in self._switches.keys() - self.fleet.groups.keys():
            del self._switches[old]  # all of its workers left or were switched again
        number = self.next_number()
        for name in plan.changed:
            self.fleet.assign(self.fleet.workers[name], plan.roles[name])
        self.fleet.group(number, plan.changed, open=True)
        self._switches[number] = now
        self.record("roles", number, "began", plan.changed, "", now, now)

    def validate(self) -> None:
        """Raise AssertionError where the state contradicts itself."""
        for name in self.members:
            worker = self.fleet.workers[name]
            assert worker.present and worker.goal is Goal.SERVING, f"{name} is counted, and is to be {worker.goal}"
            assert worker.admission is None or worker.admission in self._switches, f"{name} waits and is counted"
        for worker in self.fleet.workers.values():
            kept = worker.present and worker.goal is Goal.AWAY and not worker.running and not worker.overlap
            assert not kept, f"{worker.name} is not wanted and not given back"
        for number, expansion in self.rebuilder.expansions.items():
            members = self.fleet.groups[number].members
            assert members.keys() == set(expansion.members), f"expansion {number} and its group differ"
            assert not members.keys() & self.members.keys(), f"a member of expansion {number} is counted"
        assert self._targets.keys() <= self.fleet.groups.keys(), "a layout is kept for a group that is not there"
