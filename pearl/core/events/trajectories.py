"""The lives of trajectories: environments, turns, scores, and the ends of samples."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.events.base import Event, Instruction, Outcome
from pearl.core.telemetry import TurnTelemetry
from pearl.core.trajectory import FinishReason, SampleId, StopReason, TrajectoryId


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
    telemetry: TurnTelemetry | None = None


@dataclass(frozen=True, slots=True)
class EnvironmentStepped(Event):
    """The environment answered a whole response; with `stop` there is no next turn."""

    trajectory: TrajectoryId
    observation_tokens: int
    stop: StopReason | None
    seconds: float = -1.0
    """How long it took; negative: not measured."""


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
    """Continue the trajectory's tokens by at most `max_new_tokens`. Answer: TurnGenerated, from `worker`.

    With a `prefill_worker`, that one computes the prompt's KV and hands it to `worker`; PrefillDone may say when, and
    never comes behind TurnGenerated. If either side is aborted or dies before, TurnGenerated says ABORT or LOST.
    """

    trajectory: TrajectoryId
    worker: str
    incarnation: int
    version: int
    max_new_tokens: int
    prefill_worker: str = ""
    prefill_incarnation: int = 0


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
