"""Decode attention on a CPU for all sequences of a batch at once.

SGLang's own path for machines without its kernels calls attention for each sequence of each layer: with 30 layers and
16 sequences 480 calls for 16 tokens, and the calls cost more than the arithmetic. Here it is one call a layer, over
keys and values that are padded to the longest sequence. A batch in which the padding would cost more than the calls
goes the old way.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PADDED_MOST = 4.0
"""Padded tokens for each real one, at most."""
ARGUMENTS = (
    "self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens", "encoder_lens",
    "scaling", "enable_gqa", "causal", "is_cross_attn", "sliding_window_size",
)  # fmt: skip


def attend(
    query: Tensor, keys: Tensor, values: Tensor, places: Tensor, lengths: Tensor, scaling: float | None
) -> Tensor:
    """Attention of one token per sequence, (sequences, heads, width) like `query`.

    `keys` and `values`: the cache, (tokens, KV heads, width); `places`: where each sequence's tokens lie in it,
    (sequences, longest); `lengths`: how many of them it has, at least 1. Query heads that share a KV head are the
    rows of one small product, so nothing is repeated.
    """
    sequences, heads, width = query.shape
    shared = keys.shape[1]
    there = torch.arange(places.shape[1], device=places.device) < lengths[:, None]
    places = torch.where(there, places, places[:, :1])  # what lies behind a sequence may be anything, NaN too
    result = scaled_dot_product_attention(
        query.reshape(sequences, shared, heads // shared, width),
        keys[places].transpose(1, 2).to(query.dtype),
        values[places].transpose(1, 2).to(query.dtype),
        attn_mask=there[:, None, None, :],
        scale=scaling,
    )
    return result.reshape(sequences, heads, values.shape[-1])


def install() -> None:
    """Into SGLang's backend for plain PyTorch. Raises RuntimeError where that has another form."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    one_by_one = TorchNativeAttnBackend._run_sdpa_forward_decode
    if tuple(inspect.signature(one_by_one).parameters) != ARGUMENTS:
        raise RuntimeError("sglang's decode attention has other arguments")

    def decode(
        self: Any,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        scaling: float | None = None,
        enable_gqa: bool = False,
        causal: bool = False,
        is_cross_attn: bool = False,
        sliding_window_size: int | None = None,
    ) -> Tensor:
        longest, tokens = int(seq_lens.max()), int(seq_lens.sum())
        windowed = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or windowed or longest * len(seq_lens) > PADDED_MOST * tokens:
            return one_by_one(
                self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens,
                scaling, enable_gqa, causal, is_cross_attn, sliding_window_size,
            )  # fmt: skip
        places = req_to_token[req_pool_indices, :longest]
        output.copy_(attend(query, k_cache, v_cache, places, seq_lens, scaling))
        return output

    TorchNativeAttnBackend._run_sdpa_forward_decode = decode
