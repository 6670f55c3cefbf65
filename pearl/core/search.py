"""Which layouts of N workers to look at: all of few, a coarse grid and then ever finer ones of many.

Of mixed layouts of many workers, only those whose pairs have about the ratio that is best without colocated workers:
what serves a share of the batch best is what serves all of it best, on fewer workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pearl.core.feasible import Constraints
from pearl.core.makespan import Layouts, Seconds

GRID = 33
"""Points of a grid; the neighbours of its best point bound the next one. Up to so many points, all are looked at."""
ALL_MIXED = 6
"""Workers up to which every mixed layout is looked at."""


@dataclass(frozen=True, slots=True)
class Found:
    """Layouts that were looked at, in no order: predicted seconds, and whether they are feasible."""

    layouts: Layouts
    seconds: Seconds
    feasible: NDArray[np.bool_]
    constraints: Constraints

    @property
    def scores(self) -> Seconds:
        """Infinite where infeasible."""
        result: Seconds = np.where(self.feasible, self.seconds, np.inf)
        return result

    @classmethod
    def joined(cls, parts: list[Found]) -> Found:
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.layouts for part in parts]),
            np.concatenate([part.seconds for part in parts]),
            np.concatenate([part.feasible for part in parts]),
            Constraints.joined([part.constraints for part in parts]),
        )


Look = Callable[[Layouts], Found]


def colocated(workers: int) -> Layouts:
    return np.array([[0, 0, workers]], dtype=np.int64)


def ratios(workers: int) -> Layouts:
    """Every prefill-decode ratio, by ascending prefill count."""
    prefill = np.arange(1, workers, dtype=np.int64)
    return np.stack([prefill, workers - prefill, np.zeros_like(prefill)], axis=1)


def mixtures(workers: int) -> Layouts:
    """Every mixed layout: some N²/2 of them."""
    prefill, decode = np.meshgrid(np.arange(1, workers - 1), np.arange(1, workers - 1), indexing="ij")
    rows = np.stack([prefill.ravel(), decode.ravel(), workers - prefill.ravel() - decode.ravel()], axis=1)
    return rows[rows[:, 2] > 0].astype(np.int64)


@lru_cache(64)
def mixtures_of_few(workers: int) -> Layouts:
    """Every mixed layout of up to `ALL_MIXED` workers; of more, every ratio beside a third and two thirds of colocated
    workers. Not to change."""
    rows = mixtures(workers)
    return rows if workers <= ALL_MIXED else rows[np.isin(rows[:, 2], [round(workers / 3), round(workers * 2 / 3)])]


@lru_cache(64)
def mixtures_along(workers: int, prefill_share: float) -> Layouts:
    """Mixed layouts whose pairs have about this share of prefill workers, by colocated count. Not to change."""
    alone = np.arange(1, workers - 1, dtype=np.int64)
    wanted = prefill_share * (workers - alone)
    prefill = np.clip(np.rint(wanted).astype(np.int64), 1, workers - alone - 1)
    return np.stack([prefill, workers - alone - prefill, alone], axis=1)


def search(layouts: Layouts, look: Look) -> Found:
    """Look for the least score along `layouts`, supposing that it falls and then rises; at all of few."""
    if len(layouts) <= GRID:
        return look(layouts)
    parts: list[Found] = []
    seen: dict[int, float] = {}
    low, high = 0, len(layouts) - 1
    while True:
        points = np.unique(np.linspace(low, high, min(GRID, high - low + 1)).round().astype(np.int64))
        fresh = points[[point not in seen for point in points.tolist()]]
        if not len(fresh):
            return Found.joined(parts)
        parts.append(look(layouts[fresh]))
        seen.update(zip(fresh.tolist(), parts[-1].scores.tolist(), strict=True))
        best = int(np.argmin([seen[point] for point in points.tolist()]))
        low, high = int(points[max(0, best - 1)]), int(points[min(len(points) - 1, best + 1)])
