"""A share that is measured over time, and fades in from a prior."""

from __future__ import annotations


class Ratio:
    """A decaying sum over a decaying sum. The prior counts as `weight` of the denominator, less as that grows."""

    __slots__ = ("above", "below", "prior", "weight")

    def __init__(self, prior: float, weight: float) -> None:
        self.prior, self.weight = prior, weight
        self.above = self.below = 0.0

    def add(self, above: float, below: float) -> None:
        self.above += above
        self.below += below

    def decay(self, factor: float) -> None:
        """Let everything seen so far count `factor` times."""
        self.above *= factor
        self.below *= factor

    @property
    def confidence(self) -> float:
        return self.below / (self.below + self.weight)

    @property
    def value(self) -> float:
        left = self.weight**2 / (self.below + self.weight)
        return (self.above + self.prior * left) / (self.below + left)
