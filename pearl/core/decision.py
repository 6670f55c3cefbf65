"""PD Decision Engine: which layout has the least predicted makespan, and whether a change pays for itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pearl.core.feasible import Constraints
from pearl.core.layout import Layout
from pearl.core.makespan import Layouts, MakespanModel, layout_array, layout_of
from pearl.core.search import GRID, Found, colocated, mixtures_along, mixtures_of_few, ratios, search
from pearl.core.workload import Profile

MIXED_WITHIN = 1.05
"""Of many workers, mixed layouts are looked at where the better mode is faster than the other by at most this factor: a
mixture serves some turns the one way and some the other, so where one of them is slower, the mixture is."""
MIXED_SAVES = 0.015
"""A mixed layout must be predicted to save so much against the best other one. Of 57 simulated settings it was the best
in two, by 0.6 % at most, which is less than the model errs between the two."""
SHOWN = 12
"""Candidates that a decision carries besides the best of each mode."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One layout that was looked at. `infeasible` says which constraint it breaks, or is empty."""

    layout: Layout
    makespan_s: float
    infeasible: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen and why, as data: enough to draw, to log and to argue with."""

    layout: Layout
    predicted_s: float
    """Predicted makespan of a batch's rollout under `layout`."""
    kept_s: float | None
    """Prediction for the layout there was; None where it cannot go on (other number of workers, infeasible)."""
    forced: bool
    """The layout there was cannot serve, so hysteresis did not count."""
    reasons: tuple[str, ...]
    """In the order in which they counted."""
    candidates: tuple[Candidate, ...]
    """The best of each mode and the ones near the choice, best first."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """Whether to borrow: (R/B)·(T_ded - T_full) > T_toggle, with its terms."""

    borrow: bool
    slots: int
    """How many overlap slots, 0 if `borrow` is false."""
    remaining: int
    """R: trajectories of the batch in front of the trainer that are not finished."""
    batch: int
    """B."""
    dedicated_s: float
    """T_ded: predicted makespan of a whole batch on the dedicated workers."""
    full_s: float
    """T_full: the same with the borrowed ones."""
    toggle_s: float
    """T_toggle: expected cost of borrowing and returning."""
    reason: str


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """Thresholds are shares of the predicted makespan that a change must save."""

    mode_threshold: float = 0.05
    """Between colocated, disaggregated and mixed: every worker drains and switches, and prefix caches are lost."""
    ratio_threshold: float = 0.02
    """Within a mode: few workers switch."""
    mixed: bool = True
    """Whether colocated workers beside prefill-decode pairs are considered."""
    constraints: bool = True
    """Ablation: without them every whole layout counts as feasible."""
    drains: bool = True
    """Decode memory for the most that a batch holds at once while it drains; if not, for all trajectories at their
    longest, as in the source."""


class DecisionEngine:
    """Answers from a profile alone; it keeps nothing between two questions."""

    def __init__(self, settings: DecisionSettings, model: MakespanModel) -> None:
        self.settings, self.model = settings, model

    def decide(self, profile: Profile, workers: int, batch: float, current: Layout | None = None) -> Decision:
        """The layout of `workers` workers for batches of `batch` trajectories, given the one there is.

        Raises ValueError without a worker or a trajectory.
        """
        found = self._search(profile, workers, batch)
        chosen, predicted = _least(found)
        reasons = [f"{chosen} has the least predicted makespan, {predicted:.1f} s"]
        kept, broken = self._keep(profile, workers, batch, current, found)
        if broken:
            reasons.append(f"forced: {current} {broken}")
        if chosen == current:
            reasons.append("it changes no role")
        elif kept is not None and current is not None:
            threshold, kind = self._threshold(current, chosen)
            saved = 1.0 - predicted / kept
            against = (
                f"saves {saved:.1%} against {current} ({kept:.1f} s), a change of {kind} must save {threshold:.0%}"
            )
            if saved > threshold:
                reasons.append(f"it {against}")
            else:
                reasons = [f"{current} stays: {chosen} ({predicted:.1f} s) {against}"]
                chosen, predicted = current, kept
        candidates = self._candidates(found, Candidate(chosen, predicted))
        for candidate in candidates:
            if candidate.infeasible and candidate.makespan_s < predicted:
                reasons.append(f"{candidate.layout} ({candidate.makespan_s:.1f} s) cannot be: {candidate.infeasible}")
                break
        return Decision(chosen, predicted, kept, bool(broken), tuple(reasons), candidates)

    def best(self, profile: Profile, workers: int, batch: float) -> tuple[Layout, float]:
        """The best layout and its makespan in seconds, whatever there is now."""
        return _least(self._search(profile, workers, batch))

    def makespan(self, profile: Profile, layout: Layout, batch: float) -> float:
        """Predicted seconds, feasible or not."""
        return self.model.makespan(profile, layout, batch)

    def marginal_gain(self, profile: Profile, workers: int, batch: float, extra: int = 1) -> float:
        """Seconds of makespan that `extra` more workers save, each number in its best layout; never negative."""
        return max(0.0, self.best(profile, workers, batch)[1] - self.best(profile, workers + extra, batch)[1])

    def expansion_benefit_s(
        self,
        profile: Profile,
        from_workers: int,
        to_workers: int,
        batch: float,
        expected_lifetime_s: float,
        preparation_s: float,
    ) -> float:
        """Seconds of rollout that workers which live for `expected_lifetime_s` save over their life.

        They prepare in the background for `preparation_s` and then serve for U = lifetime - preparation seconds.
        Batches that take T_to then would have taken T_from, so U·(T_from/T_to - 1) seconds are saved.
        """
        serving_s = expected_lifetime_s - preparation_s
        if serving_s <= 0.0:
            return 0.0
        slow, fast = (self.best(profile, workers, batch)[1] for workers in (from_workers, to_workers))
        return max(0.0, serving_s * (slow / fast - 1.0))

    # --- parts ------------------------------------------------------------------------------------

    def _search(self, profile: Profile, workers: int, batch: float) -> Found:
        if workers < 1 or batch <= 0:
            raise ValueError(f"nothing to decide for {workers} workers and {batch} trajectories")

        def look(layouts: Layouts) -> Found:
            seconds = self.model.makespans(profile, layouts, batch)
            constraints = self._constraints(profile, layouts, batch)
            return Found(layouts, seconds, self._feasible(constraints), constraints)

        pairs, mixed = ratios(workers), self.settings.mixed and workers >= 3
        if len(pairs) < GRID:  # all at once: a call costs more than what is in it
            every = [colocated(workers), pairs, *([mixtures_of_few(workers)] if mixed else [])]
            return look(np.concatenate(every))
        fitting = pairs[self._feasible(self._constraints(profile, pairs, batch))]
        parts = [look(colocated(workers)), search(fitting if len(fitting) else pairs, look)]
        if mixed:
            so_far = Found.joined(parts)
            alone, paired = so_far.seconds[0], so_far.scores[1:]
            best = int(np.argmin(paired))
            if alone / MIXED_WITHIN < paired[best] < alone * MIXED_WITHIN:
                prefill_share = float(so_far.layouts[1 + best, 0]) / workers
                parts.append(search(mixtures_along(workers, prefill_share), look))
        return Found.joined(parts)

    def _constraints(self, profile: Profile, layouts: Layouts, batch: float) -> Constraints:
        return Constraints.of(profile, layouts, batch, drains=self.settings.drains)

    def _feasible(self, constraints: Constraints) -> NDArray[np.bool_]:
        return constraints.feasible if self.settings.constraints else constraints.whole

    def _keep(
        self, profile: Profile, workers: int, batch: float, current: Layout | None, found: Found
    ) -> tuple[float | None, str]:
        """Prediction for the layout there is, or what it breaks."""
        if current is None:
            return None, ""
        if current.workers != workers:
            return None, f"has {current.workers} workers, there are {workers}"
        row = layout_array([current])
        same = np.flatnonzero((found.layouts == row).all(axis=1))
        at = int(same[0]) if same.size else 0
        constraints = found.constraints if same.size else self._constraints(profile, row, batch)
        if not self._feasible(constraints)[at]:
            return None, "is infeasible: " + constraints.reason(at)
        return float(found.seconds[at]) if same.size else self.model.makespan(profile, current, batch), ""

    def _threshold(self, current: Layout, chosen: Layout) -> tuple[float, str]:
        if current.mode is not chosen.mode:
            return self.settings.mode_threshold, "mode"
        return self.settings.ratio_threshold, "ratio"

    def _candidates(self, found: Found, chosen: Candidate) -> tuple[Candidate, ...]:
        """The best ones, infeasible or not, the best of each mode among them."""
        order = np.argsort(found.seconds, kind="stable")
        feasible, (prefill, _, alone) = found.feasible[order], found.layouts[order].T
        first = [
            np.flatnonzero(feasible & mode)[:1] for mode in (prefill == 0, alone == 0, (prefill > 0) & (alone > 0))
        ]
        rows = order[[*range(min(SHOWN, len(order))), *np.concatenate(first)]].tolist()
        shown = {chosen.layout: chosen}
        for row in rows:
            layout = layout_of(found.layouts[row].tolist())
            reason = "" if found.feasible[row] else found.constraints.reason(row)
            shown.setdefault(layout, Candidate(layout, float(found.seconds[row]), reason))
        return tuple(sorted(shown.values(), key=lambda candidate: candidate.makespan_s))


def _least(found: Found) -> tuple[Layout, float]:
    prefill, _, alone = found.layouts.T
    best = int(np.argmin(found.scores * (1.0 + MIXED_SAVES * ((prefill > 0) & (alone > 0)))))
    return layout_of(found.layouts[best]), float(found.seconds[best])
