"""Sandboxes of bubblewrap: one `bwrap` per command over a writable layer that stays between commands."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.errors import InfrastructureError
from envs.sandbox.command import Finished, Killed, run_bounded
from envs.sandbox.folder import disk_use, remove_tree
from envs.sandbox.layers import read_changes, read_layers, write_changes
from envs.sandbox.mounts import Mounts
from envs.sandbox.protocol import CommandResult, Entry, SandboxImage, SandboxOverLimit
from envs.sandbox.user import SandboxUser
from pearl.config.environment import SandboxConfig

MB = 1 << 20
CUT = "\n[... {} bytes cut ...]\n"


class BubblewrapSandbox:
    """See `envs.sandbox.protocol.Sandbox`."""

    def __init__(
        self,
        folder: Path,
        lower: Path | SandboxImage,
        mounts: Mounts,
        user: SandboxUser,
        limits: SandboxConfig,
        changes: Mapping[str, Entry] | None = None,
    ) -> None:
        image = lower if isinstance(lower, SandboxImage) else None
        self._folder, self._lower = folder, lower.tree if isinstance(lower, SandboxImage) else lower
        self._limits = limits
        self._upper, self._work, self._tmp = folder / "upper", folder / "work", folder / "tmp"
        folder.mkdir(mode=0o700)
        for layer in (self._upper, self._work, self._tmp):
            layer.mkdir(mode=0o755)
        user.own(folder, self._upper, self._work, self._tmp, *write_changes(self._upper, changes or {}))
        self._argv = [*user.prefix(), *mounts.argv(self._lower, self._upper, self._work, self._tmp, image)]
        self._busy = asyncio.Lock()
        self._running: asyncio.Task | None = None
        self._over = False
        self._end = asyncio.Lock()
        self._closed = self._removed = False

    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", keep_bytes: int | None = None
    ) -> CommandResult:
        finished, exit_code = await self._run(
            ["/usr/bin/bash", "-c", command], timeout_s, keep_bytes or self._limits.output_chars, stdin=stdin
        )
        head = finished.output[: finished.head].decode(errors="replace")
        tail = finished.output[finished.head :].decode(errors="replace")
        return CommandResult(
            exit_code,
            (head + CUT.format(finished.cut) + tail if finished.cut else head + tail).replace("\0", ""),
            timed_out=finished.killed is Killed.WALL_TIME,
            over_output=finished.killed is Killed.OUTPUT,
            over_disk=self._over,
        )

    async def read(self, path: str, *, timeout_s: float, limit: int = MB) -> bytes | None:
        command = ["/usr/bin/head", "-c", str(limit), "--", _inside(path)]
        finished, exit_code = await self._run(command, timeout_s, limit, quiet=True)
        return finished.output if exit_code == 0 and not finished.cut else None

    async def write(self, path: str, data: bytes, *, timeout_s: float) -> bool:
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
        command = ["/usr/bin/bash", "-c", script, "write", _inside(path)]
        _, exit_code = await self._run(command, timeout_s, 4096, stdin=data)
        return exit_code == 0

    async def snapshot(self, *, limit: int = 8 * MB) -> dict[str, Entry]:
        async with self._busy:
            if self._over:
                raise SandboxOverLimit("the sandbox is full")
            return await asyncio.to_thread(read_layers, self._lower, self._upper, limit)

    async def diff(self, *, limit: int = 8 * MB) -> dict[str, Entry]:
        async with self._busy:
            if self._over:
                raise SandboxOverLimit("the sandbox is full")
            return await asyncio.to_thread(read_changes, self._lower, self._upper, limit)

    async def close(self) -> None:
        self._closed = True
        async with self._end:
            if self._removed:
                return
            if self._running is not None:
                self._running.cancel()
                await asyncio.wait({self._running})
            await asyncio.to_thread(remove_tree, self._folder)
            self._removed = True

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

    async def _run_alone(
        self,
        command: Sequence[str],
        timeout_s: float,
        keep_bytes: int,
        stdin: bytes,
        quiet: bool,
    ) -> tuple[Finished, int | None]:
        status = os.memfd_create("status")
        try:
            finished = await run_bounded(
                [*self._argv, "--json-status-fd", str(status), "--", *limited(command, self._limits, quiet=quiet)],
                timeout_s=timeout_s,
                keep_bytes=keep_bytes,
                kill_after_bytes=self._limits.file_mb * MB,
                stdin=stdin,
                pass_fds=(status,),
                over_limit=self._is_over_disk,
                init_pid=lambda: _init_pid(os.pread(status, 4096, 0)),
            )
            report = os.pread(status, 4096, 0)
        finally:
            os.close(status)
        self._over = self._over or await self._is_over_disk()
        if finished.killed is not None:
            return finished, None
        # Only bwrap itself can write the report, and it does so once the command was started and has ended.
        if b'"exit-code"' not in report:
            said = finished.output[-500:].decode(errors="replace").strip() or f"exit code {finished.return_code}"
            raise InfrastructureError(f"the sandbox could not start a command: {said}")
        return finished, finished.return_code

    async def _is_over_disk(self) -> bool:
        for layer in (self._upper, self._tmp):
            layer.chmod(0o755)  # an agent may have closed its own workspace; the next command needs it, too
        use = await asyncio.to_thread(disk_use, self._upper, self._tmp)
        return use > self._limits.disk_mb * MB


def limited(command: Sequence[str], limits: SandboxConfig, *, quiet: bool) -> list[str]:
    """Limits are set inside: from outside, the limit on processes would count all sandboxes together."""
    settings = {
        "c": 0,
        "n": 256,
        "u": limits.processes,
        "v": limits.memory_mb * 1024,
        "t": limits.cpu_s,
        "f": limits.file_mb * 1024,
    }
    ulimit = "ulimit " + " ".join(f"-{flag} {value}" for flag, value in settings.items())
    script = f'{ulimit} && exec "$@"' + (" 2>/dev/null" if quiet else "")
    return ["/usr/bin/bash", "-c", script, "limits", *command]


def _init_pid(report: bytes) -> int | None:
    found = re.search(rb'"child-pid": (\d+)', report)
    return int(found[1]) if found else None


def _inside(path: str) -> str:
    if path.startswith("/") or ".." in Path(path).parts:
        raise ValueError(f"{path!r} is not a path inside the workspace")
    return "./" + path


def write_image(target: Path, files: Mapping[str, bytes], user: SandboxUser) -> None:
    """A read-only lower layer with `files`, owned by the sandbox's user: a file of anybody else cannot be changed."""
    target.mkdir(mode=0o755)
    made = {target}
    for name, data in files.items():
        path = target / _inside(name)
        parents = path.parents if not name.endswith("/") else (path, *path.parents)
        for parent in reversed([p for p in parents if p.is_relative_to(target) and p not in made]):
            parent.mkdir(mode=0o755)
            made.add(parent)
        if not name.endswith("/"):
            path.write_bytes(data)
            path.chmod(0o644)
            made.add(path)
    user.own(*made)
