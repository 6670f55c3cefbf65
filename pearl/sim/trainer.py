"""How long a training step takes: floating-point operations of the batch over what the training GPUs deliver.

    operations = 4·(2·P·n + 2·L·W·n²)  summed over trajectories of n tokens

forward, backward (twice the forward) and the forward again because activations are recomputed; P parameters that a
token activates, L layers, W width of the attention (heads × head size); the second term is causal attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

FORWARDS = 4
"""A training step as multiples of a forward pass."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    name: str
    parameters: float
    active_parameters: float
    layers: int
    attention_width: int
    bytes_per_parameter: float = 2.0

    @property
    def snapshot_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class TrainerModel:
    shape: ModelShape
    gpus: int
    flops_per_gpu: float = 989e12
    """Peak, dense, in the training precision."""
    utilisation: float = 0.25
    """Share of the peak that packed long sequences under ZeRO with recomputation reach; our assumption."""
    fixed_s: float = 5.0
    """Optimizer, gathering and packing, whatever the batch."""

    def step_s(self, lengths: Iterable[int]) -> float:
        """Of a batch of trajectories of so many tokens."""
        m = self.shape
        forward = sum(2 * m.active_parameters * n + 2 * m.layers * m.attention_width * n * n for n in lengths)
        return self.fixed_s + FORWARDS * forward / (self.gpus * self.flops_per_gpu * self.utilisation)
