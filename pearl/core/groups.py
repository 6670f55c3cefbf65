"""Book-keeping of what is being rolled out: groups, their members, and the live attempt of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pearl.core.events import Outcome
from pearl.core.routing import Prefix
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
    oldest_step: int | None = None
    """Step of the oldest weights that generated a token of it."""
    sent_to: tuple[str, int] | None = None
    """Worker and incarnation that the present request was sent to."""
    prefix: Prefix | None = None
    """Where the context of the last request was left."""
    prefill_prefix: Prefix | None = None
    """The same of the prefill half of a pair."""
    cached_tokens: int = 0
    """Of this trajectory, in the cache of `prefix`."""
    losses: int = 0
    cut: bool = False
    """The last response did not end by itself."""
    resume_at: Phase | None = None
    """Of a trajectory from an interrupted run: where it goes on once its environment is rebuilt."""


@dataclass(slots=True)
class Member:
    """One sample of a group: waiting, live, finished with a reward, or failed."""

    sample: SampleId
    attempts: int = 0
    own_failures: int = 0
    infrastructure_failures: int = 0
    finished: TrajectoryId | None = None
    reward: float = 0.0
    oldest_step: int = 0
    outcome: Outcome | None = None

    @property
    def ended(self) -> bool:
        return self.outcome is not None


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
