"""A mean with its bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 500
"""Resamples at once: bounds the memory, not the result."""


@dataclass(frozen=True, slots=True)
class Interval:
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in asdict(self).items()}


def bootstrap(values: Sequence[float], seed: int) -> Interval:
    """Mean of `values` and its 95 % percentile interval over resamples of them; one seed, one interval.

    Raises ValueError without values.
    """
    if not values:
        raise ValueError("no mean without values")
    data, rng = np.asarray(values, dtype=np.float64), np.random.default_rng(seed)
    means = np.concatenate(
        [data[rng.integers(0, len(data), (CHUNK, len(data)))].mean(axis=1) for _ in range(RESAMPLES // CHUNK)]
    )
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(float(data.mean()), float(low), float(high))
