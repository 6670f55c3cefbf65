"""The GRPO objective as pure functions of flat tensors: one element per generated token, any float dtype, any device.

Sources: group-relative advantages and the k3 estimator as in GRPO (arXiv 2402.03300, eq. 4); asymmetric clip and the
mean over all tokens of the batch as in DAPO (arXiv 2503.14476, eq. 8); truncated importance sampling between the
engine that sampled and the trainer as in "Your efficient RL framework secretly brings you off-policy RL training"
(Yao et al., 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pearl.config.trainer import GrpoConfig

STD_FLOOR = 1e-6
"""Added to a group's standard deviation, so that rewards that differ by rounding only are not blown up."""


def is_zero_variance(rewards: Sequence[float]) -> bool:
    return max(rewards) == min(rewards)


def group_advantages(rewards: Sequence[float], *, normalise_by_std: bool) -> list[float]:
    """Reward minus the group's mean, over the group's sample standard deviation (n - 1) where asked; they sum to 0.

    Raises ValueError for a group of fewer than 2, which has no baseline.
    """
    if len(rewards) < 2:
        raise ValueError(f"a group of {len(rewards)} has no baseline; GRPO needs at least 2")
    if is_zero_variance(rewards):
        return [0.0] * len(rewards)
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    if normalise_by_std:
        centred = centred / (values.std() + STD_FLOOR)
    return centred.tolist()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - x - 1: per sample, never negative, its mean over samples of q is KL(q || p) for x = log p - log q."""
    return torch.expm1(log_ratio) - log_ratio


def importance_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float) -> Tensor:
    """min(exp(trainer - rollout), cap) per token, without gradient."""
    return torch.exp(old_logprobs.detach() - rollout_logprobs).clamp(max=cap)


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return torch.exp(logprobs - old_logprobs.detach())


def is_clipped(ratio: Tensor, advantages: Tensor, config: GrpoConfig) -> Tensor:
    """Whether the clip takes a token's gradient away (bool)."""
    above = (ratio > 1.0 + config.clip_high) & (advantages > 0)
    below = (ratio < 1.0 - config.clip_low) & (advantages < 0)
    return above | below


@dataclass(frozen=True, slots=True)
class Scores:
    """Natural-log probabilities of the same generated tokens, shape (tokens,), fp32, at the sampling temperature."""

    current: Tensor
    """Of the weights that are being trained, with gradient."""
    old: Tensor
    """Of the weights before the batch's first update."""
    rollout: Tensor
    """Recorded by the engine that sampled the tokens."""
    initial: Tensor | None = None
    """Of the initial model; needed only with kl_coefficient > 0."""


def token_losses(scores: Scores, advantages: Tensor, config: GrpoConfig) -> Tensor:
    """Loss of each token, to be summed and divided by the number of loss tokens of all ranks and micro-batches.

    weight x -min(ratio x advantage, clip(ratio, 1 - clip_low, 1 + clip_high) x advantage)
      + kl_coefficient x k3(initial - current)
    """
    ratio = policy_ratio(scores.current, scores.old)
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    weight = importance_weights(scores.old, scores.rollout, config.importance_cap)
    loss = -weight * torch.minimum(ratio * advantages, clipped * advantages)
    if config.kl_coefficient > 0.0:
        if scores.initial is None:
            raise ValueError("kl_coefficient > 0 needs the initial model's log-probs")
        loss = loss + config.kl_coefficient * k3(scores.initial.detach() - scores.current)
    return loss
