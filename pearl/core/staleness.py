"""How far rollout may run ahead of training.

Weights of version v exist after optimizer step v (v = 0: the initial model). The batch of step s is trained by weights
s - 1, so a token of version v in it is s - 1 - v steps stale. Admission keeps that at or below the bound *before* any
token is generated (capacity, as in AReaL); `is_stale` is the check at the other end, for groups that were overtaken.
"""


def groups_admissible(version: int, max_staleness_steps: int, groups_per_batch: int, steps: int) -> int:
    """Groups that may have been drawn so far (dropped ones not counted), given the newest published version."""
    return min(version + max_staleness_steps + 1, steps) * groups_per_batch


def is_stale(oldest_version: int, step: int, max_staleness_steps: int) -> bool:
    """Whether a sample whose oldest token is of `oldest_version` may no longer be trained in `step` (from 1)."""
    return step - 1 - oldest_version > max_staleness_steps
