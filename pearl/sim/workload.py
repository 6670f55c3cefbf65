"""What the agents of a simulated run do: made up, and the same for (seed, task, member) in whatever order it is asked.

Lengths and times are lognormal, by mean and coefficient of variation (cv). Tasks differ, and so do the members of a
group: half of the variance of the number of turns lies between tasks.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from pearl.core.trajectory import TrajectoryId


class Plan:
    """What one trajectory will do if nothing cuts it short. Turn k: `new[k]` tokens come, `response[k]` are generated,
    then the environment takes `seconds[k]`."""

    __slots__ = ("new", "open_s", "response", "reward", "score_s", "seconds")

    def __init__(
        self,
        turns: Iterable[tuple[int, int, float]],
        reward: float,
        open_s: float,
        score_s: float,
    ) -> None:
        new, response, seconds = zip(*turns, strict=True)
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

    def draw(self, rng: random.Random, scale: float = 1.0) -> float:
        if not self.cv or not self.mean:
            return self.mean * scale
        variance = math.log1p(self.cv * self.cv)
        return self.mean * scale * math.exp(rng.gauss(-variance / 2, math.sqrt(variance)))

    def spread(self, share: float) -> Lognormal:
        """A factor of mean 1 with this share of the log-variance."""
        return Lognormal(1.0, math.sqrt(math.expm1(share * math.log1p(self.cv * self.cv))))


@dataclass(frozen=True, slots=True)
class AgentWorkload:
    """The defaults are coding agents in a sandbox.

    Within the ranges that published traces of such agents show, chosen so that 64 trajectories of Qwen3-8B on unlimited
    workers take about the source's 216 s, and prompts are about its 96.7 % of all tokens.
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
        of_task = random.Random(self.seed << 40 ^ task << 1)
        half = self.turns.spread(0.5)
        turns_mean = half.draw(of_task)
        prompt = max(16, round(self.prompt_tokens.draw(of_task)))
        difficulty = of_task.random()
        rng = random.Random((self.seed << 40 ^ task << 1 | 1) * 4099 + trajectory.member)
        turns = max(1, min(self.max_turns, round(half.draw(rng, self.turns.mean * turns_mean))))
        reward = float(rng.random() < min(1.0, 2 * self.solved * (1 - difficulty)))
        return Plan(
            (
                (
                    prompt if k == 0 else self._tokens(self.observation_tokens, rng),
                    self._tokens(self.response_tokens, rng),
                    min(self.max_factor * self.environment_s.mean, self.environment_s.draw(rng)),
                )
                for k in range(turns)
            ),
            reward,
            self.open_s.draw(rng),
            self.score_s.draw(rng),
        )

    def _tokens(self, law: Lognormal, rng: random.Random) -> int:
        return max(8, round(min(self.max_factor * law.mean, law.draw(rng))))


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
