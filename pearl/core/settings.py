"""What the machines need of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pearl.core.autoscaler import AutoscalerSettings


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """What the Pipeline Scheduler needs of the configuration (see `pearl/config/pipeline.py` for the meanings)."""

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
    affinity: float = 1.0
    """Share of turns that ask for the worker with their prefix; the others go to whoever has least to do."""

    def checkpoint_due(self, step: int) -> bool:
        every = self.checkpoint_every_steps
        return self.checkpoints and every > 0 and (step % every == 0 or step == self.steps)


class Borrowing(StrEnum):
    """Whether training GPUs are borrowed between updates."""

    NEVER = "never"
    ALWAYS = "always"
    """Whenever the trainer waits."""
    GATED = "gated"
    """Where the benefit gate says so."""


class Roles(StrEnum):
    """Who decides the roles of workers."""

    COLOCATED = "colocated"
    FIXED = "fixed"
    """Prefill and decode workers in one ratio, whatever the load."""
    DYNAMIC = "dynamic"
    """The PD Decision Engine."""


class OnCancel(StrEnum):
    """What becomes of the healthy workers of a cancelled expansion."""

    REGROUP = "regroup"
    """They form a fresh one: their engines are started already, which is nearly all that an expansion costs."""
    RELEASE = "release"


@dataclass(frozen=True, slots=True)
class ElasticSettings:
    """Policies of the Elastic Scheduler. With the defaults nothing but losses and notices changes a worker."""

    inter_scale: bool = False
    """Slots that join are taken in."""
    intra_scale: Borrowing = Borrowing.NEVER
    roles: Roles = Roles.COLOCATED
    fixed_ratio: tuple[int, int] = (1, 1)
    """Prefill to decode workers, with `Roles.FIXED`."""
    on_cancel: OnCancel = OnCancel.REGROUP
    join_window_s: float = 5.0
    """Slots that join within it of an expansion's begin, before its weights are fetched, join that expansion."""
    preparation_prior_s: float = 67.34
    """From a slot's joining to its admission, before one was measured (56.29 + 11.05 s in the source)."""
    lifetime_factor: float = 2.0
    """A slot is declined if it is expected to live less than this many preparations: it would not repay its own."""
    notice_margin_s: float = 2.0
    """So long before the end of a notice an engine that has not left yet is ended by force."""
    return_deadline_s: float = 30.0
    """So long after a return began, overlap workers that are not asleep yet are ended by force."""
    overlap: bool = False
    """Layouts and borrowing are decided for all batches in flight; if not, for one alone, as in the source."""
    partial_borrowing: bool = True
    """The gate may take some of the training GPUs; if not, all or none, as in the source."""
    borrow_prior_s: float = 6.26
    return_prior_s: float = 3.18
    """Durations of borrowing and returning before one was measured (the source's for an 8B model)."""
    cold_start_windows: int = 10
    """Borrowings over which the start of an overlap engine, which then stays, is to repay itself."""
    average_factor: float = 0.3
    """Weight of a new measurement in the averages of the durations above."""
    autoscale: AutoscalerSettings | None = None
    """How many slots to ask for; None: whoever runs the cluster says it."""
