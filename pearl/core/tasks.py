"""The prompt cursor: tasks as given or in an order fixed by the seed, once per epoch, quarantined ones left out."""

from __future__ import annotations

import random


class TaskCursor:
    def __init__(self, tasks: int, seed: int, *, shuffled: bool = True) -> None:
        if tasks < 1:
            raise ValueError("a run needs at least one task")
        self.tasks = tasks
        self.seed, self.shuffled = seed, shuffled
        self.drawn = 0
        """Position in the endless order; with the quarantine this is all there is to restore."""
        self.quarantined: set[int] = set()
        self._epoch = -1
        self._order: list[int] = []

    def draw(self) -> int | None:
        """The next task's index, or None if every task is quarantined."""
        if len(self.quarantined) >= self.tasks:
            return None
        while True:
            epoch, position = divmod(self.drawn, self.tasks)
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = list(range(self.tasks))
                if self.shuffled:
                    random.Random(f"{self.seed}/{epoch}").shuffle(self._order)
            self.drawn += 1
            task = self._order[position]
            if task not in self.quarantined:
                return task
