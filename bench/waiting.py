"""A task family whose environments take time but no core of this machine, as on a cluster whose sandboxes have hosts.

Name it as `environment.family=bench.waiting:WaitingFamily`. Any text earns something, drawn from the task and the text.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Sequence

from envs.action import Action
from envs.protocol import Message, Observation, Score, StepResult, Task
from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import EnvironmentConfig

LEAST_S, MOST_S = 0.1, 0.5
"""Of a step; drawn for each task and turn."""
OBSERVATION = "The command has been run. Go on with the next one, please."


class WaitingFamily:
    """`environment.tasks` tasks of `environment.max_turns` turns."""

    def __init__(self, config: EnvironmentConfig, _: SandboxBackend) -> None:
        self._turns = config.max_turns
        self.tasks: Sequence[Task] = [Task(f"waiting-{n}", "waiting", "wait") for n in range(config.tasks)]

    def open(self, index: int) -> WaitingEnvironment:
        return WaitingEnvironment(self.tasks[index], self._turns)

    @staticmethod
    def parse(response: str) -> Action:
        """The whole response is the action."""
        return Action(response)


class WaitingEnvironment:
    def __init__(self, task: Task, turns: int) -> None:
        self.task = task
        self._turns, self._said = turns, [""]

    async def reset(self, timeout_s: float) -> Observation:
        self._said = []
        return Observation((Message("user", f"Say what you would do about task {self.task.name}, step by step."),))

    async def step(self, action: str, timeout_s: float) -> StepResult:
        self._said.append(action)
        rng = random.Random(f"{self.task.name}/{len(self._said)}")
        await asyncio.sleep(rng.uniform(LEAST_S, MOST_S))
        return StepResult(OBSERVATION, done=len(self._said) >= self._turns)

    async def score(self, timeout_s: float) -> Score:
        return Score(zlib.crc32("".join(self._said).encode()) % 1000 / 1000.0)

    async def close(self) -> None: ...
