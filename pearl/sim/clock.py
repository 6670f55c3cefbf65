"""Virtual time: a heap of things that will happen."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[[Any], None]


class Clock:
    """`now` in seconds; what is due at the same time happens in the order in which it was put in."""

    def __init__(self) -> None:
        self.now = 0.0
        self.count = 0
        """Entries put in so far."""
        self._heap: list[tuple[float, int, Action, Any]] = []

    def at(self, time_s: float, action: Action, argument: Any = None) -> None:
        self.count += 1
        heapq.heappush(self._heap, (time_s, self.count, action, argument))

    def after(self, delay_s: float, action: Action, argument: Any = None) -> None:
        self.at(self.now + delay_s, action, argument)

    def advance(self, until_s: float) -> bool:
        """Let the next thing happen; False if nothing is due until `until_s`."""
        if not self._heap or self._heap[0][0] > until_s:
            return False
        self.now, _, action, argument = heapq.heappop(self._heap)
        action(argument)
        return True
