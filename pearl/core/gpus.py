"""Who owns the training GPUs: the trainer, an overlap worker, or nobody while they change hands.

One entry per overlap slot: the GPUs of its training ranks. There is no edge between the two owners: the one has to let
go, and be seen to have let go, before the other takes.
"""

from __future__ import annotations

from enum import StrEnum


class Owner(StrEnum):
    TRAINER = "trainer"
    NOBODY = "nobody"
    WORKER = "worker"


class IllegalOwner(Exception):
    """Two would have owned a GPU at once: a fault of ours."""


class TrainingGpus:
    """Owners by overlap slot; the trainer owns all at first."""

    def __init__(self) -> None:
        self.owner: dict[str, Owner] = {}
        self.moving: set[str] = set()
        """The trainer owns them and is leaving or coming back: it cannot work there."""

    def add(self, slot: str) -> None:
        self.owner[slot] = Owner.TRAINER

    @property
    def trainer_home(self) -> bool:
        """The trainer has all its GPUs and can work."""
        return not self.moving and all(owner is Owner.TRAINER for owner in self.owner.values())

    @property
    def lent(self) -> bool:
        """A worker owns some."""
        return Owner.WORKER in self.owner.values()

    def free(self) -> list[str]:
        return [slot for slot, owner in self.owner.items() if owner is Owner.NOBODY]

    def _move(self, slot: str, source: Owner, target: Owner) -> None:
        if self.owner[slot] is not source:
            raise IllegalOwner(f"{slot}: {target} takes from {source}, but {self.owner[slot]} owns it")
        self.owner[slot] = target

    def trainer_leaves(self, slots: tuple[str, ...]) -> None:
        for slot in slots:
            if self.owner[slot] is not Owner.TRAINER or slot in self.moving:
                raise IllegalOwner(f"{slot}: the trainer cannot leave, {self.owner[slot]} owns it")
        self.moving.update(slots)

    def trainer_left(self, slots: tuple[str, ...]) -> None:
        for slot in slots:
            self._move(slot, Owner.TRAINER, Owner.NOBODY)
        self.moving.difference_update(slots)

    def worker_takes(self, slot: str) -> None:
        self._move(slot, Owner.NOBODY, Owner.WORKER)

    def worker_left(self, slot: str) -> None:
        if self.owner[slot] is Owner.WORKER:
            self.owner[slot] = Owner.NOBODY

    def trainer_returns(self, slots: tuple[str, ...]) -> None:
        for slot in slots:
            self._move(slot, Owner.NOBODY, Owner.TRAINER)
        self.moving.update(slots)

    def trainer_returned(self, slots: tuple[str, ...]) -> None:
        self.moving.difference_update(slots)

    def trainer_lost(self) -> None:
        """Its processes are gone: nothing moves any more. What it owned is kept for its restart."""
        self.moving.clear()

    def trainer_restarts(self) -> None:
        """The restarted trainer loads all its state anew, on GPUs that nobody else owns."""
        for slot in self.free():
            self._move(slot, Owner.NOBODY, Owner.TRAINER)
        if not self.trainer_home:
            raise IllegalOwner("the trainer restarts while some of its GPUs are lent")
