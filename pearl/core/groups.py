"""Book-keeping of what is being rolled out: groups, their members, and the live attempt of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pearl.core.trajectory import SampleId, TrajectoryId


class Phase(StrEnum):
    """Where a live attempt is, i.e. which answer it waits for."""

    OPENING = "opening"
    QUEUED = "queued"
    GENERATING = "generating"
    STEPPING = "stepping"
    SCORING = "scoring"


@dataclass(slots=True)
class Attempt:
    """One live trajectory. Token counts only: the tokens themselves are with the interpreter."""

    id: TrajectoryId
    task: int
    environment_worker: str
    phase: Phase = Phase.OPENING
    tokens: int = 0
    turn_tokens: int = 0
    generated_tokens: int = 0
    turns: int = 0
    oldest_version: int | None = None
    last_worker: str | None = None
    losses: int = 0


@dataclass(slots=True)
class Member:
    """One sample of a group: waiting, live, finished with a reward, or failed."""

    sample: SampleId
    attempts: int = 0
    own_failures: int = 0
    infrastructure_failures: int = 0
    finished: TrajectoryId | None = None
    reward: float = 0.0
    oldest_version: int = 0
    ended: bool = False


@dataclass(slots=True)
class Group:
    number: int
    task: int
    members: list[Member] = field(default_factory=list)
    open_members: int = 0
    """Members neither finished nor ended."""
    task_failed: bool = False

    @property
    def finished(self) -> list[Member]:
        return [m for m in self.members if m.finished is not None and not m.ended]
