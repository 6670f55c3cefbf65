"""The whole of a run's YAML."""

from __future__ import annotations

from pydantic import Field, model_validator

from pearl.config.cluster import ClusterConfig
from pearl.config.deadlines import DeadlinesConfig
from pearl.config.elastic import ElasticConfig
from pearl.config.engine import EngineConfig
from pearl.config.environment import EnvironmentConfig
from pearl.config.model import ModelConfig
from pearl.config.pipeline import PipelineConfig
from pearl.config.section import Section
from pearl.config.trainer import TrainerConfig


class CheckpointConfig(Section):
    every_steps: int = Field(0, ge=0)
    """A checkpoint after every this many steps and after the last one; 0 writes none."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    keep_weights: bool = True
    """Keep the weights of the last step (and of each checkpoint) as a snapshot in `run_dir/weights/`."""


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run; its directory is `run_root/name-<time>` unless `run_dir` is given."""
    run_root: str = "runs"
    """Folder for run directories."""
    run_dir: str | None = None
    """This very directory; it must be new or empty."""
    seed: int = Field(0, ge=0)
    """Seed of task order, sampling and initialisation."""
    model: ModelConfig = ModelConfig()
    cluster: ClusterConfig = ClusterConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    pipeline: PipelineConfig = PipelineConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    elastic: ElasticConfig = ElasticConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()

    @model_validator(mode="after")
    def sizes_fit(self) -> RunConfig:
        p, t = self.pipeline, self.trainer
        trajectories = p.groups_per_batch * p.group_size
        if trajectories % (t.ranks * t.grpo.minibatches):
            raise ValueError(
                f"pipeline.groups_per_batch x pipeline.group_size = {trajectories} trajectories do not divide by "
                f"trainer.ranks x trainer.grpo.minibatches = {t.ranks} x {t.grpo.minibatches}; change one of them"
            )
        if p.min_group_size > p.group_size:
            raise ValueError(
                f"pipeline.min_group_size = {p.min_group_size} is above pipeline.group_size = {p.group_size}; lower it"
            )
        if p.max_trajectory_tokens > self.model.context_tokens:
            raise ValueError(
                f"pipeline.max_trajectory_tokens = {p.max_trajectory_tokens} is above model.context_tokens = "
                f"{self.model.context_tokens}; lower the first or raise the second"
            )
        if p.max_trajectory_tokens > t.micro_batch_tokens:
            raise ValueError(
                f"trainer.micro_batch_tokens = {t.micro_batch_tokens} cannot hold one trajectory of "
                f"pipeline.max_trajectory_tokens = {p.max_trajectory_tokens}; raise it"
            )
        if p.max_trajectory_tokens > self.engine.max_total_tokens:
            raise ValueError(
                f"engine.max_total_tokens = {self.engine.max_total_tokens} cannot hold one trajectory of "
                f"pipeline.max_trajectory_tokens = {p.max_trajectory_tokens}; raise it"
            )
        if t.grpo.minibatches > 1 and trajectories // t.grpo.minibatches < t.ranks:
            raise ValueError("each trainer rank needs a trajectory per minibatch; lower trainer.grpo.minibatches")
        if fault := t.fault():
            raise ValueError(fault)
        if fault := self.elastic.fault(t.ranks_here, self.engine.tensor_parallel, t.zero_stage):
            raise ValueError(fault)
        e = self.elastic
        if fault := self.cluster.fault(e.preemptible_slots, e.availability.file, e.splits):
            raise ValueError(fault)
        return self
