"""Whole weights out of ZeRO's partitions, some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

GATHER_BYTES = 64 << 20
"""Weights that are gathered at once under ZeRO-3."""


def gathered(engine: Any, dtype: torch.dtype, *, wanted: bool) -> Iterator[tuple[str, Tensor]]:
    """Name and whole weight in `dtype`, in the model's order; nothing where not `wanted`, but in step. Collective.

    Names are the model's own; a tied output head comes once, under its first name.
    """
    import deepspeed

    partitioned = engine.zero_optimization_partition_weights()
    bucket: list[tuple[str, Any]] = []
    nbytes = 0
    named = list(engine.module.named_parameters())
    for index, (name, parameter) in enumerate(named):
        bucket.append((name, parameter))
        nbytes += getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        if nbytes < GATHER_BYTES and index + 1 < len(named):
            continue
        with deepspeed.zero.GatheredParameters([p for _, p in bucket], enabled=partitioned):
            for full_name, full in bucket if wanted else ():
                yield full_name, full.detach().to(dtype)
        bucket, nbytes = [], 0
