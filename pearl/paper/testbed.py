"""The source's testbed as a scenario of the simulator, in the frozen world or in another one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pearl.core.settings import PipelineSettings
from pearl.core.trajectory import TrajectoryId
from pearl.core.workload import EngineProfile
from pearl.paper.world import SEGMENTS, World, segment
from pearl.sim import availability
from pearl.sim.scenario import Scenario
from pearl.sim.simulator import Models
from pearl.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Testbed(Scenario):
    """`steps`: 0 for as many as the hours allow. `kv_share`: of the profile's KV memory. `trace` may be one
    of `SEGMENTS`, too."""

    world: World | None = None
    steps: int = 0
    kv_share: float = 1.0

    def availability(self) -> availability.Availability:
        if self.trace in SEGMENTS:
            return availability.read(segment(self.trace), self.preemptible_gpus, self.gpus_per_worker)
        return Scenario.availability(self)

    def make_workload(self) -> Workload:
        return self.world.workload(self.seed) if self.world else Scenario.make_workload(self)

    def models(self) -> Models:
        models = Scenario.models(self)
        if not self.world:
            return models
        return replace(
            models,
            engine=replace(
                models.engine,
                turn_overhead_s=self.world.turn_overhead_s,
                kv_capacity_tokens=int(self.kv_share * models.engine.kv_capacity_tokens),
            ),
            trainer=replace(models.trainer, utilisation=self.world.training_utilisation),
        )

    @property
    def affinity(self) -> float:
        return self.world.affinity if self.world else 1.0

    def lengths(self) -> list[int]:
        """Tokens of the trajectories of the first batch."""
        workload = self.make_workload()
        plans = [
            workload.plan(i // self.group_size, TrajectoryId(*divmod(i, self.group_size), 0)) for i in range(self.batch)
        ]
        return [min(self.max_tokens, sum(plan.new) + sum(plan.response)) for plan in plans]

    def pipeline(self, engine: EngineProfile) -> PipelineSettings:
        settings = Scenario.pipeline(self, engine)
        return replace(settings, affinity=self.affinity, steps=self.steps or settings.steps)
