"""PD Decision Engine: which layout has the least predicted makespan, and whether a change pays for itself."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.layout import Layout


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
