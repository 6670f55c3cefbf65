"""Log-probs of chosen tokens without the logits of all the others.

Two parts. A hook on the model's output head keeps only the hidden states that predict a loss token, so logits have
shape (loss tokens, vocabulary) and not (rows x longest, vocabulary). And one autograd function turns them into
log-probs by blocks of rows, so that fp32 copies exist for one block at a time.

Bytes at the peak, with V the vocabulary (49152 for SmolLM2) and K the loss tokens of a micro-batch:
K x V x (2 + 2) in bfloat16 (logits and their gradient), x (4 + 4) in float32, plus BLOCK x V x 12; that is 197 KB or
393 KB a token and 38 MB. Taking log_softmax of all positions in fp32 costs 12 bytes and more per position and entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

BLOCK = 64
"""Tokens whose vocabulary rows are held in fp32 at once."""


class TokenScores(NamedTuple):
    """Both (loss tokens,) fp32, natural log."""

    logprobs: Tensor
    entropy: Tensor
    """Exact entropy of the whole next-token distribution, without gradient."""


class _BlockwiseLogProbs(torch.autograd.Function):
    """log softmax(logits / temperature)[target] per row of (tokens, vocabulary) logits, and the row's entropy."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        tokens = len(targets)
        logprobs = torch.empty(tokens, dtype=torch.float32, device=logits.device)
        entropy, log_sum = torch.empty_like(logprobs), torch.empty_like(logprobs)
        for start in range(0, tokens, BLOCK):
            part = slice(start, start + BLOCK)
            scaled = logits[part].float() / temperature
            top = scaled.max(dim=-1, keepdim=True).values
            shares = torch.exp(scaled - top)
            total = shares.sum(dim=-1)
            log_sum[part] = top.squeeze(-1) + total.log()
            entropy[part] = log_sum[part] - torch.linalg.vecdot(shares, scaled) / total
            logprobs[part] = scaled.gather(-1, targets[part, None]).squeeze(-1) - log_sum[part]
        ctx.save_for_backward(logits, targets, log_sum)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, log_sum = ctx.saved_tensors
        slopes = grads[0] / ctx.temperature
        result = torch.empty_like(logits)
        for start in range(0, len(targets), BLOCK):
            part = slice(start, start + BLOCK)
            slope = slopes[part, None]
            block = torch.exp(logits[part].float() / ctx.temperature - log_sum[part, None]).mul_(-slope)
            block.scatter_add_(-1, targets[part, None], slope)
            result[part] = block
        return result, None, None


def logprobs_from_logits(logits: Tensor, targets: Tensor, temperature: float) -> TokenScores:
    """(tokens, vocabulary) logits in any float dtype and (tokens,) int64 targets to fp32 scores at `temperature`.

    A temperature of 0 (greedy sampling) counts as 1: the log-prob of an argmax is 0 and teaches nothing.
    """
    return TokenScores(*_BlockwiseLogProbs.apply(logits, targets, temperature if temperature > 0.0 else 1.0))


class TokenScorer:
    """Scores chosen tokens with a Hugging Face causal language model, plain or wrapped in a DeepSpeed engine.

    Make it before DeepSpeed wraps the model. It works on any model whose `get_output_embeddings()` is the last module
    before (element-wise) treatment of the logits, tied or not, and under all ZeRO stages: the head runs as the module
    it is, so that ZeRO-3 gathers its weight.
    """

    def __init__(self, model: nn.Module) -> None:
        head = model.get_output_embeddings()
        if head is None:
            raise ValueError(f"{type(model).__name__} has no output embeddings; it is no causal language model")
        self._positions: Tensor | None = None
        head.register_forward_pre_hook(self._select)

    def _select(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self._positions is None:
            return None
        hidden, *rest = inputs
        return (hidden.flatten(0, 1).index_select(0, self._positions).unsqueeze(0), *rest)

    def score(
        self,
        forward: Callable[..., Any],
        input_ids: Tensor,
        positions: Tensor,
        targets: Tensor,
        temperature: float,
        **shaped: Tensor,
    ) -> TokenScores:
        """`forward` is the model or its engine; see `MicroBatch` for the tensors."""
        self._positions = positions
        try:
            logits = forward(input_ids=input_ids, use_cache=False, **shaped).logits
        finally:
            self._positions = None
        return logprobs_from_logits(logits.squeeze(0), targets, temperature)
