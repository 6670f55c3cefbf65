"""The tokens of live trajectories. The machine decides with counts; the ids, log-probs and versions are here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pearl.core.trajectory import Segment, SegmentKind, StopReason, Trajectory, TrajectoryId


@dataclass(slots=True)
class LiveTrajectory:
    id: TrajectoryId
    task: str
    segments: list[Segment] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    """All tokens so far, flat: the next request's input."""
    states: list[str] = field(default_factory=list)
    """Fingerprint of the environment after each turn that it answered."""
    turn_start: int = 0
    """Where the present response begins in `token_ids`."""

    def add_context(self, kind: SegmentKind, token_ids: Sequence[int]) -> None:
        """A prompt or an observation; the next response begins behind it."""
        if token_ids:
            self.segments.append(Segment(kind, tuple(token_ids)))
            self.token_ids.extend(token_ids)
        self.turn_start = len(self.token_ids)

    def add_response(
        self, token_ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[tuple[int, int]]
    ) -> None:
        """Generated tokens; `versions` lists (weight version, number of tokens) runs.

        Raises ValueError if the three do not agree in length.
        """
        if sum(count for _, count in versions) != len(token_ids) or len(logprobs) != len(token_ids):
            raise ValueError(f"{self.id}: {len(token_ids)} tokens, {len(logprobs)} log-probs, versions {versions}")
        start = 0
        for version, count in versions:
            if count:
                end = start + count
                part = Segment(SegmentKind.RESPONSE, tuple(token_ids[start:end]), tuple(logprobs[start:end]), version)
                self.segments.append(part)
                start = end
        self.token_ids.extend(token_ids)

    @property
    def response_ids(self) -> list[int]:
        """Tokens of the present turn's response."""
        return self.token_ids[self.turn_start :]

    def turns(self) -> list[tuple[list[int], list[int]]]:
        """(response, observation) of each turn that the environment has answered."""
        turns: list[tuple[list[int], list[int]]] = []
        response: list[int] = []
        for segment in self.segments:
            if segment.kind is SegmentKind.RESPONSE:
                response += segment.token_ids
            elif segment.kind is SegmentKind.OBSERVATION:
                turns.append((response, list(segment.token_ids)))
                response = []
        return turns

    def replay(self, record: Mapping[str, Any]) -> None:
        """Add what a journal's record says of this trajectory."""
        match record["kind"]:
            case "prompt":
                self.task = record["task"]
                self.add_context(SegmentKind.PROMPT, record["token_ids"])
            case "turn":
                self.add_response(record["token_ids"], record["logprobs"], record["versions"])
            case "observation":
                self.add_context(SegmentKind.OBSERVATION, record["token_ids"])
                self.states.append(record["state"])

    def finish(self, turns: int, stop: StopReason, reward: float) -> Trajectory:
        return Trajectory(self.id, self.task, tuple(self.segments), turns, stop, reward)
