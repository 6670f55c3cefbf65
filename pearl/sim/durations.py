"""How long operations on workers and on the trainer take, and the jitter on them.

The sums are the source's (arXiv 2609.35158, evaluation); how they divide over our instructions is our choice, since the
source prints the sums only: expanding = starting the engine + its first weights; borrowing = offloading the trainer +
resuming the engine + its weights; returning = releasing the engine + reloading the trainer. Overlap engines start once,
before the trainer, and release their memory then; only one that was lost starts again when its GPUs are lent.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

OFFLOAD_SHARE = 0.5
"""Of the activation."""
RESUME_SHARE = 0.2
"""Of the activation; the rest is the first synchronisation."""
RELEASE_SHARE = 0.25
"""Of the deactivation; the rest is the reload."""


@dataclass(frozen=True, slots=True)
class Durations:
    """Seconds; Qwen3-8B's by default."""

    prepare_s: float = 56.29
    finalise_s: float = 11.05
    activate_s: float = 6.26
    deactivate_s: float = 3.18
    role_switch_s: float = 0.5
    abort_s: float = 0.05
    stop_s: float = 1.0
    sync_fixed_s: float = 1.0
    """Of a weight update, beside the transfer: pausing, reading back and comparing."""
    publish_fixed_s: float = 1.0
    snapshot_bytes_per_s: float = 25e9
    """Of one host's link, for weights."""
    trainer_start_s: float = 40.0
    environment_worker_start_s: float = 2.0
    jitter_cv: float = 0.1
    """Standard deviation of each duration by its mean."""

    def jittered(self, seconds: float, rng: random.Random) -> float:
        return max(0.2, rng.gauss(1.0, self.jitter_cv)) * seconds if self.jitter_cv else seconds
