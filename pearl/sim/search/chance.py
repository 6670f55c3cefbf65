"""Random numbers by name: each draw is a function of the seed and of what it is for, not of what was drawn before.

So a fault that is taken out of a schedule leaves the timing of everything else as it was, which is what makes schedules
shrink.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")
MASK = (1 << 64) - 1


class Chance:
    def __init__(self, seed: int) -> None:
        self.seed = seed

    def uniform(self, *name: object) -> float:
        """In [0, 1)."""
        text = repr((self.seed, name)).encode()
        x = zlib.crc32(text) << 32 | zlib.adler32(text)
        x = (x + 0x9E3779B97F4A7C15) & MASK  # the finaliser of splitmix64: a CRC alone is linear
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
        return ((x ^ x >> 31) >> 11) / (1 << 53)

    def integer(self, low: int, high: int, *name: object) -> int:
        """Both ends included."""
        return low + int(self.uniform(*name) * (high - low + 1))

    def choice(self, options: Sequence[T], *name: object) -> T:
        return options[int(self.uniform(*name) * len(options))]

    def delay_s(self, typical_s: float, deadline_s: float, *name: object) -> float:
        """One in six at once, one in ten anywhere up to the deadline, the others exponential."""
        u = self.uniform(*name)
        if u < 1 / 6:
            return 0.0
        if u > 0.9:
            return deadline_s * (u - 0.9) * 10 * 0.99
        return min(-math.log(1.0 - (u - 1 / 6) / (0.9 - 1 / 6)) * typical_s, 0.99 * deadline_s)
