"""The beginning and the end of a run."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.events.base import Event, Instruction
from pearl.core.layout import SlotInfo


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """First event: slots by name. The trainer starts on its own and answers TrainerReady.

    `slots` says more about rollout slots; one that it does not name is a reserved one. All are in life 1.
    """

    rollout_workers: tuple[str, ...]
    environment_workers: tuple[str, ...]
    slots: tuple[SlotInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """Ctrl-C or an operator: end at once, keep what is trained."""

    reason: str


@dataclass(frozen=True, slots=True)
class FinishRun(Instruction):
    """Last instruction. `failed` with the one reason, or done."""

    failed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class SetTimer(Instruction):
    """Answer: TimerFired with the same name at `at_s` (the clock of `handle`). A timer cannot be taken back."""

    name: str
    at_s: float


@dataclass(frozen=True, slots=True)
class TimerFired(Event):
    name: str
