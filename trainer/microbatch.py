"""Tensors of one micro-batch: padded token ids, and flat vectors over the loss tokens of all its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.batch import Row


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """`input_ids` is (rows, longest) int64, right-padded with 0; the rest has one element per loss token, in row order.

    No attention mask: under causal attention nothing to the left of the padding sees it, and the padding's own output
    is never read. So the fast causal kernel serves, without a mask of rows x longest x longest.
    """

    input_ids: Tensor
    positions: Tensor
    """int64: index into the flattened (rows x longest) hidden states of the token *before* the loss token."""
    targets: Tensor
    """int64: the loss tokens."""
    rollout_logprobs: Tensor
    """fp32."""
    advantages: Tensor
    """fp32."""
    versions: Tensor
    """int64: weights that sampled each token."""

    @property
    def loss_tokens(self) -> int:
        return len(self.targets)


def collate(rows: Sequence[Row], device: torch.device) -> MicroBatch:
    """Tensors on `device`; no rows give one padding token and no loss tokens (a micro-batch that adds zero)."""
    longest = max((row.length for row in rows), default=1)
    input_ids = np.zeros((max(1, len(rows)), longest), dtype=np.int64)
    flat: dict[str, list[np.ndarray]] = {
        name: [] for name in ("positions", "targets", "logprobs", "advantages", "versions")
    }
    for index, row in enumerate(rows):
        input_ids[index, : row.length] = row.token_ids
        places = np.flatnonzero(row.loss_mask)
        flat["positions"].append(index * longest + places - 1)
        flat["targets"].append(row.token_ids[places])
        flat["logprobs"].append(row.rollout_logprobs[places])
        flat["advantages"].append(np.full(len(places), row.advantage, dtype=np.float32))
        flat["versions"].append(row.versions[places])

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        values = np.concatenate(flat[name]) if flat[name] else np.zeros(0)
        return torch.as_tensor(values, dtype=dtype).to(device)

    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=tensor("positions", torch.int64),
        targets=tensor("targets", torch.int64),
        rollout_logprobs=tensor("logprobs", torch.float32),
        advantages=tensor("advantages", torch.float32),
        versions=tensor("versions", torch.int64),
    )
