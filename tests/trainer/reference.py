"""GRPO once more, written as plainly as can be: one trajectory at a time, all logits, Python loops, torch's AdamW."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from pearl.config.trainer import TrainerConfig
from pearl.core.trajectory import SegmentKind, Trajectory
from pearl.models import resolve_model
from trainer.batch import make_row
from trainer.bundle import bundle, rows_of
from trainer.plan import balance


def load() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        resolve_model("tiny-random-llama"), dtype=torch.float32, attn_implementation="eager"
    )


def score(model: Any, trajectory: Trajectory, temperature: float) -> list[torch.Tensor]:
    """Log-prob of each generated token, in order."""
    tokens = trajectory.token_ids
    table = torch.log_softmax(model(torch.tensor([tokens])).logits[0] / temperature, dim=-1)
    scores, place = [], 0
    for segment in trajectory.segments:
        for token in segment.token_ids:
            if segment.kind is SegmentKind.RESPONSE:
                scores.append(table[place - 1, token])
            place += 1
    return scores


def advantages(rewards: Sequence[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


class ReferenceTrainer:
    """Same results as ZeroTrainer with `zero_variance: drop`, many times slower."""

    def __init__(self, config: TrainerConfig, temperature: float = 1.0) -> None:
        self.config, self.temperature = config, temperature
        self.model, self.initial = load(), load()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay
        )
        self.gradients: dict[str, torch.Tensor] = {}

    def train_step(self, groups: list[list[Trajectory]]) -> tuple[float, float]:
        """Mean loss over tokens, mean gradient norm over updates."""
        kept = [group for group in groups if len({trajectory.reward for trajectory in group}) > 1]
        members = [
            (trajectory, advantage)
            for group in kept
            for trajectory, advantage in zip(group, advantages([t.reward for t in group]), strict=True)
        ]
        with torch.no_grad():
            old = {t.id: [float(s) for s in score(self.model, t, self.temperature)] for t, _ in members}
        # Which rows share an update is the one thing taken over.
        minibatches = self.config.grpo.minibatches
        rows = [make_row(*member) for member in members]
        split = balance(bundle(rows, self.config.micro_batch_tokens, minibatches), minibatches)
        loss_sum, tokens_sum, norms = 0.0, 0, []
        for part in split:
            chosen = {row.id for row in rows_of(part)}
            self.optimizer.zero_grad()
            losses = [
                loss for t, advantage in members if t.id in chosen for loss in self._losses(t, advantage, old[t.id])
            ]
            torch.stack(losses).mean().backward()
            self.gradients = {n: p.grad.clone() for n, p in self.model.named_parameters()}
            limit = self.config.gradient_clip or math.inf
            norms.append(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit).item())
            self.optimizer.step()
            loss_sum += float(torch.stack(losses).sum().detach())
            tokens_sum += len(losses)
        return loss_sum / tokens_sum, sum(norms) / len(norms)

    def _losses(self, trajectory: Trajectory, advantage: float, old: list[float]) -> list[torch.Tensor]:
        grpo = self.config.grpo
        rollout = [p for s in trajectory.segments if s.logprobs is not None for p in s.logprobs]
        current = score(self.model, trajectory, self.temperature)
        with torch.no_grad():
            initial = score(self.initial, trajectory, self.temperature)
        losses = []
        for now, before, sampled, first in zip(current, old, rollout, initial, strict=True):
            ratio = torch.exp(now - before)
            clipped = torch.clamp(ratio, 1 - grpo.clip_low, 1 + grpo.clip_high)
            weight = min(math.exp(before - sampled), grpo.importance_cap)
            kl = torch.exp(first - now) - (first - now) - 1
            losses.append(-weight * torch.min(ratio * advantage, clipped * advantage) + grpo.kl_coefficient * kl)
        return losses
