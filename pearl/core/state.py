"""The GPU-worker-role table: stable slots, legal transitions only, a story per worker.

A slot is never renumbered. It may serve only after its weights were verified (SYNCED), and a slot whose process is gone
starts again as another incarnation: there is no edge from GONE to ACTIVE. What a worker is and what it is to become
are two things: `activity` and `role` are facts, `goal` and `goal_role` are wishes, which the Fleet brings about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from pearl.core.layout import Role, SlotInfo, Zone
from pearl.core.trajectory import TrajectoryId

STORY_LENGTH = 64
"""Transitions kept per worker."""


NO_INFO = SlotInfo("")
"""Of a slot of which only the name is known."""


class Activity(StrEnum):
    EMPTY = "empty"
    STARTING = "starting"
    LOADED = "loaded"
    """The engine answers, its weights are not the ones to serve."""
    SYNCED = "synced"
    ACTIVE = "active"
    DRAINING = "draining"
    """No more dispatch; requests in flight end or are interrupted."""
    INACTIVE = "inactive"
    """The process is kept, its device memory is given back; what it held is forgotten."""
    GONE = "gone"


LEGAL: dict[Activity, frozenset[Activity]] = {
    Activity.EMPTY: frozenset({Activity.STARTING}),
    Activity.STARTING: frozenset({Activity.LOADED, Activity.GONE}),
    Activity.LOADED: frozenset({Activity.SYNCED, Activity.INACTIVE, Activity.GONE}),
    Activity.SYNCED: frozenset({Activity.LOADED, Activity.ACTIVE, Activity.INACTIVE, Activity.GONE}),
    Activity.ACTIVE: frozenset({Activity.DRAINING, Activity.GONE}),
    Activity.DRAINING: frozenset({Activity.LOADED, Activity.INACTIVE, Activity.GONE}),
    Activity.INACTIVE: frozenset({Activity.LOADED, Activity.GONE}),
    Activity.GONE: frozenset({Activity.STARTING}),
}


class Goal(StrEnum):
    """What a worker is to become."""

    SERVING = "serving"
    ASLEEP = "asleep"
    """No device memory; the process stays, if there is one."""
    AWAY = "away"
    """No process."""


class Awaited(StrEnum):
    """The instruction whose answer is outstanding. Only a stop may be sent over another one: its answer ends all."""

    START = "start"
    SYNC = "sync"
    SWITCH = "switch"
    RELEASE = "release"
    RESUME = "resume"
    STOP = "stop"


class IllegalTransition(Exception):
    """The machine tried what the table forbids: a fault of ours, never of the outside."""


@dataclass(slots=True)
class WorkerSlot:
    """One slot's present. `version` is what its engine holds, None before the first verified load."""

    name: str
    info: SlotInfo = NO_INFO
    life: int = 1
    """How often the slot came from the cloud; those of RunStarted are in their first life."""
    present: bool = True
    """The slot is there."""
    activity: Activity = Activity.EMPTY
    role: Role = Role.COLOCATED
    goal: Goal = Goal.SERVING
    goal_role: Role = Role.COLOCATED
    why: str = ""
    """Of the goal."""
    incarnation: int = 0
    version: int | None = None
    awaits: Awaited | None = None
    syncing: int | None = None
    """The version of an outstanding SyncWeights."""
    in_flight: dict[TrajectoryId, int] = field(default_factory=dict)
    """Requests that this worker answers (all but a pair's prefill half), with their tokens when they were sent."""
    prefilling: dict[TrajectoryId, int] = field(default_factory=dict)
    """As the prefill half of a pair."""
    kv_tokens: int = 0
    """Context of the requests in flight, when they were sent."""
    aborting: bool = False
    """An AbortRequests is not acknowledged yet."""
    aborted: bool = False
    """One was sent since the worker last served."""
    restarts: int = 0
    """Faults in this life of the slot."""
    admission: int | None = None
    """Number of the group that is admitted together, for a worker that waits for that."""
    cache: int = 0
    """Counts the prefix caches: every start, load of weights, release and switch of the role begins an empty one."""
    cached_tokens: int = 0
    """Tokens of live trajectories in the present prefix cache."""
    story: deque[tuple[float, Activity, str]] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def interruption_cost(self) -> tuple[int, int]:
        """Requests and cached tokens that an interruption costs; one that does not serve costs none."""
        if self.activity is not Activity.ACTIVE:
            return (0, 0)
        return (len(self.in_flight) + len(self.prefilling), self.cached_tokens)

    def to(self, activity: Activity, now: float, why: str = "") -> None:
        """Move to `activity`; raises IllegalTransition if there is no such edge."""
        if activity not in LEGAL[self.activity]:
            raise IllegalTransition(f"{self.name}: {self.activity} -> {activity} ({why})")
        self.activity = activity
        self.story.append((now, activity, why))

    def start(self, now: float) -> None:
        """A new life: another incarnation, nothing known of weights, nothing in flight."""
        self.to(Activity.STARTING, now, self.why)
        self.incarnation += 1
        self.role = self.goal_role
        self.aborting = self.aborted = False
        self.in_flight, self.prefilling, self.kv_tokens = {}, {}, 0
        self.forget()

    def forget(self) -> None:
        """What the device memory held is lost."""
        self.version = None
        self.flushed()

    def flushed(self) -> None:
        """The prefix cache is empty."""
        self.cache += 1
        self.cached_tokens = 0

    def synced(self, version: int, now: float) -> None:
        if self.version is not None and version < self.version:
            raise IllegalTransition(f"{self.name}: weights {self.version} -> {version} would go backwards")
        self.version = version
        self.flushed()
        self.to(Activity.SYNCED, now, f"v{version}")

    @property
    def idle(self) -> bool:
        return not self.aborting and not self.in_flight and not self.prefilling

    @property
    def overlap(self) -> bool:
        return self.info.zone is Zone.OVERLAP

    @property
    def running(self) -> bool:
        """It has a process."""
        return self.activity not in (Activity.EMPTY, Activity.GONE)


class WorkerTable(dict[str, WorkerSlot]):
    """Slots by name."""

    @classmethod
    def of(cls, names: tuple[str, ...], slots: Iterable[SlotInfo] = ()) -> WorkerTable:
        infos = {info.name: info for info in slots}
        return cls((name, WorkerSlot(name, infos.get(name, SlotInfo(name)))) for name in names)

    def current(self, name: str, incarnation: int) -> WorkerSlot | None:
        """The slot if the message comes from its present life, else None (a late word of a dead one)."""
        slot = self.get(name)
        return slot if slot is not None and slot.incarnation == incarnation else None

    def validate(self) -> None:
        """Raise AssertionError where a slot contradicts itself."""
        for slot in self.values():
            if slot.activity in (Activity.ACTIVE, Activity.SYNCED):
                assert slot.version is not None, f"{slot.name} serves without verified weights"
            if slot.activity not in (Activity.ACTIVE, Activity.DRAINING, Activity.GONE):
                assert slot.idle, f"{slot.name} is {slot.activity} with requests in flight"
            if slot.activity is Activity.INACTIVE:
                assert slot.version is None, f"{slot.name} sleeps and remembers its weights"
            assert slot.present or not slot.running, f"{slot.name} runs on a slot that is not there"
