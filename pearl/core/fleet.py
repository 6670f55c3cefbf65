"""The lives of rollout workers: start, load, verify, serve, drain for new weights, get lost, start again.

A part of the Pipeline Scheduler: it decides who may serve, the rest decides what is served.
"""

from __future__ import annotations

from collections.abc import Callable

from pearl.core import events as ev
from pearl.core.events import Instruction
from pearl.core.state import Activity, WorkerSlot, WorkerTable

Emit = Callable[[Instruction], None]


class Fleet:
    """Rollout workers. `emit` takes each instruction; a returned string is the reason why the run cannot go on."""

    def __init__(self, emit: Emit, *, abort_on_update: bool, restarts: int) -> None:
        self.emit = emit
        self.abort_on_update = abort_on_update
        self.restarts = restarts
        self.workers = WorkerTable()
        self.version = -1
        """Newest published weights; -1 before the trainer is ready."""

    def serving(self) -> list[WorkerSlot]:
        return self.workers.serving(self.version)

    @property
    def settled(self) -> bool:
        """No worker is between two versions."""
        between = (Activity.DRAINING, Activity.LOADED)
        return not any(w.activity in between for w in self.workers.values())

    def start_all(self, names: tuple[str, ...], now: float) -> None:
        self.workers = WorkerTable.of(names)
        for worker in self.workers.values():
            self._start(worker, now)

    def published(self, version: int, now: float) -> None:
        """New weights: serving workers drain and load them, waiting ones load them at once."""
        assert version > self.version, "weight versions only grow"
        first = self.version < 0
        self.version = version
        for worker in self.workers.values():
            if worker.activity is Activity.ACTIVE:
                worker.to(Activity.DRAINING, now, f"for v{version}")
                if worker.in_flight and self.abort_on_update:
                    worker.aborting = True
                    self.emit(ev.AbortRequests(worker.name, worker.incarnation))
                self._drained(worker, now)
            elif worker.activity is Activity.LOADED and first:
                self._sync(worker)

    def loaded(self, event: ev.EngineLoaded, now: float) -> None:
        worker = self.workers.current(event.worker, event.incarnation)
        if worker is not None and worker.activity is Activity.STARTING:
            worker.to(Activity.LOADED, now)
            self._sync(worker)

    def synced(self, event: ev.WeightsSynced, now: float) -> None:
        worker = self.workers.current(event.worker, event.incarnation)
        if worker is None or worker.activity is not Activity.LOADED:
            return
        worker.synced(event.version, now)
        if event.version == self.version:
            worker.to(Activity.ACTIVE, now)
        else:
            worker.to(Activity.LOADED, now, "a newer version was published meanwhile")
            self._sync(worker)
        if self.version > 0 and not any(w.activity is Activity.LOADED for w in self.workers.values()):
            self.emit(ev.RetireSnapshots(self.version - 1))  # nobody can still be reading an older one

    def returned(self, event: ev.TurnGenerated, now: float) -> None:
        """A request is back; the last one of a draining worker lets it load."""
        if worker := self.workers.current(event.worker, event.incarnation):
            worker.in_flight.discard(event.trajectory)
            self._drained(worker, now)

    def abort_acknowledged(self, event: ev.AbortAcknowledged, now: float) -> None:
        if worker := self.workers.current(event.worker, event.incarnation):
            worker.aborting = False
            self._drained(worker, now)

    def lost(self, event: ev.WorkerLost, now: float) -> str | None:
        worker = self.workers.current(event.worker, event.incarnation)
        if worker is None or worker.activity is Activity.GONE:
            return None
        worker.to(Activity.GONE, now, event.reason)
        worker.restarts += 1
        if worker.restarts <= self.restarts:
            self._start(worker, now)
        elif all(w.activity is Activity.GONE for w in self.workers.values()):
            return f"no rollout worker is left; the last one, {worker.name}: {event.reason}"
        return None

    def _start(self, worker: WorkerSlot, now: float) -> None:
        worker.start(now)
        self.emit(ev.StartEngine(worker.name, worker.incarnation))

    def _sync(self, worker: WorkerSlot) -> None:
        if self.version >= 0:
            self.emit(ev.SyncWeights(worker.name, worker.incarnation, self.version))

    def _drained(self, worker: WorkerSlot, now: float) -> None:
        if worker.activity is Activity.DRAINING and not worker.in_flight and not worker.aborting:
            worker.to(Activity.LOADED, now)
            self._sync(worker)
