"""`pipeline:` asynchronous GRPO: batches, staleness, retries."""

from typing import Literal

from pydantic import Field

from pearl.config.section import Section


class PipelineConfig(Section):
    steps: int = Field(5, ge=1)
    """Optimizer steps (batches) of the run."""
    groups_per_batch: int = Field(4, ge=1)
    """Tasks drawn per batch."""
    task_order: Literal["shuffled", "given"] = "shuffled"
    """`shuffled`: all tasks once per epoch, in an order drawn from the seed. `given`: as the family lists them."""
    group_size: int = Field(4, ge=2)
    """Samples per task (GRPO's G). A batch has groups_per_batch x group_size trajectories."""
    max_staleness_steps: int = Field(1, ge=0)
    """A sample's oldest token may come from weights at most this many versions behind the step that trains it.
    0 is synchronous: rollout waits for the update."""
    batch_order: Literal["drawn", "finished"] = "drawn"
    """`drawn`: batches take groups in the order they were drawn (reproducible, no bias to short answers).
    `finished`: first finished, first trained (less waiting on long tails; slow groups can grow stale and be
    dropped)."""
    on_weight_update: Literal["abort", "finish"] = "abort"
    """Requests in flight when new weights arrive: `abort` keeps their tokens and goes on with the new weights, `finish`
    lets them end first (one version per turn, at the price of an idle tail)."""
    max_response_tokens: int = Field(128, ge=1)
    """Generated tokens of one turn."""
    max_trajectory_tokens: int = Field(1024, ge=32)
    """All tokens of a trajectory: prompt, responses and observations."""
    max_concurrent_trajectories: int = Field(64, ge=1)
    """Trajectories (open environments) at once."""
    sample_attempts: int = Field(3, ge=1)
    """Attempts at one sample before it ends as failed. A lost worker is not the task's fault."""
    min_group_size: int = Field(2, ge=2)
    """A group whose failed members leave fewer than this many is dropped (all its samples end as failed) and replaced;
    with more, it trains with the members that are left, and advantages are computed over those."""
    quarantine_after: int = Field(3, ge=1)
    """After this many consecutive groups with a member that the task itself failed, a task is no longer drawn."""
    worker_restarts: int = Field(8, ge=0)
    """Restarts of one worker slot before it is given up."""
