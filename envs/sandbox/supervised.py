"""Sandboxes in which a supervisor of ours runs commands, because nothing outside ends what they start."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
from collections.abc import Mapping, Sequence
from typing import Any

from envs.sandbox.archives import Base, unpack_all, unpack_changes
from envs.sandbox.command import Finished, Killed
from envs.sandbox.protocol import Entry
from envs.sandbox.serial import MB, SerialSandbox, What
from pearl.config.environment import SandboxConfig

START_S = 600.0
"""The workspace is packed or unpacked."""
SEARCHED = "/usr/local/bin:/usr/bin:/bin"


class SupervisedSandbox(SerialSandbox):
    """See `envs.sandbox.protocol.Sandbox`. Subclasses have `envs.sandbox.supervisor` carry out a request.

    `variables`: of each command, besides PATH (after `path`), HOME and LANG.
    """

    def __init__(
        self,
        workspace: str,
        base: Base,
        limits: SandboxConfig,
        path: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(limits)
        self._workspace, self._base = workspace, base
        own = {"PATH": ":".join([*path, SEARCHED]), "HOME": "/tmp", "LANG": "C.UTF-8", "PAGER": "cat"}
        self._variables = {**own, "PYTHONDONTWRITEBYTECODE": "1", **(variables or {})}

    async def ask(self, timeout_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    async def _run_alone(
        self, command: Sequence[str], timeout_s: float, keep_bytes: int, stdin: bytes, quiet: bool
    ) -> tuple[Finished, int | None]:
        request = {
            "argv": list(command),
            "stdin": base64.b64encode(stdin).decode(),
            "variables": self._variables,
            "timeout_s": timeout_s,
            "keep_bytes": keep_bytes,
            "kill_after_bytes": self._limits.file_mb * MB,
            "quiet": quiet,
        }
        reply = await self.ask(timeout_s, request)
        killed = Killed(reply["killed"]) if reply["killed"] else None
        output, code = base64.b64decode(reply["output"]), reply["exit_code"]
        return Finished(code, output, reply["cut"], reply["head"], killed), None if killed else code

    async def unpack(self, archive: bytes) -> None:
        """Put files into the workspace, which is made if need be."""
        await self.ask(START_S, {"archive": base64.b64encode(gzip.compress(archive, 1)).decode()})

    async def _look(self, what: What, limit: int) -> dict[str, Entry]:
        reply = await self.ask(START_S, {"pack": True})
        stream = io.BytesIO(gzip.decompress(base64.b64decode(reply["archive"])))
        if what == "all":
            return await asyncio.to_thread(unpack_all, stream, limit)
        return await asyncio.to_thread(unpack_changes, stream, self._base, limit)
