"""Who did what when: a lane for each slot, the tokens of each minute, and the marks of decisions; an observer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pearl.core import events as ev
from pearl.core.events import Event, Instruction
from pearl.core.layout import Role, SlotInfo, Zone

BIN_S = 30.0
"""Tokens are counted in bins of so many seconds."""


class Doing(StrEnum):
    ABSENT = "absent"
    STARTING = "starting"
    LOADING = "loading weights"
    MOVING = "changing hands"
    COLOCATED = "colocated"
    PREFILL = "prefill"
    DECODE = "decode"
    TRAINING = "training"
    IDLE = "idle"


SERVING = {Role.COLOCATED: Doing.COLOCATED, Role.PREFILL: Doing.PREFILL, Role.DECODE: Doing.DECODE}


@dataclass(slots=True)
class Lane:
    zone: Zone
    gpus: int
    role: Role = Role.COLOCATED
    changes: list[tuple[float, Doing]] = field(default_factory=list)
    """(since, what), in order."""

    def to(self, now: float, doing: Doing) -> None:
        if not self.changes or self.changes[-1][1] is not doing:
            self.changes.append((now, doing))

    @property
    def doing(self) -> Doing:
        return self.changes[-1][1]

    def spans(self, until_s: float) -> list[tuple[float, float, Doing]]:
        """(from, to, what)."""
        ends = [since for since, _ in self.changes[1:]] + [until_s]
        return [(since, end, doing) for (since, doing), end in zip(self.changes, ends, strict=True) if end > since]


class Timeline:
    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.generated: dict[int, int] = defaultdict(int)
        """Tokens by bin, counted when their turn ends."""
        self.steps: list[tuple[float, int]] = []
        self.decisions: list[tuple[float, str, bool]] = []
        """(when, layout, whether it is another than before)."""
        self.now = 0.0
        self._training = False
        self._handlers: dict[type, Callable[[Any], object]] = {
            ev.RunStarted: self._run_started,
            ev.SlotJoined: lambda e: self._add(e.slot),
            ev.SlotLost: lambda e: self._to(e.worker, Doing.ABSENT),
            ev.ReleaseSlot: lambda i: self._to(i.worker, Doing.ABSENT),
            ev.StartEngine: self._start_engine,
            ev.EngineAsleep: self._asleep,
            ev.SyncWeights: lambda i: self._to(i.worker, Doing.LOADING),
            ev.WeightsSynced: lambda e: self._to(e.worker, SERVING[self.lanes[e.worker].role]),
            ev.SwitchRole: lambda i: self._to(i.worker, Doing.MOVING),
            ev.RoleSwitched: self._role_switched,
            ev.WorkerLost: self._worker_lost,
            ev.TurnGenerated: self._turn_generated,
            ev.TrainBatch: lambda i: self._trainer(Doing.TRAINING),
            ev.BatchTrained: self._batch_trained,
            ev.OffloadTrainer: lambda i: self._all(i.slots, Doing.MOVING),
            ev.ReleaseEngine: lambda i: self._to(i.worker, Doing.MOVING),
            ev.ReloadTrainer: lambda i: self._all(i.slots, Doing.MOVING),
            ev.TrainerReloaded: lambda e: self._all(e.slots, Doing.IDLE),
            ev.RecordDecision: self._decided,
        }

    def saw(self, now: float, entry: Event | Instruction) -> None:
        self.now = now
        handler = self._handlers.get(type(entry))
        if handler is not None:
            handler(entry)

    def _run_started(self, event: ev.RunStarted) -> None:
        for slot in event.slots:
            self._add(slot)

    def _add(self, slot: SlotInfo) -> None:
        lane = self.lanes.setdefault(slot.name, Lane(slot.zone, len(slot.gpus)))
        if slot.zone is Zone.PREEMPTIBLE and not lane.changes and self.now > 0:
            lane.to(0.0, Doing.ABSENT)
        lane.to(self.now, Doing.IDLE)

    def _to(self, name: str, doing: Doing) -> None:
        if lane := self.lanes.get(name):
            lane.to(self.now, doing)

    def _all(self, names: tuple[str, ...], doing: Doing) -> None:
        for name in names:
            self._to(name, doing)

    def _start_engine(self, i: ev.StartEngine) -> None:
        self.lanes[i.worker].role = i.role
        self._to(i.worker, Doing.STARTING)

    def _asleep(self, event: ev.EngineAsleep) -> None:
        """It has started since the beginning."""
        lane = self.lanes[event.worker]
        lane.changes[-1] = (lane.changes[-1][0], Doing.STARTING)
        lane.to(self.now, Doing.IDLE)

    def _role_switched(self, event: ev.RoleSwitched) -> None:
        lane = self.lanes[event.worker]
        lane.role = event.role
        lane.to(self.now, SERVING[event.role])

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        lane = self.lanes.get(event.worker)
        if lane is not None and lane.doing is not Doing.ABSENT:
            lane.to(self.now, Doing.IDLE)

    def _trainer(self, doing: Doing) -> None:
        for lane in self.lanes.values():
            if lane.zone is Zone.OVERLAP:
                lane.to(self.now, doing)

    def _batch_trained(self, event: ev.BatchTrained) -> None:
        self.steps.append((self.now, event.step))
        self._trainer(Doing.IDLE)

    def _turn_generated(self, event: ev.TurnGenerated) -> None:
        self.generated[int(self.now // BIN_S)] += event.tokens

    def _decided(self, i: ev.RecordDecision) -> None:
        self.decisions.append((self.now, str(i.decision.layout), i.current != i.decision.layout))

    def rates(self) -> tuple[list[float], list[float]]:
        """(middle of the bin in s, tokens generated per s), without the last bin, which may not be whole."""
        last = int(self.now // BIN_S)
        return [(b + 0.5) * BIN_S for b in range(last)], [self.generated.get(b, 0) / BIN_S for b in range(last)]
