"""The lives of rollout workers."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.events.base import Event, Instruction
from pearl.core.layout import Role
from pearl.core.trajectory import TrajectoryId


@dataclass(frozen=True, slots=True)
class EngineLoaded(Event):
    """A worker's engine answers; it serves nothing before `WeightsSynced`."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WeightsSynced(Event):
    """A worker's engine holds and has verified the weights of `version`."""

    worker: str
    incarnation: int
    version: int


@dataclass(frozen=True, slots=True)
class AbortAcknowledged(Event):
    """A worker has no request in flight any more; all their `TurnGenerated` came before this."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class WorkerLost(Event):
    """A worker's engine or process is gone, did not start, or missed a deadline (and was killed)."""

    worker: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartEngine(Instruction):
    """Bring the slot's worker and engine up (again), in `role`. Answer: EngineLoaded or WorkerLost."""

    worker: str
    incarnation: int
    role: Role = Role.COLOCATED


@dataclass(frozen=True, slots=True)
class AbortRequests(Instruction):
    """Interrupt all requests of a worker, keeping their tokens. Answer: AbortAcknowledged or WorkerLost."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class SyncWeights(Instruction):
    """Load the snapshot of `version` and verify it. Answer: WeightsSynced or WorkerLost."""

    worker: str
    incarnation: int
    version: int
    peers: tuple[str, ...] = ()
    """Workers that hold this version: a host that has not got the snapshot takes it from one of theirs."""


@dataclass(frozen=True, slots=True)
class SwitchRole(Instruction):
    """Change the role of an engine that is out of routing and idle. Answer: RoleSwitched or WorkerLost."""

    worker: str
    incarnation: int
    role: Role


@dataclass(frozen=True, slots=True)
class RoleSwitched(Event):
    worker: str
    incarnation: int
    role: Role


@dataclass(frozen=True, slots=True)
class ReleaseEngine(Instruction):
    """Give the device memory back, keep the process. Answer: EngineReleased or WorkerLost."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class EngineReleased(Event):
    """The memory is free again, as checked on the device. What the engine held is not to be trusted any more."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class EngineAsleep(Event):
    """An overlap worker's first engine was started before the trainer took its GPUs, and has given its memory back.

    Nobody asked for it. Where that failed, WorkerLost comes behind it.
    """

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ResumeEngine(Instruction):
    """Take the device memory again; the weights in it are garbage until synced. Answer: EngineResumed or WorkerLost."""

    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class EngineResumed(Event):
    worker: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class StopEngine(Instruction):
    """End the engine, by force where it does not end by itself. Answer: WorkerLost.

    The only instruction that may be sent while another is outstanding; that one's answer is not needed any more.
    """

    worker: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class PrefillDone(Event):
    """The prefill half of a pair has handed its KV on: it has room again. TurnGenerated implies it."""

    trajectory: TrajectoryId
    worker: str
    incarnation: int
