"""Whole runs in virtual time with faults: the interpreter of the fault search, for tests of the Pipeline Scheduler.

What the interpreter does and which rules it checks by itself is said in `docs/faults.md`.
"""

from __future__ import annotations

from pearl.core import events as ev
from pearl.core.events import Event, Instruction, Outcome
from pearl.core.pipeline import Pipeline
from pearl.core.trajectory import TrajectoryId
from pearl.sim.search.case import Case, small_run
from pearl.sim.search.world import World

settings = small_run


class Virtual:
    """A case, played to its end."""

    def __init__(self, case: Case) -> None:
        self.world = World(case)
        self.end = self.world.run()
        self.log: list[tuple[float, Event | Instruction]] = self.world.log
        self.pipeline: Pipeline = self.world.pipeline

    def of(self, kind: type) -> list:
        return [entry for _, entry in self.log if isinstance(entry, kind)]

    def trained(self) -> list[tuple[TrajectoryId, ...]]:
        return [group for batch in self.of(ev.TrainBatch) for group in batch.groups]

    def ends(self) -> dict[Outcome, int]:
        return {o: sum(e.outcome is o for e in self.of(ev.EndSample)) for o in Outcome}


def play(seed: int = 0, fault_rate: float = 0.0, **changes: object) -> Virtual:
    """A run of two fixed slots, played to its end."""
    return Virtual(Case(seed, small_run(**changes), fault_rate=fault_rate))
