"""What a rollout leaves behind: token ids in the order the model saw them, and who produced each.

Text is never kept as the truth: every later consumer (resume, training, export) reads token ids, so
nothing is ever re-tokenised. A *sample* is (group, member): one of the G answers to one drawn task.
A *trajectory* is one attempt at a sample; a sample may need several (its environment worker died).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class SampleId(NamedTuple):
    """One answer to one drawn task: `group` is the draw's number, `member` is in [0, group_size)."""

    group: int
    member: int

    def __str__(self) -> str:
        return f"g{self.group}.{self.member}"


class TrajectoryId(NamedTuple):
    """One attempt at a sample."""

    group: int
    member: int
    attempt: int

    @property
    def sample(self) -> SampleId:
        return SampleId(self.group, self.member)

    def __str__(self) -> str:
        return f"g{self.group}.{self.member}.{self.attempt}"


class StopReason(StrEnum):
    """Why a trajectory stopped taking turns. All of these are scored; failures are not stops."""

    SUBMITTED = "submitted"
    """The agent said that it is done (or the environment declared the task over)."""
    TURN_LIMIT = "turn_limit"
    """`environment.max_turns` turns were taken."""
    TOKEN_LIMIT = "token_limit"
    """No room is left under `pipeline.max_trajectory_tokens`."""


class FinishReason(StrEnum):
    """Why one generate request returned."""

    STOP = "stop"
    """The model ended its message (end token or stop string)."""
    LENGTH = "length"
    """`max_new_tokens` were generated."""
    ABORT = "abort"
    """Aborted on request; the tokens so far are valid and the turn goes on from them."""
    LOST = "lost"
    """The engine or its worker went away; tokens so far (maybe none) are valid."""
    FAILED = "failed"
    """The engine refused the request; trying the same request again cannot help."""


class SegmentKind(StrEnum):
    PROMPT = "prompt"
    OBSERVATION = "observation"
    RESPONSE = "response"


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens with one origin.

    `logprobs` has one natural-log probability per token, of the whole softmax at the sampling temperature (before top-p
    and top-k), and `version` the weights that produced them; both are None unless kind is RESPONSE.
    """

    kind: SegmentKind
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None
    version: int | None = None

    def __post_init__(self) -> None:
        if self.kind is SegmentKind.RESPONSE:
            if self.version is None or self.logprobs is None or len(self.logprobs) != len(self.token_ids):
                raise ValueError("a response segment needs one log-prob per token and a weight version")
        elif self.logprobs is not None or self.version is not None:
            raise ValueError(f"a {self.kind} segment has neither log-probs nor a weight version")


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A finished (stopped and scored) attempt, ready to train on."""

    id: TrajectoryId
    task: str
    segments: tuple[Segment, ...]
    turns: int
    stop: StopReason
    reward: float

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def generated_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.segments if s.kind is SegmentKind.RESPONSE)

    @property
    def versions(self) -> tuple[int, ...]:
        """Weight versions of the response segments, in order."""
        return tuple(s.version for s in self.segments if s.version is not None)


def trajectory_to_wire(trajectory: Trajectory) -> dict[str, object]:
    """Plain msgpack-able form of a trajectory (see `trajectory_from_wire`)."""
    return {
        "id": list(trajectory.id),
        "task": trajectory.task,
        "turns": trajectory.turns,
        "stop": str(trajectory.stop),
        "reward": trajectory.reward,
        "segments": [
            {
                "kind": str(s.kind),
                "token_ids": list(s.token_ids),
                "logprobs": None if s.logprobs is None else list(s.logprobs),
                "version": s.version,
            }
            for s in trajectory.segments
        ],
    }


def trajectory_from_wire(wire: dict) -> Trajectory:
    """Inverse of `trajectory_to_wire`; raises KeyError or ValueError on malformed input."""
    return Trajectory(
        id=TrajectoryId(*wire["id"]),
        task=wire["task"],
        turns=wire["turns"],
        stop=StopReason(wire["stop"]),
        reward=wire["reward"],
        segments=tuple(
            Segment(
                SegmentKind(s["kind"]),
                tuple(s["token_ids"]),
                None if s["logprobs"] is None else tuple(s["logprobs"]),
                s["version"],
            )
            for s in wire["segments"]
        ),
    )
