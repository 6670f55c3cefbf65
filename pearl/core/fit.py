"""Linear costs from noisy telemetry: non-negative least squares over buckets, leaning on a prior.

Samples fall into buckets, a factor of two wide in each of two dimensions (batch and KV of decoding, new and cached
tokens of prefill), and a bucket keeps one mean row. So a million samples of steady traffic weigh no more than the few
from elsewhere that tell the coefficients apart, and a fit costs the same after a day as after a minute. Rows are
weighted by 1 over what is expected of them, for relative errors; 1/y itself would lean towards rows that happened to be
quick. What the samples leave open is taken from the prior's shape, scaled to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

MEMORY = 50
"""A bucket's mean moves by 1/50 a sample once it holds so many: noise of 30 % becomes 3 %."""
BUCKET_WEIGHT = 8
"""Samples up to which a fuller bucket counts for more."""
PRIOR_WEIGHT = 0.003
"""Of the prior's shape, at least; a sample counts 1. On a noisy machine it is the samples' relative variance, so that
what noise cannot tell apart stays as the prior has it."""
PRIOR_SAMPLES = 4
"""Samples that weigh about as much as the prior's absolute size; then its weight falls faster than theirs grows."""
REWEIGHTINGS = 3
"""The first has only y to expect; two more are within a per cent of where it ends."""
STEADY_SAMPLES = 32
STEADY_BUCKETS = 3
"""Samples and buckets at which a coefficient is half trusted."""


@dataclass(slots=True)
class _Bucket:
    row: list[float]
    """Mean regressors, with the mean of y last. No array: it is added to with every turn, and is short."""
    samples: int


class CostFit:
    """y ≈ Σ x_j·coefficient_j with coefficients from 0 up."""

    def __init__(self, prior: Sequence[float]) -> None:
        self.prior = np.array(prior, dtype=float)
        self.samples = 0
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._solution: NDArray[np.float64] | None = None

    def add(self, key: tuple[float, float], regressors: Sequence[float], y: float) -> None:
        """`key`: the two quantities, from 0 up, that choose the bucket."""
        if y <= 0.0 or not math.isfinite(y):
            return
        place = (int(key[0] + 1.0).bit_length(), int(key[1] + 1.0).bit_length())
        bucket = self._buckets.get(place)
        if bucket is None:
            self._buckets[place] = _Bucket([*regressors, y], 1)
        else:
            samples = bucket.samples = min(bucket.samples + 1, MEMORY)
            bucket.row = [mean + (new - mean) / samples for mean, new in zip(bucket.row, (*regressors, y), strict=True)]
        self.samples += 1
        self._solution = None

    @property
    def confidence(self) -> float:
        """0 without a sample, towards 1 with many in several buckets."""
        buckets = len(self._buckets)
        return self.samples / (self.samples + STEADY_SAMPLES) * buckets / (buckets + STEADY_BUCKETS)

    def coefficients(self) -> NDArray[np.float64]:
        """The prior where nothing was measured."""
        if self._solution is None:
            self._solution = self._solve() if self._buckets else self.prior
        return self._solution

    def _solve(self) -> NDArray[np.float64]:
        rows = np.array([bucket.row for bucket in self._buckets.values()], dtype=float)
        count = np.array([min(bucket.samples, BUCKET_WEIGHT) for bucket in self._buckets.values()], dtype=float)
        x, y = rows[:, :-1], rows[:, -1]
        solution, expected, lean = self.prior, y, PRIOR_WEIGHT
        for _ in range(REWEIGHTINGS):
            solution = self._weighted(x, y, np.sqrt(count) / expected, lean)
            expected = np.maximum(x @ solution, 0.1 * y)
            lean = max(PRIOR_WEIGHT, float(np.mean(count * (y / expected - 1.0) ** 2)))
        left = PRIOR_SAMPLES**2 / (self.samples + PRIOR_SAMPLES)
        trust = self.samples / (self.samples + left)
        result: NDArray[np.float64] = trust * solution + (1.0 - trust) * self.prior
        return result

    def _weighted(
        self, x: NDArray[np.float64], y: NDArray[np.float64], weight: NDArray[np.float64], lean: float
    ) -> Any:
        x, y = x * weight[:, None], y * weight
        expected = x @ self.prior
        square = float(expected @ expected)
        shape = self.prior * (float(expected @ y) / square if square > 0 else 1.0)
        # In units of its share of y: a coefficient of 1 explains all of a typical sample.
        unit = 1.0 / np.maximum(np.sqrt((x**2).mean(axis=0) / (y**2).mean()), 1e-30)
        matrix = np.vstack([x * unit, math.sqrt(lean) * np.eye(len(unit))])
        solution, _ = nnls(matrix, np.concatenate([y, math.sqrt(lean) * shape / unit]))
        return solution * unit
