"""Tensors of one micro-batch: padded token ids, and flat vectors over the loss tokens of all its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from trainer.bundle import Bundle, attention


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`input_ids` is (bundles, longest) int64, right-padded with 0; what follows has one element per loss token.

    `shaped` holds the mask and positions that the forward is given where rows share their prompt. Else there is none:
    under causal attention nothing to the left of the padding sees it, and the padding's own output is never read. So
    the fast causal kernel serves, without a mask of bundles x longest x longest.
    """

    input_ids: Tensor
    positions: Tensor
    """int64: index into the flattened (bundles x longest) hidden states of the token *before* the loss token."""
    targets: Tensor
    """int64: the loss tokens."""
    rollout_logprobs: Tensor
    """fp32."""
    advantages: Tensor
    """fp32."""
    versions: Tensor
    """int64: weights that sampled each token."""
    shaped: dict[str, Tensor] = field(default_factory=dict)
    """`attention_mask` and `position_ids` of `trainer.bundle.attention`."""

    @property
    def loss_tokens(self) -> int:
        return len(self.targets)


def collate(bundles: Sequence[Bundle], device: torch.device) -> MicroBatch:
    """Tensors on `device`; no bundles give one padding token and no loss tokens (a micro-batch that adds zero)."""
    longest = max((bundle.length for bundle in bundles), default=1)
    input_ids = np.zeros((max(1, len(bundles)), longest), dtype=np.int64)
    flat: dict[str, list[np.ndarray]] = {
        name: [] for name in ("positions", "targets", "logprobs", "advantages", "versions")
    }
    for index, bundle in enumerate(bundles):
        input_ids[index, : bundle.shared] = bundle.rows[0].token_ids[: bundle.shared]
        for start, row in zip(bundle.starts, bundle.rows, strict=True):
            input_ids[index, start : start + row.length - bundle.shared] = row.token_ids[bundle.shared :]
            places = np.flatnonzero(row.loss_mask)
            before = places - 1
            moved = np.where(before < bundle.shared, before, before - bundle.shared + start)
            flat["positions"].append(index * longest + moved)
            flat["targets"].append(row.token_ids[places])
            flat["logprobs"].append(row.rollout_logprobs[places])
            flat["advantages"].append(np.full(len(places), row.advantage, dtype=np.float32))
            flat["versions"].append(row.versions[places])

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        values = np.concatenate(flat[name]) if flat[name] else np.zeros(0)
        return torch.as_tensor(values, dtype=dtype).to(device)

    names = ("attention_mask", "position_ids")
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=tensor("positions", torch.int64),
        targets=tensor("targets", torch.int64),
        rollout_logprobs=tensor("logprobs", torch.float32),
        advantages=tensor("advantages", torch.float32),
        versions=tensor("versions", torch.int64),
        shaped={n: t.to(device) for n, t in zip(names, attention(bundles, longest) or (), strict=False)},
    )
