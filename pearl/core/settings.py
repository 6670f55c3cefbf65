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
    checkpoint_every_steps: int = 0
    """When: behind every so many steps and the last one. The trainer is not idle then. 0: whenever it likes."""
    kv_tokens_per_worker: int = 0
    """Context that one worker can hold at once; 0: unknown, only `requests_per_worker` counts."""

    def checkpoint_due(self, step: int) -> bool:
        every = self.checkpoint_every_steps
        return self.checkpoints and every > 0 and (step % every == 0 or step == self.steps)
