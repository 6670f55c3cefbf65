"""Which worker serves the next turn: the least loaded one, unless the trajectory's prefix is cached elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from pearl.core.state import WorkerSlot

AFFINITY_SLACK = 2
"""A worker that holds the prefix is taken even if it has this many requests more than the least loaded one: one more
decode neighbour costs less than a prefill of the whole prefix."""


def choose_worker(workers: Iterable[WorkerSlot], capacity: int, last: str | None) -> WorkerSlot | None:
    """The worker for the next turn, or None if all are full.

    `capacity`: requests that one worker may have in flight; `last`: the worker of the trajectory's previous turn.
    """
    best: WorkerSlot | None = None
    affine: WorkerSlot | None = None
    for worker in workers:
        load = len(worker.in_flight)
        if load >= capacity:
            continue
        if worker.name == last:
            affine = worker
        if best is None or load < len(best.in_flight):
            best = worker
    if affine is not None and best is not None and len(affine.in_flight) - len(best.in_flight) <= AFFINITY_SLACK:
        return affine
    return best
