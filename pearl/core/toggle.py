"""The Intra-Scale Toggle Manager: lends training GPUs to rollout while the trainer waits for its batch.

Borrow: training releases its device memory, overlap workers take it, fetch weights and serve together. Optional, and
abandoned at any point. Return: overlap workers drain and release, training reloads. Mandatory, before the trainer
works, and bounded: at the deadline overlap workers that are not asleep yet are ended by force.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from pearl.core import events as ev
from pearl.core.decision import GateDecision
from pearl.core.gate import Average, ask_gate
from pearl.core.gpus import Owner
from pearl.core.settings import Borrowing
from pearl.core.state import Activity, Goal, WorkerSlot

if TYPE_CHECKING:
    from pearl.core.elastic import Elastic


class Phase(StrEnum):
    HOME = "home"
    """The trainer owns all its GPUs."""
    LEAVING = "leaving"
    """It is releasing some."""
    LENT = "lent"
    RETURNING = "returning"


class Toggle:
    """A part of the Elastic Scheduler, which asks it and is told what follows for the layout."""

    def __init__(self, elastic: Elastic) -> None:
        self.elastic, self.fleet, self.settings = elastic, elastic.fleet, elastic.settings
        self.phase = Phase.HOME
        self.slots: tuple[str, ...] = ()
        """Lent ones."""
        self.number = 0
        self.since_s = 0.0
        """When the present borrowing or return began."""
        self.ask = False
        """Something changed that the gate has not been asked about."""
        factor = self.settings.average_factor
        self.borrowing = Average(self.settings.borrow_prior_s, factor)
        self.returning = Average(self.settings.return_prior_s, factor)
        self.cold_start = Average(self.settings.preparation_prior_s, factor)
        """Borrowing with an engine to be started."""
        self._cold = False
        self._borrowed_s = 0.0
        """When the present borrowing began, also while it is returned."""
        self._whole = False
        """The borrowing got as far as admission, and nothing has gone wrong since: its return is worth measuring."""
        self._offloading = False
        """Of a return: the trainer was still releasing when it began."""

    def follow(self, now: float) -> bool:
        """Take the next step if there is one; whether there was."""
        step = self.elastic.pipeline.step
        if self.phase in (Phase.LEAVING, Phase.LENT) and step.wants_gpus:
            self.give_back("the batch is complete", now)
            return True
        if self.phase is Phase.RETURNING:
            return self._progress(now)
        if self.phase is Phase.HOME and self.ask and step.idle:
            self.ask = False
            return self._consider(now)
        return False

    # --- borrow -----------------------------------------------------------------------------------

    def _consider(self, now: float) -> bool:
        workers = [w for w in self.fleet.workers.values() if w.overlap and w.present and w.goal is Goal.ASLEEP]
        workers.sort(key=lambda w: w.activity is not Activity.INACTIVE)  # the ones with a process first
        remaining = self.elastic.pipeline.samples.remaining
        if self.settings.intra_scale is Borrowing.NEVER or not workers or not remaining:
            return False
        decision = self._gate(workers, remaining)
        self.fleet.emit(ev.RecordGate(decision))
        if decision.borrow:
            self._borrow(workers[: decision.slots], decision.reason, now)
        return decision.borrow

    def _gate(self, workers: list[WorkerSlot], remaining: int) -> GateDecision:
        elastic, batch = self.elastic, round(self.elastic.policy.batch)
        toggle_s = self.borrowing.value + self.returning.value
        if self.settings.intra_scale is Borrowing.ALWAYS:
            return GateDecision(True, len(workers), remaining, batch, 0.0, 0.0, toggle_s, "always")
        profile = elastic.profile()
        if profile is None:
            return GateDecision(False, 0, remaining, batch, 0.0, 0.0, toggle_s, "there is no profile yet")
        members, current = len(elastic.members), elastic.layout()
        warm = sum(w.activity is Activity.INACTIVE for w in workers)

        def predicted_s(k: int) -> float:
            return elastic.policy.predicted_s(profile, members + k, current)

        def cost_s(k: int) -> float:
            cold_s = self.cold_start.value / self.settings.cold_start_windows if k > warm else 0.0
            return toggle_s + cold_s

        fits = remaining / batch * predicted_s(0) > self.cold_start.value
        slots = len(workers) if fits else warm
        if not slots:
            return GateDecision(
                False, 0, remaining, batch, predicted_s(0), 0.0, cost_s(1), "an engine would start too late to help"
            )
        partial = self.settings.partial_borrowing
        return ask_gate(remaining, batch, slots, predicted_s, cost_s, partial=partial)

    def _borrow(self, workers: list[WorkerSlot], reason: str, now: float) -> None:
        self.phase, self.since_s, self.number = Phase.LEAVING, now, self.elastic.next_number()
        self._borrowed_s = now
        self.slots = tuple(w.name for w in workers)
        self._cold, self._whole = any(not w.running for w in workers), False
        self.fleet.gpus.trainer_leaves(self.slots)
        self.fleet.emit(ev.OffloadTrainer(self.slots))
        self._record("borrow", "began", reason, now)

    def offloaded(self, event: ev.TrainerOffloaded) -> None:
        if event.slots != self.slots or not self.fleet.gpus.moving:
            return
        if self.phase is Phase.LEAVING:
            self.fleet.gpus.trainer_left(self.slots)
            self.phase = Phase.LENT
            self.fleet.group(self.number, self.slots)
            for name in self.slots:
                self.fleet.aim(self.fleet.workers[name], Goal.SERVING, "its GPUs are lent")
        elif self.phase is Phase.RETURNING and self._offloading:
            self.fleet.gpus.trainer_left(self.slots)
            self._offloading = False

    def prepared(self, number: int, now: float) -> None:
        self._record("borrow", "prepared", "", now)
        members = sorted(self.fleet.groups[number].members)
        self.elastic.decide_joiners(number, members, "borrow", now)
        self.fleet.open(number)

    def admitted(self, now: float) -> None:
        (self.cold_start if self._cold else self.borrowing).add(now - self.since_s)
        self._whole = True
        self._record("borrow", "admitted", "", now)

    def gone(self, now: float) -> None:
        """An overlap engine is lost or was ended; it starts again when its GPUs are lent the next time."""
        lent = [name for name in self.slots if self.fleet.workers[name].goal is Goal.SERVING]
        if self.phase is Phase.LENT and not lent:
            self.give_back("no engine is left on it", now)

    # --- return -----------------------------------------------------------------------------------

    def give_back(self, reason: str, now: float) -> None:
        if self.phase not in (Phase.LEAVING, Phase.LENT):
            return
        if self.number in self.fleet.groups or self.phase is Phase.LEAVING:
            self._record("borrow", "cancelled", reason, now)
        self._offloading = self.phase is Phase.LEAVING
        starts_in_vain = self.cold_start.value - (now - self.since_s) > self.settings.return_deadline_s
        self.elastic.forget(self.number)
        self.phase, self.since_s, self.number = Phase.RETURNING, now, self.elastic.next_number()
        self._record("return", "began", reason, now)
        for name in self.slots:
            worker = self.fleet.workers[name]
            self.fleet.ungroup(worker)
            if worker.goal is Goal.SERVING:
                self.fleet.aim(worker, Goal.ASLEEP, "its GPUs go back to training")
            if worker.activity is Activity.STARTING and starts_in_vain:
                self.fleet.stop(worker, "its GPUs go back to training, and its start takes longer than they wait")
        if self.fleet.gpus.lent:
            self.fleet.emit(ev.SetTimer(f"return:{self.number}", now + self.settings.return_deadline_s))
        self.elastic.left(self.slots, "return", now)

    def deadline(self, number: int, now: float) -> None:
        if self.phase is not Phase.RETURNING or number != self.number:
            return
        for name in self.slots:
            worker = self.fleet.workers[name]
            if self.fleet.gpus.owner[name] is Owner.WORKER:
                self._whole = False
                if worker.activity is Activity.STARTING:  # twice as long is assumed until a start is measured
                    self.cold_start.value = max(self.cold_start.value, 2 * (now - self._borrowed_s))
                self._record("return", "forced", f"{name} is {worker.activity} at the deadline", now)
                self.fleet.stop(worker, "its GPUs go back to training, and the deadline has passed")

    def reloaded(self, event: ev.TrainerReloaded) -> None:
        self.fleet.gpus.trainer_returned(event.slots)

    def trainer_lost(self, now: float) -> None:
        """Its restart needs all GPUs. What it was releasing or reloading is gone with it."""
        self.give_back("the trainer was lost", now)
        self._offloading = self._whole = False

    def _progress(self, now: float) -> bool:
        gpus = self.fleet.gpus
        if gpus.trainer_home:
            if self._whole:
                self.returning.add(now - self.since_s)
            self._record("return", "done", "", now)
            self.phase, self.slots = Phase.HOME, ()
            return True
        free = tuple(gpus.free())
        if not free or self.elastic.pipeline.step.down:
            return False
        gpus.trainer_returns(free)
        self.fleet.emit(ev.ReloadTrainer(free))
        return True

    def _record(self, kind: str, phase: str, reason: str, now: float) -> None:
        self.elastic.record(kind, self.number, phase, self.slots, reason, now, self.since_s)
