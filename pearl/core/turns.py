"""The survivor curve as a few columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from pearl.core.identity import remembered
from pearl.core.stations import Grid
from pearl.core.workload import WorkloadProfile

COLUMNS = attrgetter("survivors", "new_tokens", "response_tokens", "environment_s", "context_tokens")
BINS = 8
"""Neighbouring turns are computed as one, so that long trajectories cost no more than short ones. The first turn is
unlike the others and stays alone."""


@dataclass(frozen=True, slots=True)
class TurnBins:
    """Every array has shape (bins,)."""

    weight: Grid
    """Σ P_k: how many turns of the slowest trajectory the bin stands for."""
    live: Grid
    """Trajectories that are left, at least one."""
    new: Grid
    response: Grid
    before: Grid
    """Response of the turn before."""
    environment_s: Grid
    context: Grid

    @classmethod
    def of(cls, work: WorkloadProfile, batch: float, *, drain: bool = True) -> TurnBins:
        """Without `drain`, all `batch` trajectories take all S turns."""
        return _bins(work, batch, drain)


@remembered
def _bins(work: WorkloadProfile, batch: float, drain: bool) -> TurnBins:
    turns = work.turns
    columns = np.array(list(map(COLUMNS, turns))).T
    if not drain:
        columns = columns[:, : max(1, round(work.slowest_turns))]
        columns[0] = 1.0
    survivors = columns[0]
    taken = 1.0 - (1.0 - np.minimum(survivors, 1.0)) ** batch
    live = np.maximum(1.0, batch * survivors)
    before = np.concatenate([[0.0], columns[2][:-1]])
    rest = len(survivors) - 1
    bins = np.concatenate([[0], 1 + np.arange(rest) * min(BINS - 1, rest) // max(1, rest)])
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    weight = np.add.reduceat(taken, starts)
    table = np.stack([live, columns[1], columns[2], before, columns[3], columns[4]])
    means = np.add.reduceat(taken * table, starts, axis=1) / np.maximum(weight, 1e-12)
    return TurnBins(weight, *means)
