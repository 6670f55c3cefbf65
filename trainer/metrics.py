"""Diagnostics of a step: sums and maxima over loss tokens, kept on the device and reduced over ranks once a step; and
counts of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from pearl.config.trainer import GrpoConfig
from trainer.batch import Batch
from trainer.bundle import Bundle
from trainer.grpo import Scores, is_clipped, k3, policy_ratio
from trainer.world import World

SUMS = (
    "loss",
    "tokens",
    "mismatch_kl",
    "logprob_delta_mean",
    "clip_share",
    "importance_cap_share",
    "importance_weight_mean",
    "entropy",
    "ratio_mean",
    "staleness_mean",
    "kl_to_initial",
)
MAXIMA = ("logprob_delta_max", "staleness_max")


class StepMetrics:
    """Adds up one step's micro-batches; all are means over loss tokens unless they end in `_max`.

    mismatch_kl             k3 estimate of KL(engine || trainer), at the weights before the step
    logprob_delta_*         |trainer - engine| log-prob of the same token (also differs by staleness)
    clip_share              tokens whose gradient the clip took away
    importance_cap_share    tokens whose importance weight was cut to the cap
    entropy                 of the next-token distribution, nats
    staleness_*             weight versions between sampling and this step
    kl_to_initial           k3 estimate of KL(policy || initial model); 0 without a reference model
    """

    def __init__(self, config: GrpoConfig, world: World) -> None:
        self._config = config
        self._world = world
        self._sums = torch.zeros(len(SUMS), dtype=torch.float64, device=world.device)
        self._maxima = torch.zeros(len(MAXIMA), dtype=torch.float64, device=world.device)

    @torch.no_grad()
    def add(self, scores: Scores, losses: Tensor, entropy: Tensor, advantages: Tensor, staleness: Tensor) -> None:
        """One micro-batch; all arguments have one element per loss token (none is fine)."""
        if not len(losses):
            return
        old = scores.old.detach()
        delta = old - scores.rollout
        ratio = policy_ratio(scores.current, old)
        weight = torch.exp(delta)
        cap = self._config.importance_cap
        parts = {
            "loss": losses,
            "tokens": torch.ones_like(losses),
            "mismatch_kl": k3(delta),
            "logprob_delta_mean": delta.abs(),
            "clip_share": is_clipped(ratio, advantages, self._config),
            "importance_cap_share": weight > cap,
            "importance_weight_mean": weight.clamp(max=cap),
            "entropy": entropy,
            "ratio_mean": ratio,
            "staleness_mean": staleness,
            "kl_to_initial": torch.zeros_like(losses)
            if scores.initial is None
            else k3(scores.initial - scores.current),
        }
        self._sums += torch.stack([parts[name].double().sum() for name in SUMS])
        maxima = torch.stack([delta.abs().max().double(), staleness.max().double()])
        self._maxima = torch.maximum(self._maxima, maxima)

    def reduce(self) -> dict[str, float]:
        """Means and maxima over all ranks, the same on each; collective. `loss` is the mean over `tokens`."""
        sums = dict(zip(SUMS, self._world.total(self._sums.tolist()), strict=True))
        maxima = dict(zip(MAXIMA, self._world.largest(self._maxima.tolist()), strict=True))
        tokens = sums.pop("tokens")
        return {name: value / max(1.0, tokens) for name, value in sums.items()} | maxima


def batch_counts(batch: Batch, updates: list[list[Bundle]], plans: list[list[list[list[Bundle]]]]) -> dict[str, float]:
    """What a step was given, and how it was cut: bundles of each update; and of each update, rank and micro-batch."""
    packed = [bundles for plan in plans for rank in plan for bundles in rank]
    padded = sum(len(bundles) * max(bundle.length for bundle in bundles) for bundles in packed if bundles)
    trained = [bundle for bundles in updates for bundle in bundles]
    rows = [row for bundle in trained for row in bundle.rows]
    computed, tokens = sum(bundle.length for bundle in trained), sum(row.length for row in rows)
    return {
        "groups": float(batch.groups),
        "zero_variance_groups": float(batch.zero_variance_groups),
        "trajectories": float(batch.trajectories),
        "without_tokens": float(batch.without_tokens),
        "reward_mean": batch.reward_mean,
        "tokens_trained": float(batch.tokens),
        "loss_tokens": float(sum(row.loss_tokens for row in rows)),
        "micro_batches": float(len(packed)),
        "padding_share": 1.0 - computed / padded if padded else 0.0,
        "shared_share": 1.0 - computed / tokens if tokens else 0.0,
    }
