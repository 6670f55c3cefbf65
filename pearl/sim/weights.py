"""New weights on their way to the workers, over links that carry one snapshot at a time.

From whom a worker takes them is decided by the rule of live runs (`pearl/weights/fanout.py`), each worker standing for
a host: workers that ask together form a chain and pass them on piece by piece, so all have them at about the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pearl.sim.clock import Clock
from pearl.weights.fanout import FanOut

TRAINER = "trainer"
PIECE_BYTES = float(8 << 20)
"""That a worker has to have before it passes it on."""


class WeightLinks:
    """`present`: whether a worker is there to take weights from."""

    def __init__(self, clock: Clock, bytes_per_s: float, present: Callable[[str], bool]) -> None:
        self.clock, self.bytes_per_s, self.present = clock, bytes_per_s, present
        self._fan = FanOut(TRAINER)
        self._free: dict[str, float] = {}
        """When a sender's link is free again."""
        self._arrives: dict[tuple[int, str], float] = {}

    def seconds(self, version: int, worker: str, holders: Iterable[str], size_bytes: float) -> float:
        """Until `worker` has that version, of which `holders` have all already."""
        now = self.clock.now
        sources = self._fan.sources(version, worker, holders)
        sender = next(source for source in sources if source == TRAINER or self.present(source))
        whole = max(now, self._free.get(sender, 0.0)) + size_bytes / self.bytes_per_s
        behind = self._arrives.get((version, sender), 0.0) + PIECE_BYTES / self.bytes_per_s
        done = self._free[sender] = self._arrives[version, worker] = max(whole, behind)
        self.clock.at(done, self._arrived, (version, worker))
        return done - now

    def _arrived(self, copy: tuple[int, str]) -> None:
        self._fan.copied(*copy)

    def retire(self, version: int) -> None:
        """Nobody asks for `version` or older ones any more."""
        self._fan.retire(version)
        self._arrives = {copy: when for copy, when in self._arrives.items() if copy[0] > version}
