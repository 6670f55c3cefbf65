"""Rows of one group behind one copy of their prompt: the G samples of a task begin with the same tokens, and a forward
over that beginning serves them all.

    prompt  answer 1  answer 2  answer 3      one sequence; an answer attends to the prompt and to itself, and its
                                              positions go on from the prompt's end

Exact in real numbers: under causal attention a token's hidden state depends on what it attends to and where it stands,
and both are as in a row of its own. Tokens computed: P + sum of the rests, instead of G x P + sum of the rests. It asks
for a mask of length x length, which the fast causal kernel does without, so rows share only where it pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.batch import Row

WORTH = 0.75
"""Share of the tokens that may be left; a masked attention costs more per token than an unmasked one."""
LONGEST = 8192
"""Tokens of a bundle at most: its mask takes the square of this in bytes, 67 MB."""


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """One sequence: the first `shared` tokens of all rows once, then what is left of each row. `shared` 0: one row."""

    rows: tuple[Row, ...]
    shared: int = 0

    @property
    def length(self) -> int:
        return self.shared + sum(row.length - self.shared for row in self.rows)

    @property
    def starts(self) -> list[int]:
        """Where in the sequence each row goes on after the shared tokens."""
        lengths = [row.length - self.shared for row in self.rows]
        return [self.shared + sum(lengths[:index]) for index in range(len(lengths))]


def alone(rows: Sequence[Row]) -> list[Bundle]:
    return [Bundle((row,)) for row in rows]


def rows_of(bundles: Sequence[Bundle]) -> list[Row]:
    return [row for each in bundles for row in each.rows]


def bundle(rows: Sequence[Row], budget: int, parts: int) -> list[Bundle]:
    """Every row in exactly one bundle of at most `budget` tokens, rows with the same prompt together where it pays.

    There are at least `parts` bundles if there are so many rows, for as many minibatches and ranks.
    """
    most = max(1, len(rows) // parts)
    prompts: dict[tuple[int, bytes], list[Row]] = {}
    for row in rows:
        prompts.setdefault((row.id.group, row.token_ids[: row.prompt_tokens].tobytes()), []).append(row)
    result: list[Bundle] = []
    for same in prompts.values():
        shared, chosen = same[0].prompt_tokens, [same[0]]
        for row in same[1:]:
            longer = Bundle((*chosen, row), shared)
            if len(longer.rows) > most or longer.length > min(budget, LONGEST):
                result += _worth(chosen, shared)
                chosen = []
            chosen.append(row)
        result += _worth(chosen, shared)
    return result


def _worth(rows: Sequence[Row], shared: int) -> list[Bundle]:
    together = Bundle(tuple(rows), shared)
    if len(rows) > 1 and together.length <= WORTH * sum(row.length for row in rows):
        return [together]
    return alone(rows)


def attention(bundles: Sequence[Bundle], longest: int) -> tuple[Tensor, Tensor] | None:
    """Mask (bundles, 1, longest, longest), True where a token attends, and positions (bundles, longest) int64.

    None if no bundle shares anything: causal attention from position 0 is all that is needed.
    """
    if all(len(each.rows) == 1 for each in bundles):
        return None
    owners = np.full((len(bundles), longest), -1)  # of padding
    positions = np.zeros((len(bundles), longest), dtype=np.int64)
    for index, each in enumerate(bundles):
        owners[index, : each.shared] = 0
        positions[index, : each.shared] = np.arange(each.shared)
        for number, (start, row) in enumerate(zip(each.starts, each.rows, strict=True), 1):
            rest = slice(start, start + row.length - each.shared)
            owners[index, rest] = number
            positions[index, rest] = np.arange(each.shared, row.length)
    owner = torch.from_numpy(owners)
    own = owner[:, :, None] == owner[:, None, :]
    prompt = (owner[:, None, :] == 0) & (owner[:, :, None] >= 0)
    mask = (own | prompt) & torch.ones(longest, longest, dtype=torch.bool).tril()
    return mask[:, None], torch.from_numpy(positions)


@torch.no_grad()
def can_share(model: Any) -> bool:
    """Whether the model keeps to a mask that it is given, tried on a few tokens. Not so: sliding windows, states that
    pass from token to token (Mamba, linear attention)."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None) or []
    if any(layer != "full_attention" for layer in layers) or (not layers and getattr(config, "sliding_window", None)):
        return False
    shared, tokens = 2, torch.tensor([[1, 2, 3, 4, 3, 4], [1, 2, 5, 4, 3, 4]])
    owner = torch.tensor([0, 0, 1, 1, 2, 2])
    mask = ((owner[:, None] == owner) | (owner == 0)) & torch.ones(6, 6, dtype=torch.bool).tril()
    positions = torch.tensor([[0, 1, 2, 3, 2, 3]] * 2)
    device = next(model.parameters()).device
    training, _ = model.training, model.eval()
    try:
        logits = model(
            input_ids=tokens.to(device),
            attention_mask=mask.expand(2, 1, 6, 6).to(device),
            position_ids=positions.to(device),
            use_cache=False,
        ).logits
    except (TypeError, ValueError, RuntimeError):  # it does not take such arguments
        return False
    finally:
        model.train(training)
    one, other = logits.float()
    rows_alike = torch.allclose(one[shared : shared + 2], one[shared + 2 :], atol=1e-2, rtol=1e-2)
    return rows_alike and torch.equal(one[shared + 2 :], other[shared + 2 :])
