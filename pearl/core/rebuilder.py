"""The Inter-Scale Cluster Rebuilder: takes in slots that join, and lets go of slots that leave.

Expand: engines of all joiners start in the background while others serve; when the last one is loaded their roles are
decided and weights are fetched (lazily: not before); when the last one holds the newest they begin to serve together.
Any failure of a member cancels the whole expansion. Deferrable, optional.

Shrink: dispatch stops, requests are interrupted with their tokens kept, the engine ends, the slot goes back. Urgent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pearl.core import events as ev
from pearl.core.gate import Average
from pearl.core.settings import OnCancel
from pearl.core.state import Goal, WorkerSlot

if TYPE_CHECKING:
    from pearl.core.elastic import Elastic


@dataclass(slots=True)
class Expansion:
    number: int
    members: list[str]
    began_s: float
    reason: str


@dataclass(slots=True)
class Shrink:
    number: int
    began_s: float
    reason: str


class Rebuilder:
    """A part of the Elastic Scheduler, which asks it and is told what follows for the layout."""

    def __init__(self, elastic: Elastic) -> None:
        self.elastic, self.fleet, self.settings = elastic, elastic.fleet, elastic.settings
        self.expansions: dict[int, Expansion] = {}
        self.leaving: dict[str, Shrink] = {}
        self.preparation = Average(self.settings.preparation_prior_s, self.settings.average_factor)

    # --- expand -----------------------------------------------------------------------------------

    def joined(self, event: ev.SlotJoined, now: float) -> None:
        known = self.fleet.workers.get(event.slot.name)
        if known is not None and known.present and known.life < event.life:
            self.elastic.slot_lost(known, "it came back in another life", now)
        worker = self.fleet.joined(event.slot, event.life)
        if worker is None:
            return
        if reason := self._declined(event):
            number = self.elastic.next_number()
            self.elastic.record("expand", number, "declined", (worker.name,), reason, now, now)
            self._release(worker, reason)
        else:
            self.expand([worker], "joined", now)

    def _declined(self, event: ev.SlotJoined) -> str:
        """Why the slot is not taken, or nothing."""
        if not self.settings.inter_scale:
            return "inter-scale elasticity is off"
        if self.elastic.scaling is not None and self.elastic.scaling.excess(event.slot.zone):
            return "so many are not wanted any more"
        needed_s = self.settings.lifetime_factor * self.preparation.value
        lifetime_s = event.expected_lifetime_s
        if lifetime_s is not None and lifetime_s < needed_s:
            return f"it is expected to live {lifetime_s:.0f} s, too short to repay {self.preparation.value:.0f} s"
        return ""

    def expand(self, workers: list[WorkerSlot], reason: str, now: float) -> None:
        """Begin an expansion, or let them join one that has just begun."""
        for worker in workers:
            self.fleet.aim(worker, Goal.SERVING, reason)
        names = [worker.name for worker in workers]
        for expansion in self.expansions.values() if reason == "joined" else ():
            young = now - expansion.began_s <= self.settings.join_window_s and expansion.reason == reason
            if young and not self.fleet.groups[expansion.number].open:
                expansion.members += names
                for worker in workers:
                    self.fleet.extend(expansion.number, worker)
                return
        expansion = Expansion(self.elastic.next_number(), names, now, reason)
        self.expansions[expansion.number] = expansion
        self.fleet.group(expansion.number, names)
        self.elastic.record("expand", expansion.number, "began", tuple(names), reason, now, now)

    def prepared(self, number: int, now: float) -> None:
        """Every engine is loaded: decide with the membership as it is now, then fetch weights."""
        expansion = self.expansions[number]
        self._record(expansion, "prepared", "", now)
        self.elastic.decide_joiners(number, expansion.members, "expand", now)
        self.fleet.open(number)

    def admitted(self, number: int, now: float) -> None:
        expansion = self.expansions.pop(number)
        if expansion.reason == "joined":
            self.preparation.add(now - expansion.began_s)
        self._record(expansion, "admitted", "", now)

    def expansion_of(self, worker: WorkerSlot) -> Expansion | None:
        return self.expansions.get(worker.admission) if worker.admission is not None else None

    def cancel(self, expansion: Expansion, failed: WorkerSlot, reason: str, now: float) -> None:
        """All or nothing. The healthy members form a fresh expansion, or go back."""
        del self.expansions[expansion.number]
        self._record(expansion, "cancelled", reason, now)
        self.elastic.forget(expansion.number)
        healthy = [self.fleet.workers[name] for name in expansion.members if name != failed.name]
        for worker in [failed, *healthy]:
            self.fleet.ungroup(worker)
        if healthy and self.settings.on_cancel is OnCancel.REGROUP:
            self.expand(healthy, "regrouped", now)
        for worker in healthy if self.settings.on_cancel is OnCancel.RELEASE else ():
            self.shrink(worker, f"its expansion was cancelled: {reason}", now)

    # --- shrink -----------------------------------------------------------------------------------

    def notice(self, event: ev.SlotNotice, worker: WorkerSlot, now: float) -> None:
        self.give_back(worker, f"it is taken away in {event.seconds_left:.0f} s", now)
        if worker.name in self.leaving:
            deadline_s = now + max(0.0, event.seconds_left - self.settings.notice_margin_s)
            self.fleet.emit(ev.SetTimer(f"notice:{worker.name}:{worker.life}", deadline_s))

    def give_back(self, worker: WorkerSlot, reason: str, now: float) -> None:
        """Shrink by a worker that may be on its way in."""
        if expansion := self.expansion_of(worker):
            self.cancel(expansion, worker, f"{worker.name}: {reason}", now)
        self.shrink(worker, reason, now)

    def notice_over(self, worker: WorkerSlot) -> None:
        if worker.name in self.leaving:
            self.fleet.stop(worker, "its notice is over")

    def shrink(self, worker: WorkerSlot, reason: str, now: float) -> None:
        """The worker leaves, before everything else; what that means for the layout is decided by the caller."""
        if worker.name in self.leaving:
            return
        shrink = self.leaving[worker.name] = Shrink(self.elastic.next_number(), now, reason)
        self.elastic.record("shrink", shrink.number, "began", (worker.name,), reason, now, now)
        self.fleet.ungroup(worker)
        self.fleet.aim(worker, Goal.AWAY, reason)
        if not worker.running:
            self.gone(worker, now)

    def gone(self, worker: WorkerSlot, now: float) -> None:
        """Nothing of the worker runs any more."""
        shrink = self.leaving.pop(worker.name, None)
        if shrink is not None:
            phase = "done" if worker.present else "lost"
            self.elastic.record("shrink", shrink.number, phase, (worker.name,), shrink.reason, now, shrink.began_s)
        if worker.present and worker.goal is Goal.AWAY and not worker.overlap:
            self._release(worker, worker.why)
        pipeline = self.elastic.pipeline
        if not pipeline.finished and (end := self.fleet.hopeless(worker, worker.why)):
            pipeline.finish(True, end)

    def _release(self, worker: WorkerSlot, reason: str) -> None:
        worker.present = False
        self.fleet.emit(ev.ReleaseSlot(worker.name, worker.life, reason))

    def _record(self, expansion: Expansion, phase: str, reason: str, now: float) -> None:
        members = tuple(expansion.members)
        self.elastic.record("expand", expansion.number, phase, members, reason, now, expansion.began_s)
