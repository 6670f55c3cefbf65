"""What all built-in tasks share: a sandbox with a few files, in which the agent's shell commands run."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

from envs.errors import InfrastructureError
from envs.protocol import Message, Observation, Score, StepResult, Task
from envs.sandbox.protocol import CommandResult, Entry, Sandbox, SandboxBackend, SandboxOverLimit
from pearl.config.environment import SandboxConfig


class ShellEnvironment:
    """Subclasses say what the prompt is, when the task is done, and what the workspace is worth."""

    def __init__(
        self,
        task: Task,
        files: Mapping[str, bytes],
        messages: tuple[Message, ...],
        backend: SandboxBackend,
        limits: SandboxConfig,
    ) -> None:
        self._task = task
        self._files = files
        self._messages = messages
        self._backend = backend
        self._limits = limits
        self._sandbox: Sandbox | None = None

    @property
    def task(self) -> Task:
        return self._task

    async def grade(self, workspace: Mapping[str, Entry], timeout_s: float) -> Score:
        raise NotImplementedError

    async def reset(self, timeout_s: float) -> Observation:
        await self.close()
        async with asyncio.timeout(timeout_s):
            self._sandbox = await self._backend.create(self._files)
        return Observation(self._messages)

    async def step(self, action: str, timeout_s: float) -> StepResult:
        """Run the command; the task is over when it has earned all there is to earn."""
        end = asyncio.get_running_loop().time() + timeout_s
        limit = min(self._limits.command_s, 0.8 * timeout_s)
        try:
            result = await self._open().exec(action, timeout_s=limit)
        except SandboxOverLimit:
            return StepResult("The disk is full.", done=True)
        if result.over_disk:
            return StepResult("The disk is full.", done=True)
        score = await self.score(end - asyncio.get_running_loop().time())
        return StepResult(describe(result, limit), done=score.reward == 1.0)

    async def score(self, timeout_s: float) -> Score:
        try:
            workspace = await self._open().snapshot()
        except SandboxOverLimit:
            return Score(0.0, {"over_limit": 1.0})
        return await self.grade(workspace, timeout_s)

    async def fingerprint(self) -> str:
        """Hash of all files, their kinds and contents."""
        try:
            workspace = await self._open().snapshot()
        except SandboxOverLimit:
            return "over limit"
        digest = hashlib.sha256()
        for path, entry in sorted(workspace.items()):
            digest.update(repr((path, entry.kind, len(entry.data))).encode() + entry.data)
        return digest.hexdigest()[:32]

    async def close(self) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()
            self._sandbox = None

    def _open(self) -> Sandbox:
        if self._sandbox is None:
            raise InfrastructureError("the environment is not open")
        return self._sandbox


def describe(result: CommandResult, wall_s: float) -> str:
    """What an agent is told about its command."""
    lines = [result.output.rstrip()] if result.output.strip() else []
    if result.timed_out:
        lines.append(f"[killed after {wall_s:g} s]")
    elif result.over_output:
        lines.append("[killed: too much output]")
    elif result.over_memory:
        lines.append("[processes were killed: too much memory]")
    elif result.exit_code:
        lines.append(f"[exit code {result.exit_code}]")
    return "\n".join(lines) or "[no output]"
