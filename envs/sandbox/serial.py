"""What all sandboxes share: one command after the other, text of its output, an end that waits for a running one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from envs.errors import InfrastructureError
from envs.sandbox.command import Finished, Killed
from envs.sandbox.protocol import CommandResult, Entry, SandboxOverLimit
from pearl.config.environment import SandboxConfig

MB = 1 << 20
CUT = "\n[... {} bytes cut ...]\n"
SHELL = "/bin/bash"
What = Literal["all", "changes"]


class SerialSandbox:
    """See `envs.sandbox.protocol.Sandbox`. Subclasses run one command, read the workspace, and remove it."""

    def __init__(self, limits: SandboxConfig) -> None:
        self._limits = limits
        self._busy = asyncio.Lock()
        self._running: asyncio.Task[tuple[Finished, int | None]] | None = None
        self._over = False
        self._end = asyncio.Lock()
        self._closed = self._removed = False

    async def _run_alone(
        self, command: Sequence[str], timeout_s: float, keep_bytes: int, stdin: bytes, quiet: bool
    ) -> tuple[Finished, int | None]:
        """Run a command, and return when all that it started is gone; its exit code, None if it was killed.

        `quiet`: without its standard error. Sets `_over` if it left more than the sandbox may hold.
        """
        raise NotImplementedError

    async def _look(self, what: What, limit: int) -> dict[str, Entry]:
        """Contents of the workspace, or what differs from its start, while no command runs."""
        raise NotImplementedError

    async def _remove(self) -> None:
        raise NotImplementedError

    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", keep_bytes: int | None = None
    ) -> CommandResult:
        finished, exit_code = await self._run(
            [SHELL, "-c", command], timeout_s, keep_bytes or self._limits.output_chars, stdin=stdin
        )
        head = finished.output[: finished.head].decode(errors="replace")
        tail = finished.output[finished.head :].decode(errors="replace")
        return CommandResult(
            exit_code,
            (head + CUT.format(finished.cut) + tail if finished.cut else head + tail).replace("\0", ""),
            timed_out=finished.killed is Killed.WALL_TIME,
            over_output=finished.killed is Killed.OUTPUT,
            over_memory=finished.killed is Killed.MEMORY or finished.out_of_memory,
            over_disk=self._over,
        )

    async def read(self, path: str, *, timeout_s: float, limit: int = MB) -> bytes | None:
        command = ["/usr/bin/head", "-c", str(limit), "--", inside(path)]
        finished, exit_code = await self._run(command, timeout_s, limit, quiet=True)
        return finished.output if exit_code == 0 and not finished.cut else None

    async def write(self, path: str, data: bytes, *, timeout_s: float) -> bool:
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        _, exit_code = await self._run([SHELL, "-c", script, "write", inside(path)], timeout_s, 4096, stdin=data)
        return exit_code == 0

    async def snapshot(self, *, limit: int = 8 * MB) -> dict[str, Entry]:
        return await self._look_alone("all", limit)

    async def diff(self, *, limit: int = 8 * MB) -> dict[str, Entry]:
        return await self._look_alone("changes", limit)

    async def close(self) -> None:
        self._closed = True
        async with self._end:
            if self._removed:
                return
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait({self._running})
            await self._remove()
            self._removed = True

    async def _look_alone(self, what: What, limit: int) -> dict[str, Entry]:
        async with self._busy:
            if self._closed:
                raise InfrastructureError("the sandbox is closed")
            if self._over:
                raise SandboxOverLimit("the sandbox is full")
            return await self._look(what, limit)

    async def _run(
        self,
        command: Sequence[str],
        timeout_s: float,
        keep_bytes: int,
        *,
        stdin: bytes = b"",
        quiet: bool = False,
    ) -> tuple[Finished, int | None]:
        """In a task of its own: whoever waits may go away, the end of the process tree is waited for all the same."""
        async with self._busy:
            if self._closed:
                raise InfrastructureError("the sandbox is closed")
            if self._over:
                raise SandboxOverLimit("the sandbox is full")
            self._running = asyncio.create_task(self._run_alone(command, timeout_s, keep_bytes, stdin, quiet))
            try:
                return await self._running
            except asyncio.CancelledError:
                if self._closed:
                    raise InfrastructureError("the sandbox was closed while a command ran in it") from None
                raise
            finally:
                self._running = None


def inside(path: str) -> str:
    if path.startswith("/") or ".." in Path(path).parts:
        raise ValueError(f"{path!r} is not a path inside the workspace")
    return "./" + path
