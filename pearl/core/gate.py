"""The benefit gate: borrow training GPUs only if that saves more than moving them costs.

(R/B)·(T_ded - T_full) > T_toggle, with R of B trajectories unfinished and T_toggle the cost of borrowing and returning,
averaged over the ones there were. The number of slots is free (partial borrowing): the one with the most net benefit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pearl.core.decision import GateDecision

TRIED = 16
"""Numbers of slots that are compared, spread evenly where there are more."""


@dataclass(slots=True)
class Average:
    """Exponential moving average in seconds. The first measurement replaces the prior, so a wrong one does no harm."""

    value: float
    factor: float
    """Weight of a new measurement, in (0, 1]."""
    measured: int = 0

    def add(self, seconds: float) -> None:
        weight = self.factor if self.measured else 1.0
        self.value += weight * (seconds - self.value)
        self.measured += 1


def ask_gate(
    remaining: int,
    batch: int,
    slots: int,
    predicted_s: Callable[[int], float],
    toggle_s: Callable[[int], float],
    *,
    partial: bool = True,
) -> GateDecision:
    """How many of `slots` to borrow; without `partial`, all or none.

    `predicted_s(k)`: makespan of a whole batch with k borrowed slots, k = 0 for the dedicated workers alone;
    `toggle_s(k)`: expected cost of borrowing and returning k.
    """
    dedicated_s = predicted_s(0)
    share = remaining / batch
    best: tuple[float, int, float, float] | None = None
    least = 1 if partial else slots
    for k in sorted({round(least + i * (slots - least) / max(1, TRIED - 1)) for i in range(TRIED)}):
        full_s, cost_s = predicted_s(k), toggle_s(k)
        net = share * (dedicated_s - full_s) - cost_s
        if best is None or net > best[0]:
            best = (net, k, full_s, cost_s)
    assert best is not None
    net, k, full_s, cost_s = best
    borrow = net > 0
    said = f"{remaining}/{batch}·({dedicated_s:.1f} - {full_s:.1f}) {'>' if borrow else '<='} {cost_s:.1f} s"
    return GateDecision(borrow, k if borrow else 0, remaining, batch, dedicated_s, full_s, cost_s, f"{k} slots: {said}")
