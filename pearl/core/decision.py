"""PD Decision Engine: which layout has the least predicted makespan, and whether a change pays for itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pearl.core import search
from pearl.core.feasible import Constraints
from pearl.core.layout import Layout, Mode
from pearl.core.makespan import Layouts, MakespanModel, Seconds, layout_array, layout_of
from pearl.core.workload import Profile

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


class DecisionEngine:
    """Answers from a profile alone; it keeps nothing between two questions."""

    def __init__(self, settings: DecisionSettings, model: MakespanModel) -> None:
        self.settings, self.model = settings, model

    def decide(self, profile: Profile, workers: int, batch: float, current: Layout | None = None) -> Decision:
        """The layout of `workers` workers for batches of `batch` trajectories, given the one there is.

        Raises ValueError without a worker or a trajectory.
        """
        found = self._search(profile, workers, batch)
        best = int(np.argmin(found.scores))
        chosen, predicted = layout_of(found.layouts[best]), float(found.scores[best])
        reasons = [f"{chosen} has the least predicted makespan, {predicted:.1f} s"]
        kept, broken = self._keep(profile, workers, batch, current)
        forced = current is not None and kept is None
        if broken:
            reasons.append(f"forced: {current} {broken}")
        if kept is not None and current is not None and chosen != current:
            threshold, kind = self._threshold(current, chosen)
            saved = 1.0 - predicted / kept
            against = (
                f"saves {saved:.1%} against {current} ({kept:.1f} s); a change of {kind} must save {threshold:.0%}"
            )
            if saved > threshold:
                reasons.append(f"it {against}")
            else:
                reasons = [f"{current} stays: {chosen} ({predicted:.1f} s) {against}"]
                chosen, predicted = current, kept
        elif chosen == current:
            reasons.append("it is the one there is")
        candidates = self._candidates(profile, batch, found, chosen, predicted)
        for candidate in candidates:
            if candidate.infeasible and candidate.makespan_s < predicted:
                reasons.append(
                    f"{candidate.layout} ({candidate.makespan_s:.1f} s) is ruled out: {candidate.infeasible}"
                )
                break
        return Decision(chosen, predicted, kept, forced, tuple(reasons), candidates)

    def best(self, profile: Profile, workers: int, batch: float) -> tuple[Layout, float]:
        """The best layout and its makespan in seconds, whatever there is now."""
        found = self._search(profile, workers, batch)
        best = int(np.argmin(found.scores))
        return layout_of(found.layouts[best]), float(found.scores[best])

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

    def _search(self, profile: Profile, workers: int, batch: float) -> search.Found:
        if workers < 1 or batch <= 0:
            raise ValueError(f"nothing to decide for {workers} workers and {batch} trajectories")

        def score(layouts: Layouts) -> Seconds:
            seconds = self.model.makespans(profile, layouts, batch)
            return np.where(self._feasible(profile, layouts, batch), seconds, np.inf)

        few = workers <= search.EXHAUSTIVE_WORKERS
        mixed = self.settings.mixed and workers >= 3
        if few:
            rows = [search.colocated(workers), search.ratios(workers)]
            layouts = np.concatenate([*rows, search.mixtures(workers)] if mixed else rows)
            return search.Found(layouts, score(layouts))
        ratios = search.ratios(workers)
        ratios = ratios[self._feasible(profile, ratios, batch)]
        alone = search.colocated(workers)
        parts = [search.Found(alone, score(alone)), search.search_ratios(ratios, score)]
        if mixed:
            parts.append(search.search_mixtures(workers, score))
        return search.Found(np.concatenate([p.layouts for p in parts]), np.concatenate([p.scores for p in parts]))

    def _feasible(self, profile: Profile, layouts: Layouts, batch: float) -> np.ndarray:
        constraints = Constraints.of(profile, layouts, batch)
        return constraints.feasible if self.settings.constraints else constraints.whole

    def _keep(self, profile: Profile, workers: int, batch: float, current: Layout | None) -> tuple[float | None, str]:
        """Prediction for the layout there is, or what it breaks."""
        if current is None:
            return None, ""
        if current.workers != workers:
            return None, f"has {current.workers} workers, there are {workers}"
        row = layout_array([current])
        if not self._feasible(profile, row, batch)[0]:
            return None, "is infeasible: " + Constraints.of(profile, row, batch).reason(0)
        return self.model.makespan(profile, current, batch), ""

    def _threshold(self, current: Layout, chosen: Layout) -> tuple[float, str]:
        if current.mode is not chosen.mode:
            return self.settings.mode_threshold, "mode"
        return self.settings.ratio_threshold, "ratio"

    def _candidates(
        self, profile: Profile, batch: float, found: search.Found, chosen: Layout, predicted: float
    ) -> tuple[Candidate, ...]:
        """The best ones, infeasible or not, the best of each mode among them."""
        seconds = self.model.makespans(profile, found.layouts, batch)
        constraints = Constraints.of(profile, found.layouts, batch)
        order = np.argsort(seconds, kind="stable")
        shown: dict[Layout, Candidate] = {}
        modes: set[Mode] = set()
        for row in order.tolist():
            layout, infeasible = layout_of(found.layouts[row]), not np.isfinite(found.scores[row])
            first = not infeasible and layout.mode not in modes
            if len(shown) < SHOWN or first:
                reason = constraints.reason(row) if infeasible else ""
                shown[layout] = Candidate(layout, float(seconds[row]), reason)
                if not infeasible:
                    modes.add(layout.mode)
            elif len(modes) == len(Mode):
                break
        shown.setdefault(chosen, Candidate(chosen, predicted))
        return tuple(sorted(shown.values(), key=lambda candidate: candidate.makespan_s))
