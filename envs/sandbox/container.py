"""Sandboxes of Podman or Docker: a container that is started anew for each command, over its own writable layer.

A container ends with its first process, and the kernel ends all others with that one; `exec` in a running container
would leave behind what a command started.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envs.errors import InfrastructureError
from envs.sandbox.archives import Base, unpack_all, unpack_changes
from envs.sandbox.command import Finished, Killed, run_bounded
from envs.sandbox.engine import Engine
from envs.sandbox.memory import memory_over
from envs.sandbox.protocol import Entry
from envs.sandbox.serial import MB, SHELL, SerialSandbox, What, inside
from pearl.config.environment import SandboxConfig

RUNNER = (
    'read -r banner && read -r length && script=$(head -c "$length"; echo x) && printf %s "$banner" '
    f'&& exec 2>/dev/null && {SHELL} -c "${{script%x}}" 2>&1; exit $?'
)
"""The first process: reads what to print when it begins, and a script; the rest of its input is the script's.
Both outputs go through one pipe: an engine does not keep the order of two."""
DELETE_S = 60.0
UNKNOWN_BYTES = 1 << 62
"""Of a tree that is too deep to be walked: nobody knows what it hides."""
FIRST_POLL, DISK_EVERY = 5, 20
"""The engine is asked for the size of the layer at these polls: a start of its client costs 50 ms of a core."""


@dataclass(frozen=True, slots=True)
class State:
    pid: int
    running: bool
    exit_code: int
    out_of_memory: bool
    layer_bytes: int


class ContainerSandbox(SerialSandbox):
    """See `envs.sandbox.protocol.Sandbox`. `name`: of a container that was made with RUNNER and not started."""

    def __init__(self, engine: Engine, name: str, workspace: str, base: Base, limits: SandboxConfig) -> None:
        super().__init__(limits)
        self._engine, self._name, self._workspace, self._base = engine, name, workspace, base

    async def _run_alone(
        self, command: Sequence[str], timeout_s: float, keep_bytes: int, stdin: bytes, quiet: bool
    ) -> tuple[Finished, int | None]:
        banner = secrets.token_hex(8).encode()
        script = shlex.join(command).encode() + (b" 2>/dev/null" if quiet else b"")
        polls = 0
        pid = 0

        async def check() -> Killed | None:
            nonlocal polls, pid
            polls += 1
            if pid and await asyncio.to_thread(memory_over, pid, self._limits.memory_mb * MB):
                return Killed.MEMORY
            if polls % DISK_EVERY == FIRST_POLL:
                state = await self._state()
                pid = state.pid
                return Killed.DISK if self._is_over(state) else None
            return None

        try:
            finished = await run_bounded(
                [self._engine.program, "start", "--attach", "--interactive", self._name],
                timeout_s=timeout_s,
                keep_bytes=keep_bytes,
                kill_after_bytes=self._limits.file_mb * MB,
                stdin=b"%s\n%d\n%s%s" % (banner, len(script), script, stdin),
                env=self._engine.variables,
                cwd=self._engine.directory,
                banner=banner,
                check=check,
            )
        finally:
            state = await self._ended()
        self._over = self._over or self._is_over(state)
        finished = replace(finished, out_of_memory=state.out_of_memory)
        return finished, None if finished.killed is not None else state.exit_code

    async def _ended(self) -> State:
        """Kill what is left, and wait until nothing is."""
        state = await self._state()
        if state.running:
            try:
                await self._engine.call("kill", "--signal", "KILL", self._name)
            except InfrastructureError:
                pass  # it has ended meanwhile, or the wait fails, too
            await self._engine.call("wait", self._name)
            state = await self._state()
        return state

    async def _state(self) -> State:
        template = "{{.State.Pid}} {{.State.Running}} {{.State.ExitCode}} {{.State.OOMKilled}} {{.SizeRw}}"
        said = await self._engine.call("container", "inspect", "--size", "--format", template, self._name)
        *logged, line = said.splitlines()
        pid, running, exit_code, out_of_memory, size = line.split()
        known = size.isdigit() and not any("level=error" in one for one in logged)
        layer_bytes = int(size) if known else UNKNOWN_BYTES
        return State(int(pid), running == "true", int(exit_code), out_of_memory == "true", layer_bytes)

    def _is_over(self, state: State) -> bool:
        return state.layer_bytes > self._limits.disk_mb * MB

    async def delete(self, paths: Sequence[str]) -> None:
        """Before an agent's first command: files that its start lacks."""
        _, exit_code = await self._run(["/bin/rm", "-rf", "--", *map(inside, paths)], DELETE_S, 4096)
        if exit_code != 0:
            raise InfrastructureError(f"{len(paths)} files of a new sandbox cannot be deleted")

    async def _look(self, what: What, limit: int) -> dict[str, Entry]:
        return await asyncio.to_thread(self._read, what, limit)

    def _read(self, what: What, limit: int) -> dict[str, Entry]:
        with self._engine.reading("cp", f"{self._name}:{self._workspace}", "-") as stream:
            return unpack_all(stream, limit) if what == "all" else unpack_changes(stream, self._base, limit)

    async def _remove(self) -> None:
        await self._engine.call("rm", "--force", "--volumes", self._name)
