"""The family as an environment worker plays it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from actors.environment import EnvironmentWorker
from envs.chat import ChatRenderer
from envs.families.swebench import SwebenchFamily
from envs.sandbox.backend import BubblewrapBackend
from envs.swebench.limits import LIMITS
from envs.swebench.load import save_tasks
from pearl.config.environment import EnvironmentConfig, SandboxConfig
from pearl.config.swebench import SwebenchConfig
from pearl.errors import UserError
from tests.envs.swebench.conftest import record

FIX = "sed -i 's/n + 3/2 * n/' src/sums.py"


def config(directory: Path, cache: Path, tasks: Path) -> EnvironmentConfig:
    return EnvironmentConfig(
        family="swebench",
        max_turns=5,
        observation_tokens=64,
        sandbox=LIMITS.model_copy(update={"directory": str(directory)}),
        swebench=SwebenchConfig(tasks_file=str(tasks), cache=str(cache)),
    )


@pytest.fixture
def tasks(tmp_path: Path, source: Path) -> Path:
    unbuildable = record(source, instance_id="unbuildable", build={"source": "/nonexistent", "test_cmd": ["x"]})
    save_tasks(tmp_path / "tasks.jsonl", [record(source), unbuildable])
    return tmp_path / "tasks.jsonl"


@pytest.fixture
async def worker(
    directory: Path, cache: Path, tasks: Path, chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[EnvironmentWorker]:
    monkeypatch.setattr(ChatRenderer, "load", lambda _: chat)
    made = EnvironmentWorker()
    await made.start(config(directory, cache, tasks).model_dump(mode="json"), "model", "/runs/one", "e0.0")
    yield made
    await made.stop()
    assert [entry.name for entry in directory.iterdir()] == [".lock"]


def says(chat: ChatRenderer, text: str) -> list[int]:
    return [*chat._encode(text), chat.end_token]


def does(chat: ChatRenderer, command: str) -> list[int]:
    return says(chat, f"```bash\n{command}\n```")


async def test_a_worker_builds_and_names_what_cannot_be_built(worker: EnvironmentWorker) -> None:
    assert (await worker.tasks())["names"] == ["own__sums-1", "unbuildable"]
    faults = (await worker.prepare())["faults"]
    assert list(faults) == ["unbuildable"] and faults["unbuildable"].startswith("build_failed")


async def test_a_trajectory_that_repairs_the_repository(worker: EnvironmentWorker, chat: ChatRenderer) -> None:
    opened = await worker.open([0], 0, 60.0)
    assert "double(4) is 7" in chat.decode(opened["prompt_ids"])
    malformed = await worker.advance([0], says(chat, "I would look at it."), 60.0)
    assert malformed["stop"] is None and "exactly one command" in chat.decode(malformed["observation_ids"])
    long = await worker.advance([0], does(chat, "seq 1 5000"), 60.0)
    text = chat.decode(long["observation_ids"])
    assert "cut" in text and "5000" in text and "\n1\n2\n" in text and len(long["observation_ids"]) < 120
    assert (await worker.score([0], 60.0))["reward"] == 0.0
    await worker.advance([0], does(chat, FIX), 60.0)
    end = await worker.advance([0], does(chat, "submit"), 60.0)
    assert end["stop"] == "submitted"
    score = await worker.score([0], 60.0)
    assert score["reward"] == 1.0 and score["detail"]["format_errors"] == 1.0 and score["detail"]["resolved"] == 1.0


async def test_a_trajectory_is_carried_to_another_worker(
    worker: EnvironmentWorker, chat: ChatRenderer, directory: Path, cache: Path, tasks: Path
) -> None:
    opened = await worker.open([1], 0, 60.0)
    history = []
    for command in ("cat src/sums.py", FIX, "python -c 'import sums; print(sums.double(4))'"):
        response = does(chat, command)
        reply = await worker.advance([1], response, 60.0)
        history.append([response, reply["observation_ids"], reply["state"]])
    assert history[0][2] != history[1][2] == history[2][2]
    other = EnvironmentWorker()
    await other.start(config(directory, cache, tasks).model_dump(mode="json"), "model", "/runs/one", "e1.0")
    try:
        assert await other.reopen([1], 0, opened["prompt_ids"], history, 60.0) == {"difference": ""}
        assert (await other.score([1], 60.0))["reward"] == 1.0
        history[1][2] = "another state"
        assert "turn 2" in (await other.reopen([2], 0, opened["prompt_ids"], history, 60.0))["difference"]
    finally:
        await other.stop()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"swebench": SwebenchConfig()}, "tasks_file"),
        ({"sandbox": SandboxConfig()}, "memory_mb"),
        ({"swebench": SwebenchConfig(tasks_file="/nonexistent.jsonl")}, "do not exist"),
    ],
)
async def test_bad_settings_are_named(
    backend: BubblewrapBackend, directory: Path, cache: Path, tasks: Path, changes: dict[str, object], named: str
) -> None:
    with pytest.raises(UserError, match=named):
        SwebenchFamily(config(directory, cache, tasks).model_copy(update=changes), backend)


async def test_tasks_that_nothing_can_judge_are_refused(
    backend: BubblewrapBackend, directory: Path, cache: Path, tmp_path: Path, source: Path
) -> None:
    save_tasks(tmp_path / "t.jsonl", [record(source, fail_to_pass=())])
    with pytest.raises(UserError, match="pearl env validate"):
        SwebenchFamily(config(directory, cache, tmp_path / "t.jsonl"), backend)
