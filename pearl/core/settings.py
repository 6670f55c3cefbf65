"""What the Pipeline machine needs of the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What the machine needs of the configuration (see `pearl/config/pipeline.py` for the meanings)."""

    steps: int
    groups_per_batch: int
    group_size: int
    max_staleness_steps: int
    in_drawn_order: bool
    abort_on_update: bool
    max_response_tokens: int
    max_trajectory_tokens: int
    max_concurrent_trajectories: int
    requests_per_worker: int
    sample_attempts: int
    min_group_size: int
    quarantine_after: int
    worker_restarts: int
    checkpoints: bool = False
    """Whether checkpoints are written, so that a lost trainer can be replaced."""
