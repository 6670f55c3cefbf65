"""Decode attention over a whole batch equals attention sequence by sequence."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from actors.sglang.decode import attend

POOL, WIDTH = 200, 8


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=5), st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.integers(0, 9)
)
def test_batch_attends_as_its_sequences(lengths: list[int], heads: tuple[int, int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    asked, kept = heads
    query = torch.randn(len(lengths), asked, WIDTH, generator=generator)
    keys, values = (torch.randn(POOL, kept, WIDTH, generator=generator) for _ in range(2))
    places = torch.randperm(POOL, generator=generator)[: sum(lengths)].split(lengths)
    unused = next(iter(set(range(POOL)) - set(torch.cat(places).tolist())), None)
    if unused is not None:
        keys[unused] = values[unused] = float("nan")
    padding = unused or 0
    table = torch.nn.utils.rnn.pad_sequence(places, batch_first=True, padding_value=padding)
    got = attend(query, keys, values, table, torch.tensor(lengths), 0.3)
    for number, own in enumerate(places):
        expected = scaled_dot_product_attention(
            query[number, :, None], keys[own].movedim(0, 1), values[own].movedim(0, 1), scale=0.3, enable_gqa=True
        )
        assert got[number] == pytest.approx(expected[:, 0], abs=1e-6)
