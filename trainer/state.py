"""What a trainer can be asked now, and the error for a call that does not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

State = Literal["ready", "training", "offloaded", "broken", "closed"]

REMEDY: dict[State, str] = {
    "ready": "nothing is offloaded",
    "training": "wait for the step to end",
    "offloaded": "reload it first",
    "broken": "close it, start a new one and load a checkpoint",
    "closed": "start a new one",
}


class TrainerStateError(RuntimeError):
    """The trainer cannot do this now: it is training, offloaded or closed, or an earlier call broke off."""


class Life:
    """State machine of one trainer.

        broken -> ready -> training | offloaded -> ready        any -> broken -> closed        any -> closed

    It starts as `broken`, until the start has gone well. DeepSpeed itself guards nothing: a step while its states are
    offloaded would end in wrong weights.
    """

    def __init__(self, rank: int) -> None:
        self.state: State = "broken"
        self._rank = rank

    def require(self, needed: State, call: str) -> None:
        """Raises TrainerStateError, and changes nothing, unless the state is `needed`."""
        if self.state != needed:
            raise TrainerStateError(f"{call}: the trainer of rank {self._rank} is {self.state}; {REMEDY[self.state]}")

    @contextlib.contextmanager
    def during(self, state: State, *harmless: type[Exception], then: State | None = None) -> Iterator[None]:
        """Be `state` inside, afterwards `then` (None: what it was); after an error that is not `harmless`, broken."""
        before, self.state = self.state, state
        try:
            yield
        except harmless:
            self.state = before
            raise
        except BaseException:
            self.state = "broken"
            raise
        self.state = then or before
