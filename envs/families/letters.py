"""The family `letters`: write text that is rich in one letter. Any text earns something, even a random model's.

It is there for tests and for measuring learning: one turn, no command to get right, a reward that is never constant.
The answer is a file in the sandbox, and the sandbox's own tools count.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from envs.action import Action
from envs.errors import InfrastructureError
from envs.families.shell import ShellEnvironment
from envs.protocol import Message, Score, StepResult, Task
from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import EnvironmentConfig, SandboxConfig

LETTERS = "aeinost"
SUBJECTS = ("a tree", "the sea", "a street", "the moon", "an old house", "a train", "bees", "the weather")
ANSWER = "answer.txt"


class LettersFamily:
    """`environment.tasks` tasks made from `environment.seed`."""

    def __init__(self, config: EnvironmentConfig, backend: SandboxBackend) -> None:
        rng = random.Random(f"letters/{config.seed}")
        pairs = [(rng.choice(LETTERS), rng.choice(SUBJECTS)) for _ in range(config.tasks)]
        self._pairs = pairs
        self._backend = backend
        self._limits = config.sandbox
        self.tasks: Sequence[Task] = [
            Task(f"letters-{number}-{letter}", "letters", letter) for number, (letter, _) in enumerate(pairs)
        ]

    def open(self, index: int) -> LettersEnvironment:
        letter, subject = self._pairs[index]
        return LettersEnvironment(self.tasks[index], letter, subject, self._backend, self._limits)

    @staticmethod
    def parse(response: str) -> Action:
        """The whole response is the answer."""
        return Action(response)


class LettersEnvironment(ShellEnvironment):
    def __init__(self, task: Task, letter: str, subject: str, backend: SandboxBackend, limits: SandboxConfig) -> None:
        text = f"Write about {subject}. Use the letter {letter} as often as you can."
        super().__init__(task, {ANSWER: b""}, (Message("user", text),), backend, limits)
        self._letter = letter

    async def step(self, action: str, timeout_s: float) -> StepResult:
        await self._open().write(ANSWER, action.encode(), timeout_s=timeout_s)
        return StepResult("", done=True)

    async def score(self, timeout_s: float) -> Score:
        """The letter's share of all characters but white space; 0 for an empty answer."""
        count = f"tr -cd {self._letter} < {ANSWER} | wc -c; tr -d '[:space:]' < {ANSWER} | wc -m"
        result = await self._open().exec(count, timeout_s=timeout_s)
        try:
            hits, characters = (int(word) for word in result.output.split())
        except ValueError as error:
            raise InfrastructureError(f"counting in the sandbox failed: {result.output!r}") from error
        return Score(hits / characters if characters else 0.0, {"characters": float(characters)})
