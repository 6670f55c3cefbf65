"""How many preemptible slots to ask for: what one more saves, against what it costs and how long it is likely to live.

A slot costs from when it comes and serves once it is prepared, so of an expected life L it serves the share
u = max(0, 1 - preparation/L). With n slots a step takes step(n), and

    steps an hour      rate(n) = 3600·[ (1 - u)/step(0) + u/step(n) ]
    dollars an hour    cost(n) = what the other GPUs cost + n·price

The number that is asked for has the most rate/cost (`tokens_per_usd`) or the most rate (`throughput`), within the
budget. Tokens a step do not depend on n. A change must be worth its threshold and keeps quiet for the cooldown; what a
budget forbids is given back at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import floor, inf

HOUR_S = 3600.0
TRIED = 32
"""Numbers of slots that are compared, spread evenly where there are more."""
WORTH = 0.02
"""Share by which the objective must rise to change the number: predictions are not better than this."""


class Objective(StrEnum):
    TOKENS_PER_USD = "tokens_per_usd"
    THROUGHPUT = "throughput"


@dataclass(frozen=True, slots=True)
class Offer:
    """Preemptible slots of one kind."""

    usd_per_slot_hour: float
    expected_lifetime_s: float | None = None
    """None: unknown, taken as long."""


@dataclass(frozen=True, slots=True)
class AutoscalerSettings:
    max_slots: int
    max_usd_per_hour: float | None = None
    """Of all preemptible slots together; None: no limit."""
    other_usd_per_hour: float = 0.0
    """Of the GPUs that are paid for anyway: training and reserved ones."""
    objective: Objective = Objective.TOKENS_PER_USD
    cooldown_s: float = 300.0
    """Between two changes that nothing forces."""
    usd_per_slot_hour: float = 0.0
    """Of a preemptible slot."""
    lifetime_prior_s: float | None = None
    """How long one is expected to live before any was lost; None: long."""


@dataclass(frozen=True, slots=True)
class Terms:
    """One number of slots that was looked at."""

    slots: int
    step_s: float
    steps_per_hour: float
    usd_per_hour: float
    steps_per_usd: float


@dataclass(frozen=True, slots=True)
class Scale:
    """What is to be asked for, and why, as data."""

    slots: int
    changed: bool
    reason: str
    terms: tuple[Terms, ...]


class Autoscaler:
    """Keeps the number that is asked for and when it changed last; it starts with none."""

    def __init__(self, settings: AutoscalerSettings) -> None:
        self.settings = settings
        self.slots = 0
        self._changed_s: float | None = None

    def affordable(self, offer: Offer) -> int:
        limit, most = self.settings.max_usd_per_hour, self.settings.max_slots
        if limit is None or most * offer.usd_per_slot_hour <= limit:
            return most
        return floor(limit / offer.usd_per_slot_hour)

    def decide(
        self,
        offer: Offer,
        step_s: Callable[[int], float],
        preparation_s: float,
        now: float,
    ) -> Scale:
        """`step_s(n)`: predicted seconds of a step with n preemptible slots beside the others."""
        most = self.affordable(offer)
        served = self._served(offer, preparation_s)
        tried = {round(i * most / TRIED) for i in range(TRIED + 1)} | {min(self.slots, most)}
        terms = tuple(self._terms(n, offer, step_s, served) for n in sorted(tried))
        best = max(terms, key=lambda t: (self._score(t), -t.slots))
        if self.slots > most:
            return self._to(best, now, f"the budget allows {most}", terms)
        present = next(t for t in terms if t.slots == self.slots)
        gain = self._score(best) / self._score(present) - 1.0 if self._score(present) else inf
        said = f"{best.slots} slots have {gain:+.1%} {self.settings.objective} against {present.slots}"
        if best.slots == present.slots:
            return Scale(self.slots, False, f"{present.slots} slots are best", terms)
        if gain <= WORTH:
            return Scale(self.slots, False, f"{said}, less than {WORTH:.0%}", terms)
        if self._changed_s is not None and now < self._changed_s + self.settings.cooldown_s:
            left = self._changed_s + self.settings.cooldown_s - now
            return Scale(self.slots, False, f"{said}; it cools down for another {left:.0f} s", terms)
        return self._to(best, now, said, terms)

    def _to(self, best: Terms, now: float, reason: str, terms: tuple[Terms, ...]) -> Scale:
        self.slots, self._changed_s = best.slots, now
        return Scale(best.slots, True, reason, terms)

    def _score(self, terms: Terms) -> float:
        per_usd = self.settings.objective is Objective.TOKENS_PER_USD
        return terms.steps_per_usd if per_usd else terms.steps_per_hour

    def _served(self, offer: Offer, preparation_s: float) -> float:
        life = offer.expected_lifetime_s
        if life is None:
            return 1.0
        return max(0.0, 1.0 - preparation_s / life) if life > 0.0 else 0.0

    def _terms(self, n: int, offer: Offer, step_s: Callable[[int], float], served: float) -> Terms:
        seconds = step_s(n)
        rate = HOUR_S * ((1.0 - served) / step_s(0) + served / seconds)
        cost = self.settings.other_usd_per_hour + n * offer.usd_per_slot_hour
        return Terms(n, seconds, rate, cost, rate / cost if cost > 0.0 else rate)
