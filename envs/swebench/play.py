"""One task played outside of a training run: by hand, with a patch, or with a model behind an HTTP endpoint."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from envs.families.shell import describe
from envs.protocol import Message, Score
from envs.sandbox.protocol import SandboxBackend, SandboxOverLimit
from envs.swebench.builder import Builder, BuiltTask
from envs.swebench.conventions import SUBMIT, parse, prompt
from envs.swebench.grade import grade_changes
from envs.swebench.limits import LIMITS
from envs.swebench.trial import service
from pearl.errors import UserError

Answer = Callable[[Sequence[Message]], Awaitable[str]]
"""From the conversation so far to a response."""
PROBLEM_CHARS = 16_000
REQUEST_S = 600.0
SAID_CHARS = 300


async def grade_patch(built: BuiltTask, builder: Builder, backend: SandboxBackend, patch: str, test_s: float) -> Score:
    """The score of a patch, under the same guard as an agent's work."""
    changes = await asyncio.to_thread(builder.changes, built, patch)
    return await grade_changes(
        built, backend, changes, reward="fraction", test_s=test_s, attempts=2, timeout_s=2 * test_s
    )


async def play(
    built: BuiltTask,
    backend: SandboxBackend,
    answer: Answer,
    say: Callable[[str], None],
    *,
    turns: int,
    test_s: float,
) -> Score:
    """Let `answer` act until it submits, then grade what it left."""
    messages = list(prompt(built.record, built.recipe, PROBLEM_CHARS))
    say("\n\n".join(message.content for message in messages))
    sandbox = await backend.create_from(built.image)
    try:
        for _ in range(turns):
            response = await answer(messages)
            say(f"\n{response}")
            action = parse(response)
            if action.submit:
                break
            if action.command is None:
                seen = action.fault
            else:
                result = await sandbox.exec(service(built) + action.command, timeout_s=LIMITS.command_s)
                seen = describe(result, LIMITS.command_s)
            say(seen)
            messages += [Message("assistant", response), Message("user", seen)]
        changes = await sandbox.diff()
    except SandboxOverLimit:
        return Score(0.0, {"over_limit": 1.0})
    finally:
        await sandbox.close()
    return await grade_changes(
        built, backend, changes, reward="fraction", test_s=test_s, attempts=2, timeout_s=2 * test_s
    )


def play_by_hand() -> Answer:
    """Each line of standard input is a command; its end submits."""

    async def answer(_: Sequence[Message]) -> str:
        line = await asyncio.to_thread(sys.stdin.readline)
        command = line.strip() or ":" if line else SUBMIT[0]
        return f"```bash\n{command}\n```"

    return answer


def play_with_model(endpoint: str, model: str | None) -> Answer:
    """A chat model behind an OpenAI-compatible endpoint, as SGLang's and vLLM's servers are; the first that it lists if
    none is named. `OPENAI_API_KEY` is sent if it is set."""
    named = [model] if model else []

    async def answer(messages: Sequence[Message]) -> str:
        if not named:
            named.append((await _ask(endpoint, "models", None))["data"][0]["id"])
        body = {"model": named[0], "messages": [{"role": m.role, "content": m.content} for m in messages]}
        reply = await _ask(endpoint, "chat/completions", body)
        return reply["choices"][0]["message"]["content"] or ""

    async def checked(messages: Sequence[Message]) -> str:
        try:
            return await answer(messages)
        except (LookupError, TypeError) as error:
            raise _unusable(endpoint, f"an answer of another form ({error!r})") from error

    return checked


async def _ask(endpoint: str, path: str, body: dict[str, Any] | None) -> Any:
    import aiohttp

    url = f"{endpoint.rstrip('/')}/{path}"
    key = os.environ.get("OPENAI_API_KEY")
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as session,
            session.request(
                "GET" if body is None else "POST",
                url,
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
            ) as reply,
        ):
            text = await reply.text()
            if reply.status != 200:
                raise _unusable(url, f"{reply.status}: {text[:SAID_CHARS]}")
            return json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise _unusable(url, repr(error)) from error


def _unusable(url: str, said: str) -> UserError:
    return UserError(
        f"{url} gave no answer: {said}",
        "Start the server, and check --endpoint (http://host:port/v1) and --model.",
    )
