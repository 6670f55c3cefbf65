"""All containers of one process: made, probed, closed, and swept if an earlier process left some."""

from __future__ import annotations

import asyncio
import itertools
import resource
import secrets
import socket
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from envs.errors import InfrastructureError
from envs.sandbox.archives import Base, pack, pack_tree
from envs.sandbox.container import RUNNER, ContainerSandbox
from envs.sandbox.engine import Engine, flags, gone
from envs.sandbox.folder import OwnedFolder, default_directory, has_owner
from envs.sandbox.mounts import SHARED_MEMORY_BYTES, WORKSPACE
from envs.sandbox.protocol import Entry, SandboxImage
from envs.sandbox.serial import SHELL
from pearl.config.environment import SandboxConfig
from pearl.errors import UserError

LABEL = "pearl.owner"
USER = 1000
"""Runs commands where we made the workspace; in a task's own image its own user does."""
PROBE_S = 20.0
PULL_S = 600.0
DESCRIPTORS = 256
PODMAN_PROCESSES = 32_768
"""Podman's own limit on the processes of a user, where it may not raise it; a sandbox's is its control group's."""
VARIABLES = {"HOME": "/tmp", "LANG": "C.UTF-8", "PAGER": "cat", "PYTHONDONTWRITEBYTECODE": "1"}
REMEDIES = (
    (("docker.sock", "Cannot connect", "daemon running"), "Start the daemon, and let this user reach its socket."),
    (("bash", "executable file", "no such file"), "environment.sandbox.image needs /bin/bash, coreutils and python3."),
    (
        ("cgroup", "newuidmap", "overlay", "crun", "runc"),
        "Let the engine run a container first: `podman run --rm --network none IMAGE true`; docs/environments.md says "
        "which settings help inside other containers.",
    ),
    (
        ("pull", "manifest", "registry", "resolve"),
        "Name an image that this machine has or can pull in environment.sandbox.image.",
    ),
)
PATH = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")


class ContainerBackend:
    """See `envs.sandbox.protocol.SandboxBackend`. Sandboxes without an image of their own use `limits.image`."""

    python = "python3"

    def __init__(self, limits: SandboxConfig, *, directory: Path | None = None, name: str = "sandboxes") -> None:
        if limits.image is None:
            raise UserError(
                f"environment.sandbox.backend = {limits.backend} needs environment.sandbox.image",
                "Name an image with bash, coreutils and Python (python:3.11 has them).",
            )
        engine = Engine.find(limits.backend)
        self.directory = directory or (Path(limits.directory) if limits.directory else default_directory())
        self._limits, self._base = limits, limits.image
        self._folder = OwnedFolder(self.directory, name)
        self.engine = replace(engine, directory=self._folder.path)
        self._label = f"{LABEL}={socket.gethostname()}:{self._folder.path}"
        self._prefix, self._numbers = f"pearl-{secrets.token_hex(6)}", itertools.count()
        self._used = False
        self._layers: dict[str, asyncio.Task[str]] = {}
        self._open: weakref.WeakSet[ContainerSandbox] = weakref.WeakSet()

    async def probe(self) -> None:
        """Also pulls the image, if need be."""
        try:
            await self.pull(self._base)
            sandbox = await self.create({"in": b"works"})
            result = await sandbox.exec(
                f"cat in > out && cat out && {self.python} -I -S -c 'print(6 * 7)'", timeout_s=PROBE_S
            )
            await sandbox.close()
        except InfrastructureError as error:
            raise self._unusable(str(error)) from error
        if result.exit_code != 0 or result.output != "works42\n":
            raise self._unusable(result.output.strip() or f"exit code {result.exit_code}")

    async def pull(self, image: str, timeout_s: float = PULL_S) -> None:
        try:
            await self.engine.call("image", "inspect", "--format", "{{.Id}}", image)
        except InfrastructureError:
            await self.engine.call("pull", image, timeout_s=timeout_s)

    async def create(self, files: Mapping[str, bytes]) -> ContainerSandbox:
        entries = {
            name.rstrip("/"): Entry("directory" if name.endswith("/") else "file", data) for name, data in files.items()
        }
        return await self._make(self._base, SandboxImage(Path("/"), WORKSPACE), Base(entries), entries)

    async def create_from(self, image: SandboxImage, changes: Mapping[str, Entry] | None = None) -> ContainerSandbox:
        base = Base(tree=image.tree)
        if image.container is not None:
            history = f"{image.workspace}/.git"
            layer = await self._layer(
                image.container, lambda: pack_tree(image.tree / ".git", history[1:], 0), image.container, history
            )
        else:
            layer = await self._layer(str(image.tree), lambda: pack_tree(image.tree, image.workspace[1:], USER))
        return await self._make(layer, image, base, changes or {})

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
        if self._used:
            await self._remove(lambda owner: owner == self._label.partition("=")[2])
        await asyncio.to_thread(self._folder.remove)

    async def sweep(self) -> list[str]:
        """Remove the containers and images of owners on this machine that are gone; their names."""

        def is_gone(owner: str) -> bool:
            host, _, folder = owner.partition(":")
            return host == socket.gethostname() and not has_owner(Path(folder))

        return await self._remove(is_gone)

    async def _make(
        self, layer: str, image: SandboxImage, base: Base, changes: Mapping[str, Entry]
    ) -> ContainerSandbox:
        name = self._name()
        user = [] if image.container is not None else ["--user", f"{USER}:{USER}"]
        await self._create(name, layer, [*user, *self._options(image)], image.workspace)
        sandbox = ContainerSandbox(self.engine, name, image.workspace, base, self._limits)
        self._open.add(sandbox)
        try:
            if missing := [path for path, entry in changes.items() if entry.kind == "missing"]:
                await sandbox.delete(missing)
            if changes or layer == self._base:  # which has no workspace
                owner = 0 if image.container is not None else USER
                await self.engine.copy_in(name, pack(changes, image.workspace[1:], owner), "/")
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    def _options(self, image: SandboxImage) -> list[str]:
        limits = self._limits
        variables = {**VARIABLES, **image.variables}
        if image.path:
            variables["PATH"] = ":".join((*image.path, *PATH))
        ulimits = {"core": "0", "nofile": f"{DESCRIPTORS}:{DESCRIPTORS}", "cpu": str(limits.cpu_s)}
        ulimits["fsize"] = str(limits.file_mb << 20)
        own = resource.getrlimit(resource.RLIMIT_NPROC)[1]
        if own != resource.RLIM_INFINITY:  # podman would raise it, and may not
            ulimits["nproc"] = ":".join([str(min(own, PODMAN_PROCESSES))] * 2)
        options = ["--memory", f"{limits.memory_mb}m", "--memory-swap", f"{limits.memory_mb}m"]
        options += ["--pids-limit", str(limits.processes), "--shm-size", str(SHARED_MEMORY_BYTES)]
        options += [*flags("--ulimit", ulimits), *flags("--env", variables)]
        options += flags("--volume", [f"{here}:{inside}:ro" for here, inside in image.binds])
        return options + flags("--tmpfs", [f"{directory}:ro,size=4k" for directory in image.hidden])

    async def _create(self, name: str, image: str, options: list[str], workspace: str) -> None:
        """A container that is safe to run anything in; nothing runs yet."""
        podman = ["--http-proxy=false", "--no-hosts"] if self.engine.name == "podman" else []
        await self.engine.call(
            "create", "--name", name, "--label", self._label, "--pull", "never", "--interactive", *podman,
            "--network", "none", "--hostname", "sandbox", "--log-driver", "none", "--stop-timeout", "0",
            "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--workdir", workspace,
            *options, "--entrypoint", SHELL, image, "-c", RUNNER,
        )  # fmt: skip
        self._used = True

    async def _layer(self, key: str, archive: Callable[[], bytes], base: str = "", replaced: str = "") -> str:
        """An image with a workspace in it, made once for all sandboxes that start with it. `base`: what it is put on;
        `replaced`: a path that goes first."""
        if key not in self._layers:
            self._layers[key] = asyncio.create_task(self._make_layer(archive, base or self._base, replaced))
        try:
            return await asyncio.shield(self._layers[key])
        except InfrastructureError:
            self._layers.pop(key, None)
            raise

    async def _make_layer(self, archive: Callable[[], bytes], base: str, replaced: str) -> str:
        name = self._name()
        await self._create(name, base, [], "/")
        try:
            if replaced:
                await ContainerSandbox(self.engine, name, "/", Base(), self._limits).delete([replaced[1:]])
            await self.engine.copy_in(name, await asyncio.to_thread(archive), "/")
            await self.engine.call("commit", "--change", f"LABEL {self._label}", name, name)
        finally:
            await gone(self.engine, name)
        return name

    def _name(self) -> str:
        return f"{self._prefix}-{next(self._numbers)}"

    async def _remove(self, belongs: Callable[[str], bool]) -> list[str]:
        removed = []
        for kind, verb in (("container", "rm"), ("image", "rmi")):
            found = await self.engine.labelled(kind, LABEL)
            chosen = [one for one, owner in found.items() if belongs(owner)]
            if chosen:
                await self.engine.call(verb, "--force", *chosen)
            removed += chosen
        return removed

    def _unusable(self, said: str) -> UserError:
        remedy = next((text for words, text in REMEDIES if any(word in said for word in words)), None)
        name = self.engine.name
        return UserError(f"{name} does not run sandboxes on this machine: {said}", remedy or f"See `{name} info`.")
