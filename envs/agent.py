"""The agent loop of one trajectory, as far as the environment's side goes: tokens in, tokens out, no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from envs.action import Action, parse_action
from envs.chat import ChatRenderer
from envs.errors import InfrastructureError
from envs.protocol import Environment, Score, Task, TaskFamily
from pearl.config.environment import EnvironmentConfig
from pearl.core.trajectory import StopReason

T = TypeVar("T")
FORMAT_ERROR = "No command found. Answer with one ```sh block."
MIN_OUTPUT_TOKENS = 8
GRACE_S = 5.0
"""An environment keeps its deadlines itself; this much later its silence is a fault of the machine."""


@dataclass(frozen=True, slots=True)
class Advance:
    """What follows a response: tokens to append and go on from, or the end (then there are none)."""

    observation_ids: tuple[int, ...]
    stop: StopReason | None


class AgentSession:
    """`start`, then `advance` once per response until it stops, then `score`; `close` at any time.

    A turn without a command is answered with a hint and stays in the trajectory as it was written. Token limits are
    the caller's: it knows all tokens of the trajectory, and may score after any response.
    """

    def __init__(
        self,
        environment: Environment,
        chat: ChatRenderer,
        *,
        max_turns: int,
        observation_tokens: int,
        parse: Callable[[str], Action] = parse_action,
    ) -> None:
        self._environment = environment
        self._chat = chat
        self._max_turns = max_turns
        self._observation_tokens = observation_tokens
        self._parse = parse
        self.turns = 0
        self.format_errors = 0

    @property
    def task(self) -> Task:
        return self._environment.task

    async def start(self, timeout_s: float = 60.0) -> list[int]:
        """Set the environment up; the prompt's token ids."""
        observation = await _within(timeout_s, "starting", self._environment.reset(timeout_s))
        return self._chat.prompt(observation.messages)

    async def advance(self, response_ids: Sequence[int], timeout_s: float = 60.0) -> Advance:
        """Carry out what the response asks for."""
        self.turns += 1
        action = self._parse(self._chat.decode(response_ids))
        if action.submit:
            return Advance((), StopReason.SUBMITTED)
        if action.command is None:
            self.format_errors += 1
            text = action.fault or FORMAT_ERROR
        else:
            result = await _within(timeout_s, "a step", self._environment.step(action.command, timeout_s))
            if result.done:
                return Advance((), StopReason.SUBMITTED)
            text = result.text
        if self.turns >= self._max_turns:
            return Advance((), StopReason.TURN_LIMIT)
        return Advance(tuple(self._chat.between(response_ids, self._observation(text))), None)

    async def score(self, timeout_s: float = 60.0) -> Score:
        """The reward in [0, 1] and its parts."""
        score = await _within(timeout_s, "scoring", self._environment.score(timeout_s))
        detail = {**score.detail, "turns": float(self.turns), "format_errors": float(self.format_errors)}
        return Score(score.reward, detail)

    def _observation(self, text: str) -> str:
        """Within the budget, whatever the output; the reminder is never cut."""
        reminder = self._chat.defuse(self.task.reminder)
        room = self._observation_tokens - (self._chat.count("\n" + reminder) if reminder else 0)
        text = self._chat.truncate(self._chat.defuse(text), max(room, MIN_OUTPUT_TOKENS))
        return f"{text}\n{reminder}" if reminder else text

    async def fingerprint(self, timeout_s: float = 60.0) -> str:
        """Hash of the environment's state, to compare a replay with; empty where the environment has none."""
        state = getattr(self._environment, "fingerprint", None)
        return "" if state is None else await _within(timeout_s, "a fingerprint", state())

    async def close(self) -> None:
        await self._environment.close()


def open_session(family: TaskFamily, index: int, chat: ChatRenderer, config: EnvironmentConfig) -> AgentSession:
    """A session on one task of a family, as the configuration says."""
    return AgentSession(
        family.open(index),
        chat,
        max_turns=config.max_turns,
        observation_tokens=config.observation_tokens,
        parse=getattr(family, "parse", parse_action),
    )


async def _within(timeout_s: float, what: str, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(timeout_s + GRACE_S):
            return await work
    except TimeoutError as error:
        raise InfrastructureError(f"{what} took longer than {timeout_s:g} s") from error
