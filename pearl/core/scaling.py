"""How many preemptible slots are asked for: the autoscaler within the Elastic Scheduler.

It is asked when a run starts and behind every step, from what was measured until then: the profile, the time a step's
training takes, the preparation of a slot, and how long slots live. Slots too many go back, the cheapest to interrupt
first.

A step with n preemptible slots, for a batch that takes R(n) on all but the trainer's GPUs and F(n) with these, and
training that takes t: rollout and training overlap, so max(R, t) without borrowing. With it, the share t/R of the next
batch is done while the trainer works, and the rest, if there is one, on all GPUs: t + (1 - t/R)·F + T_toggle.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pearl.core import events as ev
from pearl.core.autoscaler import Autoscaler, AutoscalerSettings, Offer
from pearl.core.events import Event
from pearl.core.gate import Average
from pearl.core.layout import Zone
from pearl.core.settings import Borrowing
from pearl.core.state import Activity, WorkerSlot
from pearl.core.workload import Profile

if TYPE_CHECKING:
    from pearl.core.elastic import Elastic


class Lifetimes:
    """Mean lifetime of slots that are lost at a constant rate: all time they were there, by the losses.

    A prior counts as one loss. Slots that were given back, or are still there, count with their time alone.
    """

    def __init__(self, prior_s: float | None) -> None:
        self._lived_s, self._losses = (prior_s or 0.0), int(prior_s is not None)
        self._since: dict[str, float] = {}

    def began(self, name: str, now: float) -> None:
        self._since.setdefault(name, now)

    def ended(self, name: str, now: float, *, lost: bool) -> None:
        if (since := self._since.pop(name, None)) is not None:
            self._lived_s += now - since
            self._losses += lost

    def mean_s(self, now: float) -> float | None:
        """None before the first loss, without a prior."""
        lived_s = self._lived_s + sum(now - since for since in self._since.values())
        return lived_s / self._losses if self._losses else None


class Scaling:
    """A part of the Elastic Scheduler."""

    def __init__(self, elastic: Elastic, settings: AutoscalerSettings) -> None:
        self.elastic, self.fleet = elastic, elastic.fleet
        self.autoscaler = Autoscaler(settings)
        self.lifetimes = Lifetimes(settings.lifetime_prior_s)
        self.training = Average(0.0, elastic.settings.average_factor)
        """From the event that completed a batch to its snapshot."""
        self._training_since_s: float | None = None
        self._asked: int | None = None

    def observe(self, event: Event, now: float) -> None:
        match event:
            case ev.SlotJoined() if event.slot.zone is Zone.PREEMPTIBLE:
                self.lifetimes.began(event.slot.name, now)
            case ev.SlotNotice() | ev.SlotLost():
                self.lifetimes.ended(event.worker, now, lost=True)
            case ev.SnapshotPublished() if self._training_since_s is not None:
                self.training.add(now - self._training_since_s)
                self._training_since_s = None
            case ev.TrainerLost():
                self._training_since_s = None

    def training_began(self, now: float) -> None:
        if self._training_since_s is None:
            self._training_since_s = now

    def excess(self, zone: Zone) -> int:
        """Preemptible slots beyond what is asked for."""
        here = sum(1 for _ in self._here()) if zone is Zone.PREEMPTIBLE else 0
        return max(0, here - self.autoscaler.slots)

    def ask(self, now: float) -> None:
        """Decide, and ask for more or give some back."""
        profile = self.elastic.profile()
        if profile is None:
            return
        scale = self.autoscaler.decide(
            Offer(self.autoscaler.settings.usd_per_slot_hour, self.lifetimes.mean_s(now)),
            lambda n: self._step_s(profile, n),
            self.elastic.rebuilder.preparation.value,
            now,
        )
        if scale.slots != self._asked:
            self._asked = scale.slots
            self.fleet.emit(ev.RequestSlots(scale.slots, scale))
            self._give_back(scale.reason, now)

    def _step_s(self, profile: Profile, slots: int) -> float:
        elastic, training_s = self.elastic, self.training.value
        share = elastic.policy.batch / elastic.policy.load(profile)  # of a batch in what is predicted
        zones = Counter(w.info.zone for w in self.fleet.workers.values())
        workers = zones[Zone.RESERVED] + slots
        alone_s = share * elastic.policy.predicted_s(profile, workers, None)
        step_s = max(alone_s, training_s)
        if elastic.settings.intra_scale is Borrowing.NEVER or not zones[Zone.OVERLAP] or alone_s <= training_s:
            return step_s
        left = 1.0 - training_s / alone_s
        full_s = share * elastic.policy.predicted_s(profile, workers + zones[Zone.OVERLAP], None)
        toggle_s = elastic.toggle.borrowing.value + elastic.toggle.returning.value
        return min(step_s, training_s + left * full_s + toggle_s)

    def _here(self) -> list[WorkerSlot]:
        leaving = self.elastic.rebuilder.leaving
        workers = self.fleet.workers.values()
        return [w for w in workers if w.info.zone is Zone.PREEMPTIBLE and w.present and w.name not in leaving]

    def _give_back(self, reason: str, now: float) -> None:
        dearest = sorted(self._here(), key=lambda w: (w.activity is Activity.ACTIVE, w.interruption_cost))
        going = dearest[: self.excess(Zone.PREEMPTIBLE)]
        for worker in going:
            self.lifetimes.ended(worker.name, now, lost=False)
            self.elastic.rebuilder.give_back(worker, f"not worth its price: {reason}", now)
        self.elastic.left([worker.name for worker in going], "autoscaler", now)
