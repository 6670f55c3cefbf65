"""How much is simulated: all of it, or enough to see that it works."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.paper import published
from pearl.paper.testbed import Testbed
from pearl.paper.world import World


@dataclass(frozen=True, slots=True)
class Plan:
    """`steps` are those of runs on a fixed number of GPUs, of which `skip` are not counted."""

    world: World
    seeds: int = 10
    batch_seeds: int = 20
    """Of single batches, which vary more."""
    hours: float = 2.0
    steps: int = 6
    skip: int = 2
    gpus: tuple[int, ...] = published.ABLATION_GPUS
    batches: tuple[int, ...] = published.BATCHES
    lengths: tuple[int, ...] = published.LENGTHS
    pairs_batches: tuple[int, ...] = published.PAIRS_BATCHES
    ratios: tuple[tuple[int, bool], ...] = tuple(published.RATIOS)
    environments: int = 30
    environment_steps: int = 6
    environment_seeds: int = 3
    """A run of a few steps varies by several per cent."""

    @classmethod
    def quick(cls, world: World) -> Plan:
        return cls(
            world, seeds=2, batch_seeds=3, hours=0.5, steps=4, skip=1, gpus=(4, 8), batches=(32, 64, 96, 128),
            lengths=(8192, 32_768), pairs_batches=(32, 48, 64, 96), ratios=((10, False), (12, False)), environments=4,
            environment_steps=3, environment_seeds=1,
        )  # fmt: skip

    def fixed(self, policy: str, model: str, gpus: int, batch: int = 64, max_tokens: int = 32_768) -> Testbed:
        """Nobody comes or goes; the training GPUs may be borrowed."""
        return Testbed(
            policy=policy, model=model, reserved_gpus=gpus, preemptible_gpus=0, trace="none", batch=batch,
            max_tokens=max_tokens, hours=1000.0, world=self.world, steps=self.steps,
        )  # fmt: skip
