"""The trajectories of a real run, played again: their lengths, their environments' times and their rewards.

From `events.jsonl` and `trajectories.msgpack` of a run directory. Groups come in the order in which the run drew them,
and again from the first when there are no more; a group that lost members repeats those it has.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from pearl.core.trajectory import SegmentKind, Trajectory, TrajectoryId, trajectory_from_wire
from pearl.errors import UserError
from pearl.sim.workload import Plan


@dataclass(slots=True)
class Times:
    """Of one trajectory's environment, in seconds."""

    open_s: float = 0.0
    score_s: float = 0.0
    steps: list[float] = field(default_factory=list)


class Replay:
    """A workload."""

    def __init__(self, run: Path) -> None:
        """Raises UserError if `run` has no finished trajectories."""
        events, trajectories = run / "events.jsonl", run / "trajectories.msgpack"
        for path in (events, trajectories):
            if not path.is_file():
                raise UserError(f"{run} has no {path.name}", "Give the run_dir of a `pearl train`")
        times = read_times(events)
        groups: dict[int, dict[int, Plan]] = defaultdict(dict)
        with trajectories.open("rb") as file:
            for record in msgpack.Unpacker(file):
                if record["trajectory"] is not None:
                    t = trajectory_from_wire(record["trajectory"])
                    groups[t.id.group][t.id.member] = plan_of(t, times.get(str(t.id), Times()))
        if not groups:
            raise UserError(f"{run} has no finished trajectory", "Let the run finish a step first")
        self.groups = [[group[m] for m in sorted(group)] for _, group in sorted(groups.items())]

    def plan(self, task: int, trajectory: TrajectoryId) -> Plan:
        group = self.groups[trajectory.group % len(self.groups)]
        return group[trajectory.member % len(group)]


def plan_of(trajectory: Trajectory, times: Times) -> Plan:
    """Segments of one response that was interrupted are one turn again."""
    turns: list[list[Any]] = []
    waiting = 0
    for segment in trajectory.segments:
        if segment.kind is not SegmentKind.RESPONSE:
            waiting += len(segment.token_ids)
        elif waiting or not turns:
            turns.append([waiting, len(segment.token_ids), 0.0])
            waiting = 0
        else:
            turns[-1][1] += len(segment.token_ids)
    for turn, seconds in zip(turns, times.steps, strict=False):
        turn[2] = seconds
    new, response, taken_s = zip(*turns, strict=True)
    return Plan(new, response, taken_s, trajectory.reward, times.open_s, times.score_s)


ASKED = {"OpenEnvironment": "open", "ScoreTrajectory": "score", "StepEnvironment": "step"}
ANSWERED = {"EnvironmentOpened": "open", "TrajectoryScored": "score", "EnvironmentStepped": "step"}


def read_times(events: Path) -> dict[str, Times]:
    """By trajectory, from question to answer."""
    times: dict[str, Times] = defaultdict(Times)
    since: dict[tuple[str, str], float] = {}
    with events.open() as file:
        for line in file:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # a torn last line of a run that was killed
            kind, name = entry["kind"], entry.get("trajectory")
            if kind in ASKED:
                since[name, ASKED[kind]] = entry["time"]
            elif kind in ANSWERED and (asked := since.pop((name, ANSWERED[kind]), None)) is not None:
                seconds = max(0.0, entry["time"] - asked)
                match ANSWERED[kind]:
                    case "open":
                        times[name].open_s = seconds
                    case "score":
                        times[name].score_s = seconds
                    case "step":
                        measured = entry.get("seconds", -1.0)
                        times[name].steps.append(measured if measured >= 0 else seconds)
    return times
