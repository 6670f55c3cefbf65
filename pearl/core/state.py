"""The GPU-worker-role table: stable slots, legal transitions only, a story per worker.

A slot is never renumbered. It may serve only after its weights were verified (SYNCED), and a slot whose process is gone
starts again as another incarnation: there is no edge from GONE to ACTIVE.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from pearl.core.trajectory import TrajectoryId

STORY_LENGTH = 64
"""Transitions kept per worker."""


class Activity(StrEnum):
    EMPTY = "empty"
    STARTING = "starting"
    LOADED = "loaded"
    """The engine answers, its weights are not the ones to serve."""
    SYNCED = "synced"
    ACTIVE = "active"
    DRAINING = "draining"
    """No more dispatch; requests in flight end or are interrupted."""
    GONE = "gone"


LEGAL: dict[Activity, frozenset[Activity]] = {
    Activity.EMPTY: frozenset({Activity.STARTING}),
    Activity.STARTING: frozenset({Activity.LOADED, Activity.GONE}),
    Activity.LOADED: frozenset({Activity.SYNCED, Activity.GONE}),
    Activity.SYNCED: frozenset({Activity.LOADED, Activity.ACTIVE, Activity.GONE}),
    Activity.ACTIVE: frozenset({Activity.DRAINING, Activity.GONE}),
    Activity.DRAINING: frozenset({Activity.LOADED, Activity.GONE}),
    Activity.GONE: frozenset({Activity.STARTING}),
}


class IllegalTransition(Exception):
    """The machine tried what the table forbids: a fault of ours, never of the outside."""


@dataclass(slots=True)
class WorkerSlot:
    """One slot's present. `version` is what its engine holds, None before the first verified load."""

    name: str
    activity: Activity = Activity.EMPTY
    incarnation: int = 0
    version: int | None = None
    in_flight: set[TrajectoryId] = field(default_factory=set)
    aborting: bool = False
    restarts: int = 0
    story: deque[tuple[float, Activity, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    def to(self, activity: Activity, now: float, why: str = "") -> None:
        """Move to `activity`; raises IllegalTransition if there is no such edge."""
        if activity not in LEGAL[self.activity]:
            raise IllegalTransition(f"{self.name}: {self.activity} -> {activity} ({why})")
        self.activity = activity
        self.story.append((now, activity, why))

    def start(self, now: float) -> None:
        """A new life: another incarnation, nothing known of weights, nothing in flight."""
        self.to(Activity.STARTING, now)
        self.incarnation += 1
        self.version = None
        self.aborting = False
        self.in_flight = set()

    def synced(self, version: int, now: float) -> None:
        if self.version is not None and version < self.version:
            raise IllegalTransition(f"{self.name}: weights {self.version} -> {version} would go backwards")
        self.version = version
        self.to(Activity.SYNCED, now, f"v{version}")


class WorkerTable(dict[str, WorkerSlot]):
    """Slots by name."""

    @classmethod
    def of(cls, names: tuple[str, ...]) -> WorkerTable:
        return cls((name, WorkerSlot(name)) for name in names)

    def current(self, name: str, incarnation: int) -> WorkerSlot | None:
        """The slot if the message comes from its present life, else None (a late word of a dead one)."""
        slot = self.get(name)
        return slot if slot is not None and slot.incarnation == incarnation else None

    def serving(self, version: int) -> list[WorkerSlot]:
        return [w for w in self.values() if w.activity is Activity.ACTIVE and w.version == version]

    def validate(self) -> None:
        """Raise AssertionError where a slot contradicts itself."""
        for slot in self.values():
            if slot.activity in (Activity.ACTIVE, Activity.SYNCED):
                assert slot.version is not None, f"{slot.name} serves without verified weights"
            if slot.activity not in (Activity.ACTIVE, Activity.DRAINING, Activity.GONE):
                assert not slot.in_flight, f"{slot.name} is {slot.activity} with requests in flight"
