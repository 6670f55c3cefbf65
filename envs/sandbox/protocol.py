"""What a sandbox is, whichever way it isolates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How one command ended. All of it is the agent's doing; infrastructure faults are raised instead."""

    exit_code: int | None
    """None if the command was killed for one of the reasons below."""
    output: str
    """Standard output and error as they came, cut in the middle."""
    timed_out: bool = False
    over_output: bool = False
    over_memory: bool = False
    """Some or all of its processes were killed for it, as far as that is known."""
    over_disk: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, directory or other thing in a sandbox's workspace; in a difference also the lack of one."""

    kind: Literal["file", "directory", "other", "missing"]
    data: bytes = b""
    executable: bool = False
    """Said of files in a difference only."""


@dataclass(frozen=True, slots=True)
class SandboxImage:
    """What sandboxes of a task start from: prepared on disk, shared, never written to."""

    tree: Path
    """Contents of the workspace; owned by the user that runs commands."""
    workspace: str = "/testbed"
    binds: tuple[tuple[str, str], ...] = ()
    """(path here, path inside) of what else is visible, read-only: a virtual environment, an interpreter."""
    hidden: tuple[str, ...] = ()
    """Directories that are shown empty."""
    path: tuple[str, ...] = ()
    """Directories that precede the system's in PATH."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of every command."""
    container: str | None = None
    """Container image that has the workspace, and whatever else its commands need, in it; `tree` is a copy then."""


class SandboxOverLimit(Exception):
    """The agent's commands left more than the sandbox may hold; nothing more can be run in it."""


class Sandbox(Protocol):
    """A private copy of a few files in which untrusted commands run. Paths are relative to the workspace."""

    async def exec(
        self, command: str, *, timeout_s: float, stdin: bytes = b"", keep_bytes: int | None = None
    ) -> CommandResult:
        """Run a shell command; everything that it started is gone when this returns.

        `keep_bytes` of the output are returned; without it, as much as an agent is shown.
        """
        ...

    async def read(self, path: str, *, timeout_s: float, limit: int = 1 << 20) -> bytes | None:
        """The first `limit` bytes of a file; None if it cannot be read."""
        ...

    async def write(self, path: str, data: bytes, *, timeout_s: float) -> bool:
        """Write a file, and the directories above it; False if that is not possible."""
        ...

    async def snapshot(self, *, limit: int = 8 << 20) -> dict[str, Entry]:
        """All that the workspace holds; waits for a running command. Raises SandboxOverLimit beyond `limit` bytes."""
        ...

    async def diff(self, *, limit: int = 8 << 20) -> dict[str, Entry]:
        """What differs from the start, by path, without `.git`: files as they are now, "missing" ones, and "other"
        things. Read from outside; waits for a running command. Raises SandboxOverLimit beyond `limit` bytes."""
        ...

    async def close(self) -> None:
        """End all commands and remove the files. Can be called repeatedly."""
        ...


class SandboxBackend(Protocol):
    """Makes sandboxes, and answers for all that they leave behind."""

    @property
    def directory(self) -> Path | None:
        """Where this machine keeps what belongs to sandboxes; `envs.sandbox.folder.sweep` takes it."""
        ...

    @property
    def python(self) -> str:
        """Path of a Python interpreter inside each sandbox."""
        ...

    async def probe(self) -> None:
        """Run one sandbox; raises UserError with the remedy if that does not work on this machine."""
        ...

    async def create(self, files: Mapping[str, bytes]) -> Sandbox:
        """A sandbox whose workspace holds `files`; a name that ends in "/" is an empty directory."""
        ...

    async def create_from(self, image: SandboxImage, changes: Mapping[str, Entry] | None = None) -> Sandbox:
        """A sandbox of an image, with files written over it or missing from it (a `diff` of another sandbox)."""
        ...

    async def sweep(self) -> list[str]:
        """Remove what dead processes left; names of what there was."""
        ...

    async def close(self) -> None:
        """Close all sandboxes and remove what is left. Can be called repeatedly."""
        ...
