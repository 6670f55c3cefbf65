"""The source's testbed as a scenario of the simulator, in the frozen world or in another one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pearl.core.settings import PipelineSettings
from pearl.core.trajectory import TrajectoryId
from pearl.core.workload import EngineProfile
from pearl.paper.world import World
from pearl.sim.scenario import Scenario
from pearl.sim.simulator import Models
from pearl.sim.workload import Workload


@dataclass(frozen=True, slots=True)
class Testbed(Scenario):
    """`steps`: 0 for as many as the hours allow."""

    world: World | None = None
    steps: int = 0

    def make_workload(self) -> Workload:
        return self.world.workload(self.seed) if self.world else Scenario.make_workload(self)

    def models(self) -> Models:
        models = Scenario.models(self)
        if not self.world:
            return models
        return replace(
            models,
            engine=replace(models.engine, turn_overhead_s=self.world.turn_overhead_s),
            trainer=replace(models.trainer, utilisation=self.world.training_utilisation),
        )

    def lengths(self) -> list[int]:
        """Tokens of the trajectories of the first batch."""
        workload = self.make_workload()
        plans = [
            workload.plan(i // self.group_size, TrajectoryId(*divmod(i, self.group_size), 0)) for i in range(self.batch)
        ]
        return [min(self.max_tokens, sum(plan.new) + sum(plan.response)) for plan in plans]

    def pipeline(self, engine: EngineProfile) -> PipelineSettings:
        settings = Scenario.pipeline(self, engine)
        if self.world:
            settings = replace(settings, affinity=self.world.affinity)
        return replace(settings, steps=self.steps) if self.steps else settings
