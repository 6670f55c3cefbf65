"""The surviving line of checkpoints: which step each weight version is of, and what a rollback would give back.

Versions only grow and are never reused; steps can be done again after a rollback. So a version is the name of a
snapshot, and its step says how old its tokens are.
"""

from __future__ import annotations

from pearl.core.groups import Group


class Lineage:
    def __init__(self) -> None:
        self.step_of: dict[int, int] = {}
        """Optimizer step of each published version, of abandoned lines too: their tokens may still be in use."""
        self.checkpoint_step = 0
        """Newest checkpoint; 0 is the initial model, which needs none."""
        self.newest_version = -1
        """Newest that was asked for; one that was never published is not used again either."""
        self._trained: dict[int, tuple[Group, ...]] = {}

    def next_version(self) -> int:
        self.newest_version += 1
        return self.newest_version

    def published(self, version: int, step: int) -> None:
        self.step_of[version] = step
        self.newest_version = max(self.newest_version, version)

    def trained(self, step: int, groups: tuple[Group, ...]) -> None:
        self._trained[step] = groups

    def checkpointed(self, step: int) -> None:
        """Steps up to this one can no longer be rolled back."""
        self.checkpoint_step = max(self.checkpoint_step, step)
        for done in [s for s in self._trained if s <= self.checkpoint_step]:
            del self._trained[done]

    def roll_back(self) -> list[Group]:
        """Forget the steps after the newest checkpoint; their groups in the order in which they were trained."""
        groups = [group for step in sorted(self._trained) for group in self._trained[step]]
        self._trained.clear()
        return groups
