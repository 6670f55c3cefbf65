"""What models did on a set of tasks: rewards by task, and the figures that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import msgpack

from pearl.core.trajectory import SegmentKind, Trajectory
from pearl.live.frozen import Subject
from pearl.live.run_directory import RunDirectory
from pearl.observe.interval import Interval, bootstrap

SOLVED = 0.999
"""A reward from here up counts as a pass."""


@dataclass(frozen=True, slots=True)
class Play:
    """What one model did. A sample that failed counts as reward 0."""

    subject: Subject
    rewards: list[list[float]]
    """By task, a full row of samples each."""
    prompts: list[bytes | None]
    generated_tokens: int
    checksum: str

    @classmethod
    def of(cls, subject: Subject, groups: list[list[Trajectory]], samples: int, checksum: str) -> Play:
        rewards = [[t.reward for t in group] + [0.0] * (samples - len(group)) for group in groups]
        prompts = [prompt_key(group[0]) if group else None for group in groups]
        return cls(subject, rewards, prompts, sum(t.generated_tokens for g in groups for t in g), checksum)

    def means(self, tasks: Iterable[int]) -> list[float]:
        return [fmean(self.rewards[task]) for task in tasks]

    def passes(self, tasks: Iterable[int]) -> list[float]:
        return [fmean(float(reward >= SOLVED) for reward in self.rewards[task]) for task in tasks]


def prompt_key(trajectory: Trajectory) -> bytes:
    first = trajectory.segments[0]
    return msgpack.packb(list(first.token_ids)) if first.kind is SegmentKind.PROMPT else b""


def trained_prompts(run: Path) -> set[bytes]:
    """Prompts of every sample that the run played."""
    found: set[bytes] = set()
    path = RunDirectory(run).trajectories
    if path.exists():
        with path.open("rb") as file:
            for record in msgpack.Unpacker(file, strict_map_key=False):
                wire = record.get("trajectory")
                if wire and wire["segments"]:
                    found.add(msgpack.packb(wire["segments"][0]["token_ids"]))
    return found


def report(plays: Sequence[Play], seed: int) -> dict[str, Any]:
    """Means and intervals over the tasks that no subject trained on (over all, if there are no others)."""
    trained = set().union(*(trained_prompts(play.subject.run) for play in plays if play.subject.run))
    everything = range(len(plays[0].rewards))
    met = {task for task in everything for play in plays if play.prompts[task] in trained}
    counted = [task for task in everything if task not in met] or list(everything)
    models = [
        {
            "name": play.subject.name,
            "version": play.subject.version,
            "checksum": play.checksum,
            "reward": bootstrap(play.means(counted), seed).as_dict(),
            "pass_at_1": bootstrap(play.passes(counted), seed).as_dict(),
            "generated_tokens": play.generated_tokens,
            "reward_by_task": [round(mean, 4) for mean in play.means(everything)],
        }
        for play in plays
    ]
    difference = None
    if len(plays) == 2:
        first, second = plays
        ways = {"reward": Play.means, "pass_at_1": Play.passes}
        pairs = {name: zip(way(first, counted), way(second, counted), strict=True) for name, way in ways.items()}
        difference = {name: bootstrap([a - b for a, b in pair], seed).as_dict() for name, pair in pairs.items()}
    return {
        "tasks": len(everything),
        "met_in_training": len(met),
        "tasks_counted": len(counted),
        "models": models,
        "difference": difference,
    }


def sentences(summary: dict[str, Any]) -> list[str]:
    """The summary of an evaluation, for people."""
    last = summary["first_task"] + summary["tasks"] - 1
    lines = [
        f"tasks {summary['first_task']} to {last} of {summary['family']}, environment.seed "
        f"{summary['environment_seed']}, {summary['samples']} sample(s) of each at temperature "
        f"{summary['temperature']:g}; mean [95 % bootstrap interval over tasks]"
    ]
    if met := summary["met_in_training"]:
        left_out = "all are counted" if summary["tasks_counted"] == summary["tasks"] else "they are left out"
        lines.append(f"{met} of them were met in training; {left_out}")
    named = [(model["name"], model) for model in summary["models"]]
    if summary["difference"]:
        named.append(("difference", summary["difference"]))
    width = max(len(name) for name, _ in named)
    lines += [
        f"{name:<{width}}  reward {Interval(**figures['reward'])}  pass@1 {Interval(**figures['pass_at_1'])}"
        for name, figures in named
    ]
    if failed := summary["failed_samples"]:
        lines.append(f"{len(failed)} sample(s) failed and count as reward 0; the first: {failed[0]}")
    return lines
