"""From one GPU's fitted costs to a tensor-parallel group's profile.

A group of g GPUs divides what is read and computed by g and adds two all-reduces per layer. So

    K            = 2·layers·kv_heads·head_dim·bytes                               (keys and values)
    H_max        = (0.85·memory·g - weights - 1.5 GB·g)/K
    p1, p2, c, m → /g;  p1 and b also + all-reduce bytes of a token / link bandwidth
    A            → A - dense weights/(0.8·memory bandwidth)·(1 - 1/g) + 2·layers·8 µs   for g > 1
    p0           → p0 + 2·layers·8 µs                                             for g > 1

0.85 is SGLang's usual memory fraction, 1.5 GB what graphs and activations take, 0.8 the share of a data sheet's
bandwidth that reading weights reaches, 8 µs a small all-reduce over NVLink. These four are rules of thumb of ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pearl.core.workload import EngineProfile

MEMORY_FRACTION = 0.85
OVERHEAD_BYTES = 1.5e9
BANDWIDTH_SHARE = 0.8
ALL_REDUCE_S = 8e-6
TRANSFER_LATENCY_S = 0.5e-3
"""Mooncake's documentation: 1,024 tokens of Qwen3-8B in 1.5 ms at a bandwidth that takes 1.06 ms."""


@dataclass(frozen=True, slots=True)
class Gpu:
    flops: float
    memory_bytes_per_s: float
    memory_bytes: float
    link_bytes_per_s: float
    network_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Architecture:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    parameters: float
    dense_parameters: float
    """What every token uses."""
    bytes_per_parameter: float = 2.0
    expert_share: float = 0.0

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> float:
        return 2.0 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_parameter

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter


def kv_capacity_tokens(model: Architecture, gpu: Gpu, group: int) -> int:
    """Zero or less: the weights do not fit."""
    free = (MEMORY_FRACTION * gpu.memory_bytes - OVERHEAD_BYTES) * group - model.weight_bytes
    return int(free / model.kv_bytes_per_token)


def derive(model: Architecture, gpu: Gpu, costs: Mapping[str, Any], group: int) -> EngineProfile:
    """`costs` are one GPU's; `group`: GPUs of a worker."""
    one = {name: float(value) for name, value in costs.items()}
    reduced_s = 2.0 * model.layers * ALL_REDUCE_S if group > 1 else 0.0
    reduced_token_s = 0.0
    if group > 1:
        reduced_token_s = 2.0 * model.layers * model.hidden * model.bytes_per_parameter / gpu.link_bytes_per_s
    read_s = model.dense_parameters * model.bytes_per_parameter / (BANDWIDTH_SHARE * gpu.memory_bytes_per_s)
    return EngineProfile(
        prefill_fixed_s=one["prefill_fixed_s"] + reduced_s,
        prefill_s_per_token=one["prefill_s_per_token"] / group + reduced_token_s,
        prefill_s_per_token2=one["prefill_s_per_token2"] / group,
        decode_fixed_s=max(0.0, one["decode_fixed_s"] - read_s * (1.0 - 1.0 / group)) + reduced_s,
        decode_s_per_sequence=one["decode_s_per_sequence"] / group + reduced_token_s,
        decode_s_per_kv_token=one["decode_s_per_kv_token"] / group,
        kv_bytes_per_token=model.kv_bytes_per_token,
        kv_capacity_tokens=kv_capacity_tokens(model, gpu, group),
        transfer_bytes_per_s=gpu.network_bytes_per_s * group,
        transfer_latency_s=TRANSFER_LATENCY_S,
        expert_fixed_s=one.get("expert_fixed_s", 0.0) / group,
        expert_share=model.expert_share,
    )
