"""What an environment is: text in, text out. Tokens are the agent loop's business (`envs/agent.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the conversation that opens a trajectory."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to do; `name` is unique in its family and stable for a seed."""

    name: str
    family: str
    kind: str
    """Tasks of one kind differ in names and numbers only."""
    reminder: str = ""
    """Ends every observation. Small models lose sight of a task that was stated a turn ago."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What an agent sees first."""

    messages: tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an agent sees after an action. `done`: the environment declares the task over."""

    text: str
    done: bool = False


@dataclass(frozen=True, slots=True)
class Score:
    """`reward` in [0, 1]; `detail` names the parts that it was made of."""

    reward: float
    detail: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0.0 <= self.reward <= 1.0:
            raise ValueError(f"a reward lies in [0, 1], not {self.reward}")


class Environment(Protocol):
    """One task, being worked on by one agent. Every call has a deadline, in seconds.

    A fault that is not the agent's doing raises InfrastructureError. `close` can be called at any time, repeatedly.
    """

    @property
    def task(self) -> Task: ...

    async def reset(self, timeout_s: float) -> Observation: ...

    async def step(self, action: str, timeout_s: float) -> StepResult: ...

    async def score(self, timeout_s: float) -> Score: ...

    async def close(self) -> None: ...


class TaskFamily(Protocol):
    """An ordered list of tasks, the same one on every worker for the same configuration.

    A family may also have `parse(response: str) -> Action`, its own way from a response to an action (without it:
    `envs.action.parse_action`); `async prepare() -> dict[str, str]`, which builds once on each worker what its tasks
    need and returns the faults by task name; and `close()`, called when the worker stops.
    """

    @property
    def tasks(self) -> Sequence[Task]: ...

    def open(self, index: int) -> Environment: ...
