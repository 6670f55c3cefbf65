"""The one vocabulary: everything that can happen (events) and everything that can be asked for (instructions).

The Pipeline Scheduler is a machine: `handle(event, now) -> [instruction]`. Two interpreters carry instructions out, one
live (asyncio and actors), one in virtual time; neither decides anything. Every instruction that waits for something is
answered by exactly one event, also when its deadline passes, so the machine never needs to know how long is too long.

Workers are named by slot ("rollout-0"), never renumbered; an incarnation counts the lives of a slot, so that the late
answer of a dead process cannot be mistaken for one of its successor's.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pearl.core.trajectory import FinishReason, SampleId, StopReason, TrajectoryId


class Outcome(StrEnum):
    """How a sample ended. Each sample ends exactly once."""

    TRAINED = "trained"
    FAILED = "failed"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """Something to do."""


# --- rollout workers ------------------------------------------------------------------------------


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
    """Bring the slot's worker and engine up (again). Answer: EngineLoaded or WorkerLost."""

    worker: str
    incarnation: int


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


# --- environment workers --------------------------------------------------------------------------


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


# --- trajectories ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnvironmentOpened(Event):
    """The first prompt is there."""

    trajectory: TrajectoryId
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EnvironmentReopened(Event):
    """The environment is in the state in which the trajectory was interrupted."""

    trajectory: TrajectoryId


@dataclass(frozen=True, slots=True)
class TurnGenerated(Event):
    """A generate request returned `tokens` new tokens (maybe none)."""

    trajectory: TrajectoryId
    worker: str
    incarnation: int
    tokens: int
    version: int
    finish: FinishReason
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EnvironmentStepped(Event):
    """The environment answered a whole response; with `stop` there is no next turn."""

    trajectory: TrajectoryId
    observation_tokens: int
    stop: StopReason | None


@dataclass(frozen=True, slots=True)
class TrajectoryScored(Event):
    trajectory: TrajectoryId
    reward: float


@dataclass(frozen=True, slots=True)
class EnvironmentFailed(Event):
    """Opening, a step or scoring went wrong. `infrastructure`: not the task's or the agent's fault."""

    trajectory: TrajectoryId
    stage: str
    reason: str
    infrastructure: bool


@dataclass(frozen=True, slots=True)
class OpenEnvironment(Instruction):
    """Answer: EnvironmentOpened or EnvironmentFailed."""

    trajectory: TrajectoryId
    environment_worker: str
    task: int


@dataclass(frozen=True, slots=True)
class ReopenEnvironment(Instruction):
    """Rebuild the environment of an interrupted run's trajectory by playing its turns again, and compare.

    Answer: EnvironmentReopened, or EnvironmentFailed where what comes back differs.
    """

    trajectory: TrajectoryId
    environment_worker: str
    task: int


@dataclass(frozen=True, slots=True)
class Generate(Instruction):
    """Continue the trajectory's tokens by at most `max_new_tokens`. Answer: TurnGenerated."""

    trajectory: TrajectoryId
    worker: str
    incarnation: int
    version: int
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class StepEnvironment(Instruction):
    """Hand the turn's response tokens to the environment. Answer: EnvironmentStepped or EnvironmentFailed."""

    trajectory: TrajectoryId
    environment_worker: str


@dataclass(frozen=True, slots=True)
class ScoreTrajectory(Instruction):
    """Answer: TrajectoryScored or EnvironmentFailed."""

    trajectory: TrajectoryId
    environment_worker: str
    stop: StopReason
    turns: int


@dataclass(frozen=True, slots=True)
class CloseEnvironment(Instruction):
    """No answer is awaited; a lost environment worker has closed everything."""

    trajectory: TrajectoryId
    environment_worker: str


@dataclass(frozen=True, slots=True)
class DiscardTrajectory(Instruction):
    """This attempt is over without a result; a later attempt at the sample may follow."""

    trajectory: TrajectoryId
    reason: str
    infrastructure: bool = False


@dataclass(frozen=True, slots=True)
class DrawGroup(Instruction):
    """A task was drawn, for the journal. `cursor` is the position in the task order behind this draw."""

    group: int
    task: int
    cursor: int


@dataclass(frozen=True, slots=True)
class EndSample(Instruction):
    """The one end of a sample in the present lineage, for the journal."""

    sample: SampleId
    trajectory: TrajectoryId | None
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class QuarantineTask(Instruction):
    """The task is not drawn any more."""

    task: int
    reason: str


# --- training -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainerReady(Event):
    """All ranks are up at optimizer step `step`; their weights are published as `version`."""

    version: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class BatchTrained(Event):
    """Optimizer step `step` (counted from 1) is done; its weights are to be published."""

    step: int


@dataclass(frozen=True, slots=True)
class SnapshotPublished(Event):
    version: int


@dataclass(frozen=True, slots=True)
class CheckpointWritten(Event):
    """The state after `step` is on disk; the run can go back to it."""

    step: int


@dataclass(frozen=True, slots=True)
class TrainerLost(Event):
    """A rank died or fell silent. What was trained since the newest checkpoint is lost with it."""

    reason: str


@dataclass(frozen=True, slots=True)
class TrainerFailed(Event):
    """The trainer cannot go on, and a restart would not help."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestartTrainer(Instruction):
    """Form the group anew from the checkpoint of `step` (0: the initial model) and publish it as `version`.

    All that was trained after that step is rolled back. Answer: TrainerReady, TrainerLost or TrainerFailed.
    """

    step: int
    version: int


@dataclass(frozen=True, slots=True)
class TrainBatch(Instruction):
    """Train on these groups, members in order. Answer: BatchTrained, TrainerLost or TrainerFailed."""

    step: int
    groups: tuple[tuple[TrajectoryId, ...], ...]


@dataclass(frozen=True, slots=True)
class PublishSnapshot(Instruction):
    """Export the trainer's weights as `version`. Answer: SnapshotPublished, TrainerLost or TrainerFailed."""

    version: int


@dataclass(frozen=True, slots=True)
class RetireSnapshots(Instruction):
    """No worker will read `version` or an older one again."""

    version: int


# --- the run --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """First event: slots by name. The trainer starts on its own and answers TrainerReady."""

    rollout_workers: tuple[str, ...]
    environment_workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StopRequested(Event):
    """Ctrl-C or an operator: end at once, keep what is trained."""

    reason: str


@dataclass(frozen=True, slots=True)
class FinishRun(Instruction):
    """Last instruction. `failed` with the one reason, or done."""

    failed: bool
    reason: str
