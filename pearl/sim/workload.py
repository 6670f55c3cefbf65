"""What the agents of a simulated run do: made up, and the same for (seed, task, member) in whatever order it is asked.

Lengths and times are lognormal, by mean and coefficient of variation (cv). Tasks differ, and so do the members of a
group: half of the variance of the number of turns lies between tasks. (numpy may change its streams with a version.)
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.random import PCG64, Generator
from numpy.typing import NDArray

from pearl.core.trajectory import TrajectoryId

LEAST_TOKENS = 8
"""No prompt, observation or response is shorter."""


class Plan:
    """What one trajectory will do if nothing cuts it short. Turn k: `new[k]` tokens come, `response[k]` are generated,
    then the environment takes `seconds[k]`."""

    __slots__ = ("new", "open_s", "response", "reward", "score_s", "seconds")

    def __init__(
        self,
        new: Sequence[int],
        response: Sequence[int],
        seconds: Sequence[float],
        reward: float,
        open_s: float,
        score_s: float,
    ) -> None:
        self.new, self.response, self.seconds = array("i", new), array("i", response), array("f", seconds)
        self.reward, self.open_s, self.score_s = reward, open_s, score_s

    @property
    def turns(self) -> int:
        return len(self.new)


class Workload(Protocol):
    """Where plans come from."""

    def plan(self, task: int, trajectory: TrajectoryId) -> Plan:
        """Of one attempt at one member of a group that drew `task`; always at least one turn."""
        ...


@dataclass(frozen=True, slots=True)
class Lognormal:
    mean: float
    cv: float = 0.0

    def draws(self, normals: NDArray[np.float64], most: float = math.inf) -> NDArray[np.float64]:
        """One for each standard normal number, none above `most` times the mean."""
        variance = math.log1p(self.cv * self.cv)
        return self.mean * np.minimum(np.exp(math.sqrt(variance) * normals - variance / 2), most)

    def draw(self, rng: Generator, scale: float = 1.0) -> float:
        return scale * float(self.draws(rng.standard_normal(1))[0])

    def spread(self, share: float) -> Lognormal:
        """A factor of mean 1 with this share of the log-variance."""
        return Lognormal(1.0, math.sqrt(math.expm1(share * math.log1p(self.cv * self.cv))))


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """The defaults are coding agents in a sandbox.

    Within the ranges that published traces of such agents show, and near the source's 216 s for 64 trajectories of
    Qwen3-8B on unlimited workers and its 96.7 % of prompt tokens (docs/simulator.md has what it comes to).
    """

    seed: int = 0
    turns: Lognormal = Lognormal(23, 0.45)
    max_turns: int = 50
    prompt_tokens: Lognormal = Lognormal(3500, 0.25)
    observation_tokens: Lognormal = Lognormal(650, 1.2)
    response_tokens: Lognormal = Lognormal(600, 0.7)
    environment_s: Lognormal = Lognormal(4, 1.5)
    open_s: Lognormal = Lognormal(25, 0.4)
    """Start of a container."""
    score_s: Lognormal = Lognormal(15, 0.5)
    solved: float = 0.4
    """Mean reward."""
    max_factor: float = 8.0
    """No observation, response or environment time is longer than so many times its mean."""

    def plan(self, task: int, trajectory: TrajectoryId) -> Plan:
        of_task = Generator(PCG64([self.seed, task]))
        own = Generator(PCG64([self.seed, task, trajectory.member]))
        half = self.turns.spread(0.5)
        scale = half.draw(of_task, self.turns.mean)
        prompt = max(LEAST_TOKENS, round(self.prompt_tokens.draw(of_task)))
        chance = min(1.0, 2 * self.solved * of_task.random())
        turns = max(1, min(self.max_turns, round(half.draw(own, scale))))
        reward = float(own.random() < chance)
        open_s, score_s = self.open_s.draw(own), self.score_s.draw(own)
        normals = own.standard_normal((3, turns))
        new = self.observation_tokens.draws(normals[0], self.max_factor)
        response = self.response_tokens.draws(normals[1], self.max_factor)
        seconds = self.environment_s.draws(normals[2], self.max_factor)
        new[0] = prompt
        return Plan(_whole(new), _whole(response), seconds.tolist(), reward, open_s, score_s)


def _whole(tokens: NDArray[np.float64]) -> list[int]:
    result: list[int] = np.maximum(np.rint(tokens), LEAST_TOKENS).astype(np.int64).tolist()
    return result


PRESETS: dict[str, AgentWorkload] = {
    "swe": AgentWorkload(),
    "swe-light": AgentWorkload(
        turns=Lognormal(8, 0.45), observation_tokens=Lognormal(500, 1.2), response_tokens=Lognormal(300, 0.7),
        environment_s=Lognormal(1.5, 1.5),
    ),
    "tools": AgentWorkload(
        turns=Lognormal(12, 0.6), prompt_tokens=Lognormal(1200, 0.3), observation_tokens=Lognormal(300, 1.0),
        response_tokens=Lognormal(120, 0.8), environment_s=Lognormal(0.6, 1.5), open_s=Lognormal(1, 0.3),
        score_s=Lognormal(1, 0.3),
    ),
}  # fmt: skip
"""By the name that `--workload` takes: repositories and their tests, easier ones, and calls of quick tools."""
