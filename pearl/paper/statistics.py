"""Means of paired runs with their 95 % intervals, and how sure the best of several is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import t

RESAMPLES = 1000


class Estimate(NamedTuple):
    mean: float
    lo: float
    hi: float
    """Ends of the 95 % interval; both the mean where there is one value only."""


def estimate(values: Sequence[float]) -> Estimate:
    """Student's interval of the mean."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Estimate(mean, mean, mean)
    half = float(t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return Estimate(mean, mean - half, mean + half)


def gains(better: Sequence[float], worse: Sequence[float]) -> list[float]:
    """By how many per cent each value exceeds its partner of the same seed."""
    return [100.0 * (a / b - 1.0) for a, b in zip(better, worse, strict=True)]


def best_of(columns: Sequence[Sequence[float]], seed: int = 0) -> tuple[int, int, int]:
    """Index of the column with the greatest mean, and the 95 % interval of that index over resampled rows.

    Rows are seeds: `columns[i][s]`.
    """
    table = np.array(columns)
    rows = np.random.default_rng(seed).integers(0, table.shape[1], (RESAMPLES, table.shape[1]))
    drawn = table[:, rows].mean(axis=2).argmax(axis=0)
    lo, hi = np.quantile(drawn, [0.025, 0.975], method="nearest")
    return int(table.mean(axis=1).argmax()), int(lo), int(hi)
