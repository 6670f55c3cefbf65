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
        self.outcomes = np.zeros(len(prior))
        """Turns that ended or were followed by another, by index."""
        self.ends = np.zeros(len(prior))
        self.sums = np.zeros((len(prior), 4))
        self.squares = np.zeros((len(prior), 4))
        self.counts = np.zeros((len(prior), 4))

    def add(self, turn: int, quantity: int, value: float) -> None:
        """One observation of NEW, RESPONSE, CONTEXT or ENVIRONMENT at index `turn`."""
        self._grow(turn)
        self.sums[turn, quantity] += value
        self.squares[turn, quantity] += value * value
        self.counts[turn, quantity] += 1.0

    def outcome(self, turn: int, *, ended: bool) -> None:
        self._grow(turn)
        self.outcomes[turn] += 1.0
        self.ends[turn] += ended

    def decay(self, factor: float) -> None:
        """Let everything seen so far count `factor` times."""
        for array in (self.outcomes, self.ends, self.sums, self.squares, self.counts):
            array *= factor

    def turns(self) -> tuple[TurnShape, ...]:
        length = len(self.outcomes)
        prior_weight = PRIOR_TRAJECTORIES**2 / (self.outcomes + PRIOR_TRAJECTORIES)
        expected = np.ones(length)
        expected[: len(self._hazard)] = self._hazard
        prior_weight[len(self._hazard) - 1 :] *= END_WEIGHT
        seen = self.outcomes + prior_weight
        hazard = np.clip((self.ends + prior_weight * expected) / np.maximum(seen, 1e-12), 0.0, 1.0)
        survivors = np.concatenate([[1.0], np.cumprod(1.0 - hazard)[:-1]])
        means = self._blended(length)
        taken = np.flatnonzero(self.outcomes > 0.5)
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
        weights = self.counts[:, quantity]
        total = float(weights.sum())
        survivors = np.array([turn.survivors for turn in self.prior])
        prior = float(survivors @ self._means[:, quantity] / survivors.sum())
        left = PRIOR_TRAJECTORIES**2 / (total + PRIOR_TRAJECTORIES)
        return (float(self.sums[:, quantity].sum()) + left * prior) / (total + left)

    def spread(self, quantity: int, prior: float) -> float:
        """Standard deviation within a turn over the mean, fading in from `prior`."""
        counts, sums = self.counts[:, quantity], self.sums[:, quantity]
        total, mean = float(counts.sum()), self.mean(quantity)
        if total <= 0.0 or mean <= 0.0:
            return prior
        within = float((self.squares[:, quantity] - sums * sums / np.maximum(counts, 1e-12)).sum())
        left = PRIOR_TRAJECTORIES**2 / (total + PRIOR_TRAJECTORIES)
        variance = (max(0.0, within) + left * (prior * mean) ** 2) / (total + left)
        return float(np.sqrt(variance)) / mean

    @property
    def weight(self) -> float:
        """First turns seen, as far as they still count."""
        return float(self.outcomes[0])

    def _blended(self, length: int) -> NDArray[np.float64]:
        prior = np.empty((length, 4))
        prior[: len(self._means)] = self._means
        prior[len(self._means) :] = self._means[-1]
        weight = PRIOR_TRAJECTORIES**2 / (self.counts + PRIOR_TRAJECTORIES)
        weight[len(self._means) :] *= END_WEIGHT
        result: NDArray[np.float64] = (self.sums + weight * prior) / (self.counts + weight)
        return result

    def _grow(self, turn: int) -> None:
        if turn >= len(self.outcomes):
            more = turn + 8 - len(self.outcomes)
            self.outcomes = np.pad(self.outcomes, (0, more))
            self.ends = np.pad(self.ends, (0, more))
            self.sums = np.pad(self.sums, ((0, more), (0, 0)))
            self.squares = np.pad(self.squares, ((0, more), (0, 0)))
            self.counts = np.pad(self.counts, ((0, more), (0, 0)))
