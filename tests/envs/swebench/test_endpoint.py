"""`pearl env run --endpoint`, against a server that speaks as OpenAI's do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from envs.swebench.load import save_tasks
from pearl.env_command import app
from pearl.errors import UserError
from tests.envs.swebench.conftest import record

TURNS = (
    "I look first.\n```bash\ncat src/sums.py\n```",
    "No block at all.",
    "<think>```bash\nrm -rf .\n```</think>Repair:\n```bash\nsed -i 's/n + 3/2 * n/' src/sums.py\n```",
    "```bash\nsubmit\n```",
)


class Server:
    """Answers with TURNS in order, whatever is asked; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.add_routes([web.get("/v1/models", self._models), web.post("/v1/chat/completions", self._chat)])
        runner = web.AppRunner(application)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["model"] != "tiny":
            return web.json_response({"error": "no such model"}, status=404)
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        message = {"role": "assistant", "content": TURNS[len(self.asked) - 1]}
        return web.json_response({"choices": [{"message": message}]})

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture
def tasks(tmp_path: Path, source: Path) -> Path:
    save_tasks(tmp_path / "tasks.jsonl", [record(source)])
    return tmp_path / "tasks.jsonl"


def play(tasks: Path, cache: Path, *options: str) -> str:
    words = ["run", str(tasks), "--cache", str(cache), *options]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_model_plays_until_it_submits(
    server: Server, tasks: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a-key")
    said = play(tasks, cache, "--endpoint", server.url)
    assert "reward 1, resolved 1" in said and "return n + 3" in said
    assert len(server.asked) == len(TURNS) and set(server.keys) == {"Bearer a-key"}
    last = [message["content"] for message in server.asked[-1]["messages"]]
    assert [message["role"] for message in server.asked[0]["messages"]] == ["system", "user"]
    assert TURNS[1] in last and any("your answer has none" in text for text in last)


def test_turns_end(server: Server, tasks: Path, cache: Path) -> None:
    assert "reward 0" in play(tasks, cache, "--endpoint", server.url, "--model", "tiny", "--turns", "2")
    assert len(server.asked) == 2


def test_what_the_server_says_is_told(server: Server, tasks: Path, cache: Path) -> None:
    with pytest.raises(UserError, match=r"404.*no such model"):
        play(tasks, cache, "--endpoint", server.url, "--model", "other")
    with pytest.raises(UserError, match=r"gave no answer.*--endpoint"):
        play(tasks, cache, "--endpoint", "http://127.0.0.1:9/v1")
