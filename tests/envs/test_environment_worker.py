"""The actor, called as the driver calls it."""

import asyncio
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.environment import EnvironmentWorker, sweep
from envs import agent
from envs.chat import ChatRenderer
from envs.errors import InfrastructureError
from pearl.config.environment import EnvironmentConfig, SandboxConfig
from pearl.errors import UserError
from pearl.models import resolve_model
from tests.envs.conftest import processes_with, until


def config(directory: Path, **changes: Any) -> dict[str, Any]:
    sandbox = SandboxConfig(directory=str(directory))
    return EnvironmentConfig(tasks=10, sandbox=sandbox, **changes).model_dump(mode="json")


@pytest.fixture
async def worker(
    directory: Path, chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EnvironmentWorker]:
    monkeypatch.setattr(ChatRenderer, "load", lambda _: chat)
    made = EnvironmentWorker()
    await made.start(config(directory, sandboxes_per_worker=32), "model", "/runs/one", "e0.0")
    yield made
    await made.stop()
    await made.stop()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]
    assert processes_with(str(directory)) == []


def says(chat: ChatRenderer, command: str) -> list[int]:
    return [*chat._encode(f"```sh\n{command}\n```"), chat.end_token]


def solution(worker: EnvironmentWorker, index: int) -> str:
    assert worker._family is not None
    return worker._family.solution(index)  # type: ignore[attr-defined]


async def test_a_trajectory_from_start_to_end(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    tasks = await worker.tasks()
    assert tasks["count"] == 10 == len(set(tasks["names"]))
    opened = await worker.open([0, 1, 0], 3, 60.0)
    assert opened["task"] == tasks["names"][3] and opened["prompt_ids"][-1] != chat.end_token
    seen = await worker.advance([0, 1, 0], says(chat, "ls"), 60.0)
    assert seen["stop"] is None and seen["observation_ids"]
    assert (await worker.score([0, 1, 0], 60.0))["reward"] == 0.0
    ended = await worker.advance([0, 1, 0], says(chat, solution(worker, 3)), 60.0)
    assert ended == {"observation_ids": [], "stop": "submitted", "state": ""}
    score = await worker.score([0, 1, 0], 60.0)
    assert score["reward"] == 1.0 and score["detail"]["turns"] == 2.0
    assert json.loads(json.dumps([tasks, opened, seen, ended, score])) == [tasks, opened, seen, ended, score]
    await worker.close([0, 1, 0])
    await worker.close((0, 1, 0))


async def test_32_trajectories_at_once(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    async def play(number: int) -> float:
        key = [number, 0, 0]
        await worker.open(key, number % 10, 60.0)
        await worker.advance(key, says(chat, solution(worker, number % 10)), 60.0)
        return (await worker.score(key, 60.0))["reward"]

    assert await asyncio.gather(*(play(number) for number in range(32))) == [1.0] * 32
    with pytest.raises(InfrastructureError, match="sandboxes_per_worker"):
        await worker.open([99, 0, 0], 0, 60.0)
    await worker.close([5, 0, 0])
    await worker.open([99, 0, 0], 0, 60.0)


async def test_opening_again_starts_anew(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    key = [1, 0, 0]
    await worker.open(key, 0, 60.0)
    await worker.advance(key, says(chat, solution(worker, 0)), 60.0)
    await worker.open(key, 0, 60.0)
    assert (await worker.score(key, 60.0))["reward"] == 0.0


async def test_what_is_not_open_is_an_infrastructure_fault(worker: EnvironmentWorker) -> None:
    with pytest.raises(InfrastructureError, match="not open"):
        await worker.advance([7, 0, 0], [1], 60.0)
    with pytest.raises(InfrastructureError, match="not open"):
        await worker.score([7, 0, 0], 60.0)
    with pytest.raises(InfrastructureError, match="not started"):
        await EnvironmentWorker().open([0, 0, 0], 0, 60.0)
    with pytest.raises(IndexError):
        await worker.open([7, 0, 0], 10, 60.0)
    assert worker._sessions == {}


async def test_close_ends_what_runs(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    await worker.open([0, 0, 0], 0, 60.0)
    step = asyncio.create_task(worker.advance([0, 0, 0], says(chat, "sleep 98440"), 60.0))
    await until(lambda: processes_with("sleep\0" + "98440"))
    await worker.close([0, 0, 0])
    assert processes_with("98440") == []
    with pytest.raises(InfrastructureError):
        await step


async def test_stop_ends_what_runs(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    for number in range(4):
        await worker.open([number, 0, 0], 0, 60.0)
    steps = [
        asyncio.create_task(worker.advance([number, 0, 0], says(chat, "setsid sleep 98441"), 60.0))
        for number in range(4)
    ]
    await until(lambda: len(processes_with("sleep\0" + "98441")) >= 4)
    await worker.stop()
    assert processes_with("98441") == []
    assert all(
        isinstance(result, InfrastructureError) for result in await asyncio.gather(*steps, return_exceptions=True)
    )


async def test_a_late_command_is_the_agents_affair(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    await worker.open([0, 0, 0], 0, 60.0)
    seen = await worker.advance([0, 0, 0], says(chat, "sleep 98442"), 1.0)
    assert seen["stop"] is None and "killed after" in chat.decode(seen["observation_ids"])
    assert (await worker.score([0, 0, 0], 60.0))["reward"] == 0.0


@pytest.mark.parametrize("grace_s", [agent.GRACE_S, -1.0])
async def test_a_sandbox_outlives_a_deadline_by_the_budget_of_scoring(
    worker: EnvironmentWorker, chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch, grace_s: float
) -> None:
    """Whether the environment keeps the deadline of a step, or is cut off at it: what was done can still be scored."""
    monkeypatch.setattr(agent, "GRACE_S", grace_s)
    await worker.open([0], 3, 60.0)
    late = says(chat, f"{solution(worker, 3)}\nsleep 98447")
    if grace_s < 0:
        with pytest.raises(InfrastructureError, match="a step took longer than 2 s"):
            await worker.advance([0], late, 2.0)
    else:
        assert (await worker.advance([0], late, 2.0))["stop"] == "submitted"
    assert processes_with("98447") == []
    assert (await worker.score([0], 60.0))["reward"] == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"family": "fils"}, "bugfix, files"), ({"family": "no.module:F"}, "cannot be imported")],
)
async def test_a_failed_start_leaves_nothing(
    directory: Path, chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(ChatRenderer, "load", lambda _: chat)
    with pytest.raises(UserError, match=message):
        await EnvironmentWorker().start(config(directory, **changes), "model", "/runs/one", "e0")
    assert [entry.name for entry in directory.iterdir()] == [".lock"]


KILLED = """
import asyncio, json, sys
from actors.environment import EnvironmentWorker

async def main():
    worker = EnvironmentWorker()
    await worker.start(json.loads(sys.argv[1]), sys.argv[2], "/runs/one", "e0.0")
    for number in range(3):
        await worker.open([number, 0, 0], 0, 60.0)
    ids = worker._chat._encode("```sh\\nsetsid sleep 98443\\n```")
    await asyncio.gather(*(worker.advance([number, 0, 0], ids, 600.0) for number in range(3)))

asyncio.run(main())
"""


async def test_a_killed_worker_leaves_nothing_after_the_next_start(
    directory: Path, chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = SandboxConfig(directory=str(directory), command_s=600)
    settings = EnvironmentConfig(sandbox=sandbox).model_dump(mode="json")
    model = str(resolve_model("smollm2-135m-instruct"))
    process = subprocess.Popen([sys.executable, "-c", KILLED, json.dumps(settings), model])  # noqa: ASYNC220
    try:
        await until(lambda: len(processes_with("sleep\0" + "98443")) >= 3, 60.0)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    await until(lambda: not processes_with("98443"))
    monkeypatch.setattr(ChatRenderer, "load", lambda _: chat)
    worker = EnvironmentWorker()
    started = await worker.start(config(directory), model, "/runs/one", "e0.1")
    assert [name.rsplit("-", 2)[0] for name in started["swept"]] == ["one-e0.0"]
    assert started["directory"] == str(directory)
    await worker.stop()
    assert sweep(started["directory"]) == []
    assert [entry.name for entry in directory.iterdir()] == [".lock"]


def test_errors_cross_processes() -> None:
    error = pickle.loads(pickle.dumps(InfrastructureError("no sandbox")))
    assert isinstance(error, InfrastructureError) and str(error) == "no sandbox"


async def test_a_trajectory_is_rebuilt_by_playing_it_again(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    opened = await worker.open([0, 0, 0], 3, 60.0)
    response = says(chat, "echo note > note.txt; cat note.txt")
    seen = await worker.advance([0, 0, 0], response, 60.0)
    turn = [response, seen["observation_ids"], seen["state"]]
    again = await worker.reopen([0, 0, 1], 3, opened["prompt_ids"], [turn], 60.0)
    assert again == {"difference": ""}
    assert (await worker.score([0, 0, 1], 60.0))["reward"] == (await worker.score([0, 0, 0], 60.0))["reward"]
    other = [response, seen["observation_ids"], "another hash"]
    assert "other files" in (await worker.reopen([0, 0, 2], 3, opened["prompt_ids"], [other], 60.0))["difference"]
    otherwise = [says(chat, "ls"), seen["observation_ids"], seen["state"]]
    assert "otherwise" in (await worker.reopen([0, 0, 3], 3, opened["prompt_ids"], [otherwise], 60.0))["difference"]
    assert "prompt" in (await worker.reopen([0, 0, 4], 4, opened["prompt_ids"], [turn], 60.0))["difference"]
