"""A closed circle of stations: how long one round takes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Grid = NDArray[np.float64]
"""Shape (rows, columns), or what broadcasts to it."""
Stations = NDArray[np.float64]
"""Shape (stations, rows, columns)."""
NEWTON = 2
"""Steps; the start is within a few per cent of the root, and Newton's error is squared each time."""


def cycle_s(delay: Grid, own: Stations, ahead: Stations) -> Grid:
    """The root of C = delay + Σ α·C/(C - q) above every q, for stations with work α (`own`) and q (`ahead`).

    α is a visitor's own work, q what the others bring each round and is served before it. The difference of both sides
    is concave and rises, so Newton's method stays below the root if it starts there; it starts at the largest of the
    rounds with one station that queues and others that do not, which solve a quadratic equation.
    """
    alone = delay + _summed(own)
    total = alone + ahead
    root = 0.5 * (total + np.sqrt(np.maximum(total * total - 4.0 * (alone - own) * ahead, 0.0)))
    cycle: Grid = np.maximum.reduce(root)
    for _ in range(NEWTON):
        gap = np.maximum(cycle - ahead, 1e-12)
        visit = own / gap
        slope = 1.0 + _summed(visit * ahead / gap)
        cycle = cycle - (cycle - delay - cycle * _summed(visit)) / slope
    return cycle


def _summed(stations: Stations) -> Grid:
    """Over the stations; faster than `sum` for a few."""
    total: Grid = np.add.reduce(stations)
    return total
