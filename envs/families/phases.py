"""The family `phases`: one kind of load after the other, for trying out how a run adapts.

The first third of the tasks has long prompts and short answers, the second one short prompts and many turns of
generation, the last one an environment that takes its time. With `pipeline.task_order: given` they come in this order.
Any text earns something, as in `letters`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.action import Action
from envs.families.letters import ANSWER, LETTERS, LettersEnvironment
from envs.protocol import StepResult, Task
from envs.sandbox.protocol import SandboxBackend
from pearl.config.environment import EnvironmentConfig, SandboxConfig

WORDS = 120
"""Of the text in a long prompt; most of a context of 1024 tokens for a tokenizer of bytes."""
SLOW_S = 2.0
"""That a command of the last phase takes."""
TURNS = 4
"""Of the last two phases."""
FILLER = ("stone", "river", "cloud", "field", "light", "north")


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    words: int
    turns: int
    seconds: float


PHASES = (Phase("prompts", WORDS, 1, 0.0), Phase("generations", 0, TURNS, 0.0), Phase("environments", 0, TURNS, SLOW_S))


class PhasesFamily:
    """`environment.tasks` tasks, a third of them in each phase."""

    def __init__(self, config: EnvironmentConfig, backend: SandboxBackend) -> None:
        self._backend = backend
        self._limits = config.sandbox
        self._phases = [PHASES[number * len(PHASES) // config.tasks] for number in range(config.tasks)]
        self.tasks: Sequence[Task] = [
            Task(f"phases-{number}-{phase.name}", "phases", phase.name) for number, phase in enumerate(self._phases)
        ]

    def open(self, index: int) -> PhasesEnvironment:
        letter = LETTERS[index % len(LETTERS)]
        return PhasesEnvironment(self.tasks[index], letter, self._phases[index], self._backend, self._limits)

    @staticmethod
    def parse(response: str) -> Action:
        """The whole response is the answer."""
        return Action(response)


class PhasesEnvironment(LettersEnvironment):
    """The responses of all turns together are the answer."""

    def __init__(self, task: Task, letter: str, phase: Phase, backend: SandboxBackend, limits: SandboxConfig) -> None:
        filler = " ".join(FILLER[i % len(FILLER)] for i in range(phase.words))
        super().__init__(task, letter, f"what you like. {filler}", backend, limits)
        self._phase = phase
        self._answers: list[str] = []

    async def step(self, action: str, timeout_s: float) -> StepResult:
        self._answers.append(action)
        sandbox = self._open()
        await sandbox.write(ANSWER, "".join(self._answers).encode(), timeout_s=timeout_s)
        if self._phase.seconds:
            await sandbox.exec(f"sleep {self._phase.seconds:g}", timeout_s=timeout_s)
        return StepResult("Go on.", done=len(self._answers) >= self._phase.turns)
