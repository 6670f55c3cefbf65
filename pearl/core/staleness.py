"""How far rollout may run ahead of training.

The batch of step s is trained by the weights after step s - 1, so a token that the weights after step t generated is
s - 1 - t steps stale (t = 0: the initial model). Admission keeps that at or below the bound *before* any token is
generated (capacity, as in AReaL); `is_stale` is the check at the other end, for groups that were overtaken.
"""


def groups_admissible(published_step: int, max_staleness_steps: int, groups_per_batch: int, steps: int) -> int:
    """Groups that may have been drawn so far (dropped ones not counted), given the step of the newest weights."""
    return min(published_step + max_staleness_steps + 1, steps) * groups_per_batch


def is_stale(oldest_step: int, step: int, max_staleness_steps: int) -> bool:
    """Whether a sample whose oldest token is of the weights after `oldest_step` is too old for `step` (from 1)."""
    return step - 1 - oldest_step > max_staleness_steps
