"""Which layouts of N workers to look at: all of few, a coarse grid and then ever finer ones of many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pearl.core.makespan import Layouts, Seconds

EXHAUSTIVE_WORKERS = 16
"""Up to here every layout is looked at: 121 of them with mixed ones at 16."""
COARSE = 33
"""Points of a grid over the ratios; the best point's neighbours bound the next grid."""
COARSE_MIXED = 9
"""The same, along each side of the grid over (colocated, prefill) of mixed layouts."""
ROUNDS_MIXED = 5

Score = Callable[[Layouts], Seconds]
"""Seconds, infinite where infeasible."""


@dataclass(frozen=True, slots=True)
class Found:
    """Layouts that were looked at and their scores, in no order."""

    layouts: Layouts
    scores: Seconds


def colocated(workers: int) -> Layouts:
    return np.array([[0, 0, workers]], dtype=np.int64)


def ratios(workers: int) -> Layouts:
    """Every prefill-decode ratio, by ascending prefill count."""
    prefill = np.arange(1, workers, dtype=np.int64)
    return np.stack([prefill, workers - prefill, np.zeros_like(prefill)], axis=1)


def mixtures(workers: int) -> Layouts:
    """Every mixed layout."""
    prefill, decode = np.meshgrid(np.arange(1, workers - 1), np.arange(1, workers - 1), indexing="ij")
    rows = np.stack([prefill.ravel(), decode.ravel(), workers - prefill.ravel() - decode.ravel()], axis=1)
    return rows[rows[:, 2] > 0].astype(np.int64)


def search_ratios(layouts: Layouts, score: Score) -> Found:
    """Look for the least score among layouts sorted by prefill count, supposing that it falls and then rises."""
    seen: dict[int, float] = {}
    low, high = 0, len(layouts) - 1
    while low <= high:
        points = np.unique(np.linspace(low, high, min(COARSE, high - low + 1)).round().astype(int))
        fresh = np.array([point for point in points.tolist() if point not in seen], dtype=np.int64)
        if not len(fresh):
            break
        seen.update(zip(fresh.tolist(), score(layouts[fresh]).tolist(), strict=True))
        best = int(np.argmin([seen[point] for point in points.tolist()]))
        low, high = int(points[max(0, best - 1)]), int(points[min(len(points) - 1, best + 1)])
    order = list(seen)
    return Found(layouts[order], np.array([seen[point] for point in order]))


def search_mixtures(workers: int, score: Score) -> Found:
    """The same over mixed layouts: a grid that is centred on its best point and halved."""
    rows: list[Layouts] = []
    scores: list[Seconds] = []
    spans = [(1.0, workers - 2.0), (0.0, 1.0)]
    for _ in range(ROUNDS_MIXED):
        alone, share = (axis.ravel() for axis in np.meshgrid(*(np.linspace(*span, COARSE_MIXED) for span in spans)))
        count = alone.round().astype(np.int64)
        prefill = (1 + share * (workers - count - 2)).round().astype(np.int64)
        layouts = np.unique(np.stack([prefill, workers - count - prefill, count], axis=1), axis=0)
        found = score(layouts)
        rows.append(layouts)
        scores.append(found)
        if not np.isfinite(found).any():
            break
        best = layouts[int(np.argmin(found))]
        centre = (float(best[2]), (best[0] - 1) / max(1.0, workers - best[2] - 2.0))
        limits = ((1.0, workers - 2.0), (0.0, 1.0))
        quarters = [(span[1] - span[0]) / 4 for span in spans]
        spans = [
            (max(limit[0], middle - quarter), min(limit[1], middle + quarter))
            for limit, middle, quarter in zip(limits, centre, quarters, strict=True)
        ]
    layouts, first = np.unique(np.concatenate(rows), axis=0, return_index=True)
    return Found(layouts, np.concatenate(scores)[first])
