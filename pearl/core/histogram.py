"""A decaying histogram over magnitudes: quantiles of what spans decades, in constant space."""

from __future__ import annotations

import math

LOWEST = 1e-4
BINS_PER_OCTAVE = 4
"""A bin is 19 % wide, so a quantile is right within 9 %."""


class Histogram:
    def __init__(self) -> None:
        self._bins: dict[int, float] = {}
        self.total = 0.0

    def add(self, value: float) -> None:
        place = math.floor(math.log2(max(value, LOWEST)) * BINS_PER_OCTAVE)
        self._bins[place] = self._bins.get(place, 0.0) + 1.0
        self.total += 1.0

    def decay(self, factor: float) -> None:
        """Let everything seen so far count `factor` times."""
        self._bins = {place: count * factor for place, count in self._bins.items()}
        self.total *= factor

    def quantile(self, share: float) -> float:
        """Value below which `share` of the observations lie; 0 without any."""
        left = share * self.total
        for place in sorted(self._bins):
            left -= self._bins[place]
            if left <= 0:
                return 2.0 ** ((place + 0.5) / BINS_PER_OCTAVE)
        return 0.0
