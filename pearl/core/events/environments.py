"""The lives of environment workers."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.events.base import Event, Instruction


@dataclass(frozen=True, slots=True)
class EnvironmentWorkerReady(Event):
    worker: str
    incarnation: int
    capacity: int


@dataclass(frozen=True, slots=True)
class EnvironmentWorkerLost(Event):
    worker: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartEnvironmentWorker(Instruction):
    """Answer: EnvironmentWorkerReady or EnvironmentWorkerLost."""

    worker: str
    incarnation: int
