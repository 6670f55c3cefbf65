"""Configuration of a run: pydantic models of the YAML (`run.py`), read by `load.py`."""

from pearl.config.cluster import ClusterConfig
from pearl.config.deadlines import DeadlinesConfig
from pearl.config.elastic import AvailabilityConfig, ElasticConfig
from pearl.config.engine import EngineConfig, SamplingConfig
from pearl.config.environment import EnvironmentConfig, SandboxConfig
from pearl.config.model import ModelConfig
from pearl.config.pipeline import PipelineConfig
from pearl.config.run import CheckpointConfig, RunConfig
from pearl.config.trainer import GrpoConfig, ScheduleConfig, TrainerConfig

__all__ = [
    "AvailabilityConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "DeadlinesConfig",
    "ElasticConfig",
    "EngineConfig",
    "EnvironmentConfig",
    "GrpoConfig",
    "ModelConfig",
    "PipelineConfig",
    "RunConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ScheduleConfig",
    "TrainerConfig",
]
