"""From finished groups to training rows. Token ids are those of the rollout, in order; nothing is re-tokenised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pearl.config.trainer import GrpoConfig
from pearl.core.trajectory import SegmentKind, Trajectory, TrajectoryId
from trainer.grpo import group_advantages, is_zero_variance


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One trajectory up to its last generated token (what follows it cannot change the loss). Arrays have one length.

    `rollout_logprobs` and `versions` are 0 and -1 where `loss_mask` is False.
    """

    id: TrajectoryId
    token_ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    rollout_logprobs: NDArray[np.float32]
    versions: NDArray[np.int64]
    advantage: float

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def loss_tokens(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def prompt_tokens(self) -> int:
        """Tokens before the first generated one."""
        return int(self.loss_mask.argmax())


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that enter the loss, and counts of everything that was handed in."""

    rows: tuple[Row, ...]
    groups: int
    zero_variance_groups: int
    trajectories: int
    tokens: int
    """All tokens of all trajectories, those of dropped groups too."""
    without_tokens: int
    """Trajectories in which nothing was generated: they count in their group's mean, but have no row."""
    reward_mean: float


def has_signal(rows: Sequence[Row], config: GrpoConfig) -> bool:
    """Whether these rows can have a gradient at all. Without one there is no update (see `ZeroTrainer.train_step`)."""
    return any(row.advantage != 0.0 or config.kl_coefficient > 0.0 for row in rows)


def make_batch(groups: Sequence[Sequence[Trajectory]], config: GrpoConfig) -> Batch:
    """Rows with advantages from groups of finished trajectories, in the order given.

    Raises ValueError, naming the trajectory, for an empty batch, a group of fewer than 2 or of several tasks, a sample
    that appears twice, a reward or log-prob that is not finite, or a generated token without a token before it.
    """
    if not groups:
        raise ValueError("a batch without groups")
    rows: list[Row] = []
    zero_variance = without_tokens = 0
    seen: set[tuple[int, int]] = set()
    for group in groups:
        _check_group(group, seen)
        rewards = [trajectory.reward for trajectory in group]
        advantages = group_advantages(rewards, normalise_by_std=config.normalise_by_std)
        zero_variance += is_zero_variance(rewards)
        without_tokens += sum(trajectory.generated_tokens == 0 for trajectory in group)
        if is_zero_variance(rewards) and config.zero_variance == "drop":
            continue
        for trajectory, advantage in zip(group, advantages, strict=True):
            if trajectory.generated_tokens:
                rows.append(make_row(trajectory, advantage))
    everyone = [trajectory for group in groups for trajectory in group]
    return Batch(
        rows=tuple(rows),
        groups=len(groups),
        zero_variance_groups=zero_variance,
        trajectories=len(everyone),
        tokens=sum(len(s.token_ids) for trajectory in everyone for s in trajectory.segments),
        without_tokens=without_tokens,
        reward_mean=sum(trajectory.reward for trajectory in everyone) / len(everyone),
    )


def _check_group(group: Sequence[Trajectory], seen: set[tuple[int, int]]) -> None:
    if len(group) < 2:
        names = ", ".join(str(trajectory.id) for trajectory in group)
        raise ValueError(f"group of {len(group)} [{names}]: GRPO compares at least 2 trajectories of a task")
    for trajectory in group:
        if (trajectory.id.group, trajectory.task) != (group[0].id.group, group[0].task):
            raise ValueError(f"{trajectory.id} ({trajectory.task}) is in one group with {group[0].id}, another task")
        if trajectory.id.sample in seen:
            raise ValueError(f"sample {trajectory.id.sample} is twice in one batch")
        seen.add(trajectory.id.sample)
        if not math.isfinite(trajectory.reward):
            raise ValueError(f"{trajectory.id} has reward {trajectory.reward}")


def make_row(trajectory: Trajectory, advantage: float) -> Row:
    """One row; raises ValueError if nothing was generated, see `make_batch` for the rest."""
    segments = list(trajectory.segments)
    while segments and not (segments[-1].kind is SegmentKind.RESPONSE and segments[-1].token_ids):
        segments.pop()
    if not segments:
        raise ValueError(f"{trajectory.id} has no generated token to train on")
    token_ids: list[int] = []
    mask: list[bool] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for segment in segments:
        count = len(segment.token_ids)
        token_ids.extend(segment.token_ids)
        mask.extend([segment.kind is SegmentKind.RESPONSE] * count)
        logprobs.extend(segment.logprobs if segment.logprobs is not None else [0.0] * count)
        versions.extend([-1 if segment.version is None else segment.version] * count)
    if mask[0]:
        raise ValueError(f"{trajectory.id} begins with a generated token; its log-prob has no context to come from")
    row = Row(
        id=trajectory.id,
        token_ids=np.array(token_ids, dtype=np.int64),
        loss_mask=np.array(mask, dtype=np.bool_),
        rollout_logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array(versions, dtype=np.int64),
        advantage=advantage,
    )
    if not np.isfinite(row.rollout_logprobs).all():
        raise ValueError(f"{trajectory.id} has a rollout log-prob that is not finite")
    return row
