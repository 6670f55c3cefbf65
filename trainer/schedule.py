"""Learning-rate schedule as a pure function of the step number, so that nothing of it needs a checkpoint."""

from __future__ import annotations

import math

from pearl.config.trainer import ScheduleConfig


def learning_rate_ratio(step: int, total_steps: int, schedule: ScheduleConfig) -> float:
    """Share of the peak learning rate at optimizer step `step`, counted from 1; `total_steps` is the run's last step.

    Warm-up: step / warmup_steps, so the peak is reached at step `warmup_steps`. After it `linear` and `cosine` fall to
    `min_ratio`, which holds at `total_steps` and beyond. Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"step {step}: optimizer steps are counted from 1")
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    falling = max(1, total_steps - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / falling)
    left = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_ratio + (1.0 - schedule.min_ratio) * left
