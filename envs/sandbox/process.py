"""Sandboxes that are none: commands run as plain processes of this user. For machines where nothing else works, and
only for models that are trusted; `environment.sandbox.unsafe` says that they are."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import sys
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs.errors import InfrastructureError
from envs.sandbox import supervisor
from envs.sandbox.archives import Base, pack, pack_tree
from envs.sandbox.bubblewrap import limited
from envs.sandbox.command import Finished
from envs.sandbox.folder import OwnedFolder, default_directory, disk_use, remove_tree, sweep
from envs.sandbox.protocol import Entry, SandboxImage
from envs.sandbox.serial import MB
from envs.sandbox.supervised import SupervisedSandbox
from pearl.config.environment import SandboxConfig
from pearl.errors import UserError

PROBE_S = 20.0
ANSWER_S = 30.0
"""The supervisor keeps a command's limit itself; this much later its silence is a fault of the machine."""


class ProcessSandbox(SupervisedSandbox):
    """See `envs.sandbox.protocol.Sandbox`. `folder` is new, and goes with it."""

    def __init__(self, folder: Path, workspace: str, base: Base, limits: SandboxConfig, **variables: Any) -> None:
        super().__init__(workspace, base, limits, **variables)
        self._folder = folder

    async def ask(self, timeout_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        path = self._folder / "request"
        path.write_text(json.dumps({**request, "workspace": self._workspace}))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", inspect.getsource(supervisor), str(path), env={}, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(timeout_s + ANSWER_S):
                said, _ = await process.communicate()
            return json.loads(said)
        except (TimeoutError, ValueError) as error:
            raise InfrastructureError(f"the supervisor of a command did not answer: {error!r}") from error
        finally:
            if process.returncode is None:
                process.terminate()  # it ends all that the command started
                await process.wait()

    async def _run_alone(
        self, command: Sequence[str], timeout_s: float, keep_bytes: int, stdin: bytes, quiet: bool
    ) -> tuple[Finished, int | None]:
        bounded = limited(command, self._limits, quiet=False)
        ended = await super()._run_alone(bounded, timeout_s, keep_bytes, stdin, quiet)
        self._over = await asyncio.to_thread(disk_use, self._folder) > self._limits.disk_mb * MB
        return ended

    async def _remove(self) -> None:
        await asyncio.to_thread(remove_tree, self._folder)


class ProcessBackend:
    """See `envs.sandbox.protocol.SandboxBackend`."""

    python = sys.executable

    def __init__(self, limits: SandboxConfig, *, directory: Path | None = None, name: str = "processes") -> None:
        if not limits.unsafe:
            raise UserError(
                "environment.sandbox.backend = process runs commands of the model unprotected, as you",
                "Use bubblewrap, podman or docker; or set environment.sandbox.unsafe to true if nothing here matters.",
            )
        self.directory = directory or (Path(limits.directory) if limits.directory else default_directory())
        self._limits = limits
        self._folder = OwnedFolder(self.directory, name)
        self._numbers = itertools.count()
        self._open: weakref.WeakSet[ProcessSandbox] = weakref.WeakSet()

    async def probe(self) -> None:
        sandbox = await self.create({"in": b"works"})
        result = await sandbox.exec("cat in", timeout_s=PROBE_S)
        await sandbox.close()
        if result.output != "works":
            raise UserError(f"plain processes do not run here: {result.output}", "See `pearl doctor`.")

    async def create(self, files: Mapping[str, bytes]) -> ProcessSandbox:
        entries = {
            name.rstrip("/"): Entry("directory") if name.endswith("/") else Entry("file", data)
            for name, data in files.items()
        }
        folder, workspace = self._new()
        sandbox = ProcessSandbox(folder, workspace, Base(entries), self._limits)
        self._open.add(sandbox)
        await sandbox.unpack(pack(entries, workspace[1:], 0))
        return sandbox

    async def create_from(self, image: SandboxImage, changes: Mapping[str, Entry] | None = None) -> ProcessSandbox:
        """The repository is copied, and variables name the copy."""
        folder, workspace = self._new()
        variables = {name: value.replace(image.workspace, workspace) for name, value in image.variables.items()}
        sandbox = ProcessSandbox(
            folder, workspace, Base(tree=image.tree), self._limits, path=image.path, variables=variables
        )
        self._open.add(sandbox)
        await sandbox.unpack(await asyncio.to_thread(pack_tree, image.tree, workspace[1:], 0))
        for path, entry in (changes or {}).items():
            if entry.kind == "missing":
                Path(workspace, path).unlink(missing_ok=True)
        if changes:
            await sandbox.unpack(pack(changes, workspace[1:], 0))
        return sandbox

    async def sweep(self) -> list[str]:
        return await asyncio.to_thread(sweep, self.directory)

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
        await asyncio.to_thread(self._folder.remove)

    def _new(self) -> tuple[Path, str]:
        folder = self._folder.path / f"{next(self._numbers)}"
        folder.mkdir(mode=0o700)
        return folder, str(folder.resolve() / "workspace")
