"""How many trajectories take turn k, and what turn k is like: the survivor curve with means per turn.

From trajectories that still go on, too: of those whose turn k has an outcome, the share that ended there is the hazard,
and the survivors are the product of what is left (Kaplan and Meier's estimate). Counting ended trajectories alone would
see the short ones first.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pearl.core.workload import TurnShape

PRIOR_TRAJECTORIES = 4.0
"""Measured turns that weigh as much as the prior; its weight then falls faster than theirs grows."""
END_WEIGHT = 0.05
"""Of the prior behind its last turn, where it says that all has ended and nothing changes: it decides where nothing was
seen, and no more."""
LEAST_SURVIVORS = 1e-3
"""The curve ends where fewer are left, unless the measured ones go further."""
NEW, RESPONSE, CONTEXT, ENVIRONMENT = range(4)


class SurvivorCurve:
    def __init__(self, prior: Sequence[TurnShape]) -> None:
        self.prior = tuple(prior)
        self._means = np.array([[t.new_tokens, t.response_tokens, t.context_tokens, t.environment_s] for t in prior])
        survivors = np.array([turn.survivors for turn in prior] + [0.0])
        self._hazard = 1.0 - survivors[1:] / np.maximum(survivors[:-1], 1e-12)
        # Lists, not arrays: numbers are added one by one with every turn, and read once in a while.
        self._outcomes = [0.0] * len(prior)
        """Turns that ended or were followed by another, by index."""
        self._ends = [0.0] * len(prior)
        self._sums, self._squares, self._counts = ([[0.0] * len(prior) for _ in range(4)] for _ in range(3))
        """By quantity, then by index."""

    def add(self, turn: int, quantity: int, value: float) -> None:
        """One observation of NEW, RESPONSE, CONTEXT or ENVIRONMENT at index `turn`."""
        if turn >= len(self._outcomes):
            self._grow(turn)
        self._sums[quantity][turn] += value
        self._squares[quantity][turn] += value * value
        self._counts[quantity][turn] += 1.0

    def outcome(self, turn: int, *, ended: bool) -> None:
        if turn >= len(self._outcomes):
            self._grow(turn)
        self._outcomes[turn] += 1.0
        self._ends[turn] += ended

    def decay(self, factor: float) -> None:
        """Let everything seen so far count `factor` times."""
        for column in self._columns():
            column[:] = [value * factor for value in column]

    def turns(self) -> tuple[TurnShape, ...]:
        outcomes, ends = np.array(self._outcomes), np.array(self._ends)
        length = len(outcomes)
        prior_weight = PRIOR_TRAJECTORIES**2 / (outcomes + PRIOR_TRAJECTORIES)
        expected = np.ones(length)
        expected[: len(self._hazard)] = self._hazard
        prior_weight[len(self._hazard) - 1 :] *= END_WEIGHT
        seen = outcomes + prior_weight
        hazard = np.clip((ends + prior_weight * expected) / np.maximum(seen, 1e-12), 0.0, 1.0)
        survivors = np.concatenate([[1.0], np.cumprod(1.0 - hazard)[:-1]])
        means = self._blended(length)
        taken = np.flatnonzero(outcomes > 0.5)
        last = max(1, int((survivors >= LEAST_SURVIVORS).sum()), int(taken[-1]) + 1 if len(taken) else 0)
        return tuple(
            TurnShape(
                survivors=float(alive),
                new_tokens=float(mean[NEW]),
                response_tokens=float(mean[RESPONSE]),
                environment_s=float(mean[ENVIRONMENT]),
                context_tokens=float(mean[CONTEXT]),
            )
            for alive, mean in zip(survivors[:last], means[:last], strict=True)
        )

    def mean(self, quantity: int) -> float:
        """Over all turns of all trajectories; the prior's mean where nothing was measured."""
        total = float(np.sum(self._counts[quantity]))
        survivors = np.array([turn.survivors for turn in self.prior])
        prior = float(survivors @ self._means[:, quantity] / survivors.sum())
        left = PRIOR_TRAJECTORIES**2 / (total + PRIOR_TRAJECTORIES)
        return (float(np.sum(self._sums[quantity])) + left * prior) / (total + left)

    def spread(self, quantity: int, prior: float) -> float:
        """Standard deviation within a turn over the mean, fading in from `prior`."""
        counts, sums, squares = (np.array(part[quantity]) for part in (self._counts, self._sums, self._squares))
        total, mean = float(counts.sum()), self.mean(quantity)
        if total <= 0.0 or mean <= 0.0:
            return prior
        within = float((squares - sums * sums / np.maximum(counts, 1e-12)).sum())
        left = PRIOR_TRAJECTORIES**2 / (total + PRIOR_TRAJECTORIES)
        variance = (max(0.0, within) + left * (prior * mean) ** 2) / (total + left)
        return float(np.sqrt(variance)) / mean

    @property
    def weight(self) -> float:
        """First turns seen, as far as they still count."""
        return self._outcomes[0]

    def _blended(self, length: int) -> NDArray[np.float64]:
        prior = np.empty((length, 4))
        prior[: len(self._means)] = self._means
        prior[len(self._means) :] = self._means[-1]
        counts, sums = np.array(self._counts).T, np.array(self._sums).T
        weight = PRIOR_TRAJECTORIES**2 / (counts + PRIOR_TRAJECTORIES)
        weight[len(self._means) :] *= END_WEIGHT
        result: NDArray[np.float64] = (sums + weight * prior) / (counts + weight)
        return result

    def _columns(self) -> list[list[float]]:
        return [self._outcomes, self._ends, *self._sums, *self._squares, *self._counts]

    def _grow(self, turn: int) -> None:
        more = [0.0] * (turn + 8 - len(self._outcomes))
        for column in self._columns():
            column += more
