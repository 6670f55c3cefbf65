"""Sandboxes elsewhere (Modal, AWS, Daytona, any server), through SWE-ReX: one deployment for each sandbox.

What isolates, and what is limited besides time and output, is the deployment's affair. Commands run under a supervisor
that ends all their descendants; the workspace is read by a program in the sandbox, not from outside.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from envs.errors import InfrastructureError
from envs.sandbox import supervisor
from envs.sandbox.archives import Base, pack
from envs.sandbox.protocol import Entry, SandboxImage
from envs.sandbox.supervised import START_S, SupervisedSandbox
from pearl.config.environment import SandboxConfig
from pearl.errors import UserError

PYTHON = "python3"
STOP_S = 60.0
ANSWER_S = 30.0
"""A call may take this much longer than the command that it runs."""
PROBE_S = 20.0
ISOLATING = ("modal", "fargate", "daytona", "docker", "remote")


class RemoteSandbox(SupervisedSandbox):
    """See `envs.sandbox.protocol.Sandbox`. `deployment`: SWE-ReX's, started."""

    def __init__(
        self,
        deployment: Any,
        workspace: str,
        base: Base,
        limits: SandboxConfig,
        forget: Callable[[RemoteSandbox], None] = lambda _: None,
    ) -> None:
        super().__init__(workspace, base, limits)
        self._deployment, self._forget = deployment, forget

    async def ask(self, timeout_s: float, request: Mapping[str, Any]) -> dict[str, Any]:
        from swerex.runtime.abstract import Command, WriteFileRequest

        runtime = self._deployment.runtime
        text = json.dumps({**request, "workspace": self._workspace})
        path = f"/tmp/.pearl-{secrets.token_hex(8)}"
        command = [PYTHON, "-I", "-c", inspect.getsource(supervisor), path]
        try:
            async with asyncio.timeout(timeout_s + ANSWER_S):
                await runtime.write_file(WriteFileRequest(path=path, content=text))
                said = await runtime.execute(Command(command=command, timeout=timeout_s + ANSWER_S, env={}, cwd="/"))
            return json.loads(said.stdout)
        except Exception as error:
            raise InfrastructureError(f"a remote sandbox did not answer: {error!r}") from error

    async def _remove(self) -> None:
        try:
            await self.ask(STOP_S, {"remove": True})
            async with asyncio.timeout(STOP_S):
                await self._deployment.stop()
            self._deployment.stop = _nothing  # its destructor would stop it once more
            self._forget(self)
        except Exception as error:
            raise InfrastructureError(f"a remote sandbox cannot be removed: {error!r}") from error


async def _nothing() -> None:
    pass


class RemoteBackend:
    """See `envs.sandbox.protocol.SandboxBackend`. `limits.deployment` is a deployment's configuration in SWE-ReX."""

    python = PYTHON
    directory: Path | None = None

    def __init__(self, limits: SandboxConfig, *, name: str = "sandboxes") -> None:
        try:
            known = import_module("swerex.deployment.config")
        except ImportError as error:
            raise UserError(
                "environment.sandbox.backend = swerex needs SWE-ReX, which is not installed",
                "Run `pip install swe-rex`.",
            ) from error
        fields = dict(limits.deployment or {})
        kind = str(fields.pop("type", ""))
        if kind not in ISOLATING:
            raise UserError(
                f"environment.sandbox.deployment: type = {kind!r} is no deployment that isolates",
                f"Choose one of: {', '.join(ISOLATING)}; with its fields, as `{{type: modal, image: python:3.11}}`.",
            )
        try:
            self._config = getattr(known, f"{kind.title()}DeploymentConfig")(**fields)
        except ValueError as error:
            raise UserError(
                f"environment.sandbox.deployment is not as SWE-ReX wants it: {error}",
                f"See {kind.title()}DeploymentConfig in SWE-ReX's documentation.",
            ) from error
        self._limits, self._name = limits, name
        self._open: set[RemoteSandbox] = set()

    async def probe(self) -> None:
        try:
            sandbox = await self.create({"in": b"works"})
            result = await sandbox.exec("cat in > out && cat out && echo 42", timeout_s=PROBE_S)
            await sandbox.close()
        except InfrastructureError as error:
            raise UserError(
                f"SWE-ReX's deployment does not run sandboxes: {error}",
                "Check environment.sandbox.deployment, and the account that it needs.",
            ) from error
        if result.output != "works42\n":
            raise UserError(
                f"SWE-ReX's deployment does not run sandboxes: {result.output.strip()}", "It needs bash and python3."
            )

    async def create(self, files: Mapping[str, bytes]) -> RemoteSandbox:
        entries = {
            name.rstrip("/"): Entry("directory") if name.endswith("/") else Entry("file", data)
            for name, data in files.items()
        }
        try:
            deployment = self._config.get_deployment()
            deployment.logger.setLevel(logging.CRITICAL)  # what matters is raised
            async with asyncio.timeout(START_S):
                await deployment.start()
        except Exception as error:
            raise InfrastructureError(f"a remote sandbox cannot be started: {error!r}") from error
        # A server of one's own may hold several sandboxes.
        workspace = f"/tmp/{self._name}-{secrets.token_hex(6)}"
        sandbox = RemoteSandbox(deployment, workspace, Base(entries), self._limits, self._open.discard)
        self._open.add(sandbox)
        await sandbox.unpack(pack(entries, workspace[1:], 0))
        return sandbox

    async def create_from(self, image: SandboxImage, changes: Mapping[str, Entry] | None = None) -> RemoteSandbox:
        raise InfrastructureError("repositories are built on this machine; sandboxes elsewhere cannot have them")

    async def sweep(self) -> list[str]:
        """What dead processes left ends by the deployment's own time-outs."""
        return []

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
