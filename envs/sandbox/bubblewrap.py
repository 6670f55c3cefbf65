"""Sandboxes of bubblewrap: one `bwrap` per command over a writable layer that stays between commands."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from envs.errors import InfrastructureError
from envs.sandbox.command import Finished, Killed, run_bounded
from envs.sandbox.folder import disk_use, remove_tree
from envs.sandbox.layers import read_changes, read_layers, write_changes
from envs.sandbox.memory import memory_over
from envs.sandbox.mounts import Mounts
from envs.sandbox.protocol import Entry, SandboxImage
from envs.sandbox.serial import MB, SHELL, SerialSandbox, What, inside
from envs.sandbox.user import SandboxUser
from pearl.config.environment import SandboxConfig

DISK_EVERY = 3
"""The disk is looked at every so many polls: a tree is walked for it."""


class BubblewrapSandbox(SerialSandbox):
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
        super().__init__(limits)
        image = lower if isinstance(lower, SandboxImage) else None
        self._folder, self._lower = folder, lower.tree if isinstance(lower, SandboxImage) else lower
        self._upper, self._work, self._tmp = folder / "upper", folder / "work", folder / "tmp"
        folder.mkdir(mode=0o700)
        for layer in (self._upper, self._work, self._tmp):
            layer.mkdir(mode=0o755)
        user.own(folder, self._upper, self._work, self._tmp, *write_changes(self._upper, changes or {}))
        self._argv = [*user.prefix(), *mounts.argv(self._lower, self._upper, self._work, self._tmp, image)]

    async def _look(self, what: What, limit: int) -> dict[str, Entry]:
        read = read_layers if what == "all" else read_changes
        return await asyncio.to_thread(read, self._lower, self._upper, limit)

    async def _remove(self) -> None:
        await asyncio.to_thread(remove_tree, self._folder)

    async def _run_alone(
        self, command: Sequence[str], timeout_s: float, keep_bytes: int, stdin: bytes, quiet: bool
    ) -> tuple[Finished, int | None]:
        status = os.memfd_create("status")
        polls = itertools.count(1)

        def init_pid() -> int | None:
            return _init_pid(os.pread(status, 4096, 0))

        async def check() -> Killed | None:
            init = init_pid()
            if init is not None and await asyncio.to_thread(memory_over, init, self._limits.memory_mb * MB):
                return Killed.MEMORY
            return Killed.DISK if next(polls) % DISK_EVERY == 0 and await self._is_over_disk() else None

        try:
            finished = await run_bounded(
                [*self._argv, "--json-status-fd", str(status), "--", *limited(command, self._limits, quiet=quiet)],
                timeout_s=timeout_s,
                keep_bytes=keep_bytes,
                kill_after_bytes=self._limits.file_mb * MB,
                stdin=stdin,
                pass_fds=(status,),
                check=check,
                init_pid=init_pid,
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
    return [SHELL, "-c", script, "limits", *command]


def _init_pid(report: bytes) -> int | None:
    found = re.search(rb'"child-pid": (\d+)', report)
    return int(found[1]) if found else None


def write_image(target: Path, files: Mapping[str, bytes], user: SandboxUser) -> None:
    """A read-only lower layer with `files`, owned by the sandbox's user: a file of anybody else cannot be changed."""
    target.mkdir(mode=0o755)
    made = {target}
    for name, data in files.items():
        path = target / inside(name)
        parents = path.parents if not name.endswith("/") else (path, *path.parents)
        for parent in reversed([p for p in parents if p.is_relative_to(target) and p not in made]):
            parent.mkdir(mode=0o755)
            made.add(parent)
        if not name.endswith("/"):
            path.write_bytes(data)
            path.chmod(0o644)
            made.add(path)
    user.own(*made)
