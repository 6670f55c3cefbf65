"""The agent loop against an environment that only remembers what it was asked."""

import asyncio

import pytest

from envs.agent import FORMAT_ERROR, AgentSession
from envs.chat import ChatRenderer
from envs.errors import InfrastructureError
from envs.protocol import Message, Observation, Score, StepResult, Task
from pearl.core.trajectory import StopReason


class Scripted:
    def __init__(self, reminder: str = "") -> None:
        self.task = Task("scripted-0", "scripted", "scripted", reminder)
        self.commands: list[str] = []
        self.closed = 0

    async def reset(self, timeout_s: float) -> Observation:
        return Observation((Message("user", "Do it."),))

    async def step(self, action: str, timeout_s: float) -> StepResult:
        self.commands.append(action)
        if action == "hang":
            await asyncio.Event().wait()
        return StepResult(f"ran {action}", done=action == "finish")

    async def score(self, timeout_s: float) -> Score:
        return Score(0.25, {"part": 1.0})

    async def close(self) -> None:
        self.closed += 1


def session(chat: ChatRenderer, environment: Scripted, turns: int = 3) -> AgentSession:
    return AgentSession(environment, chat, max_turns=turns, observation_tokens=32)


def says(chat: ChatRenderer, text: str) -> list[int]:
    return [*chat._encode(text), chat.end_token]


async def test_a_turn_is_a_command_and_what_it_printed(chat: ChatRenderer) -> None:
    environment = Scripted()
    agent = session(chat, environment)
    ids = await agent.start()
    assert ids == chat.prompt([Message("user", "Do it.")])
    response = says(chat, "```sh\nls\n```")
    advance = await agent.advance(response)
    assert advance.stop is None and environment.commands == ["ls"]
    whole = [Message("user", "Do it."), Message("assistant", "```sh\nls\n```"), Message("user", "ran ls")]
    assert [*ids, *response, *advance.observation_ids] == chat.prompt(whole)


async def test_the_environment_ends_the_task(chat: ChatRenderer) -> None:
    advance = await session(chat, Scripted()).advance(says(chat, "```sh\nfinish\n```"))
    assert (advance.stop, advance.observation_ids) == (StopReason.SUBMITTED, ())


async def test_the_agent_ends_the_task(chat: ChatRenderer) -> None:
    environment = Scripted()
    advance = await session(chat, environment).advance(says(chat, "```sh\nsubmit\n```"))
    assert (advance.stop, advance.observation_ids) == (StopReason.SUBMITTED, ())
    assert environment.commands == []


async def test_turns_are_limited(chat: ChatRenderer) -> None:
    environment = Scripted()
    agent = session(chat, environment, turns=2)
    assert (await agent.advance(says(chat, "```sh\nls\n```"))).stop is None
    advance = await agent.advance(says(chat, "```sh\npwd\n```"))
    assert (advance.stop, advance.observation_ids) == (StopReason.TURN_LIMIT, ())
    assert environment.commands == ["ls", "pwd"]  # the last command counts


async def test_the_end_is_not_the_turn_limit(chat: ChatRenderer) -> None:
    assert (await session(chat, Scripted(), turns=1).advance(says(chat, "```sh\nfinish\n```"))).stop == "submitted"


async def test_a_malformed_turn_is_answered_and_kept(chat: ChatRenderer) -> None:
    environment = Scripted()
    agent = session(chat, environment)
    ids = await agent.start()
    response = says(chat, "I would list the files.")
    advance = await agent.advance(response)
    assert advance.stop is None and environment.commands == []
    whole = [
        Message("user", "Do it."),
        Message("assistant", "I would list the files."),
        Message("user", FORMAT_ERROR),
    ]
    assert [*ids, *response, *advance.observation_ids] == chat.prompt(whole)
    await agent.advance(says(chat, "no"))
    assert (await agent.advance(says(chat, "no"))).stop is StopReason.TURN_LIMIT
    assert (await agent.score()).detail == {"part": 1.0, "turns": 3.0, "format_errors": 3.0}


async def test_a_response_that_was_cut_still_counts(chat: ChatRenderer) -> None:
    environment = Scripted()
    advance = await session(chat, environment).advance(says(chat, "```sh\nls")[:-1])
    assert environment.commands == ["ls"]
    assert advance.observation_ids[0] == chat.end_token


async def test_an_empty_response_is_a_malformed_turn(chat: ChatRenderer) -> None:
    agent = session(chat, Scripted())
    assert (await agent.advance([])).stop is None
    assert agent.format_errors == 1


async def test_observations_end_with_the_reminder_and_keep_the_budget(chat: ChatRenderer) -> None:
    agent = session(chat, Scripted(reminder="Do it."))
    advance = await agent.advance(says(chat, "```sh\n" + "long " * 300 + "\n```"))
    text = chat.decode(advance.observation_ids)
    assert "tokens cut" in text and "\nDo it." in text
    assert len(advance.observation_ids) <= 32 + len(chat.between([chat.end_token], ""))


async def test_silence_is_a_fault_of_the_machine(chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.agent.GRACE_S", 0.0)
    with pytest.raises(InfrastructureError, match="a step took longer"):
        await session(chat, Scripted()).advance(says(chat, "```sh\nhang\n```"), timeout_s=0.05)


async def test_close_closes(chat: ChatRenderer) -> None:
    environment = Scripted()
    agent = session(chat, environment)
    await agent.close()
    await agent.close()
    assert environment.closed == 2


@pytest.mark.parametrize("reward", [-0.1, 1.1, float("nan")])
def test_rewards_are_between_0_and_1(reward: float) -> None:
    with pytest.raises(ValueError):
        Score(reward)
