"""Folders of sandboxes: each belongs to one living process; what a dead one left is swept.

A folder's owner holds a lock on `owner.lock` in it. The kernel drops the lock however the owner ends, also when owner
and sweeper live in different containers, where process numbers mean nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import stat
import subprocess
import time
from pathlib import Path

from envs.errors import InfrastructureError
from pearl.errors import UserError
from pearl.locks import locked

LOCK = "owner.lock"
DIRECTORY_LOCK = ".lock"
"""Making a folder and sweeping exclude each other, so that no folder is seen before it is locked."""
KILL_WAIT_S = 5.0
LOCK_S = 30.0
"""A sweep may have much to remove; a holder that takes longer hangs."""


def default_directory() -> Path:
    """`$XDG_RUNTIME_DIR/pearl` where other users' processes do not have to reach it, else `/tmp/pearl-<uid>`."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and os.getuid() != 0 and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "pearl"
    return Path("/tmp") / f"pearl-{os.getuid()}"


def prepare_directory(directory: Path) -> None:
    """Make `directory`; refuse one that another user could have prepared for us."""
    # As root, commands run as another user, who must be able to pass through, and only that.
    mode = 0o711 if os.getuid() == 0 else 0o700
    try:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise UserError(
            f"the sandbox directory {directory} cannot be made ({error.strerror})",
            "Set environment.sandbox.directory to a directory on a local disk.",
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise UserError(
            f"the sandbox directory {directory} is not a directory that only this user can write to",
            "Remove it, or set environment.sandbox.directory to another one.",
        )
    if found.st_mode & mode != mode:
        directory.chmod(mode)


class OwnedFolder:
    """A new folder in `directory` that is this process's until `remove`, or until the process ends."""

    def __init__(self, directory: Path, name: str) -> None:
        prepare_directory(directory)
        self.path = directory / f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with locked(directory / DIRECTORY_LOCK, LOCK_S):
                self.path.mkdir(mode=0o711 if os.getuid() == 0 else 0o700)
                self._lock: int | None = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except TimeoutError as error:
            raise UserError(
                f"the sandbox directory {directory} cannot be used: {error}",
                "End that process, or set environment.sandbox.directory to another directory.",
            ) from None

    def remove(self) -> None:
        if self._lock is None:
            return
        _kill_users_of(self.path)
        remove_tree(self.path)
        os.close(self._lock)
        self._lock = None


def sweep(directory: Path) -> list[str]:
    """Remove the folders (and kill the commands) of owners that are gone; returns the folders' names.

    Nothing if another process has kept the directory for LOCK_S: the next one to come sweeps.
    """
    swept: list[str] = []
    if not directory.is_dir():
        return swept
    with contextlib.suppress(TimeoutError), locked(directory / DIRECTORY_LOCK, LOCK_S):
        for folder in sorted(entry for entry in directory.iterdir() if entry.is_dir() and not entry.is_symlink()):
            if has_owner(folder):
                continue
            _kill_users_of(folder)
            remove_tree(folder)
            swept.append(folder.name)
    return swept


def remove_tree(path: Path) -> None:
    """Remove whatever an agent has built: unreadable directories, trees deeper than any path name."""
    try:
        shutil.rmtree(path)
        return
    except FileNotFoundError:
        pass
    except (OSError, RecursionError):
        subprocess.run(["chmod", "-R", "u+rwX", "--", path], stderr=subprocess.DEVNULL, check=False)
    subprocess.run(["rm", "-rf", "--one-file-system", "--", path], stderr=subprocess.DEVNULL, check=False)
    if os.path.lexists(path):
        raise InfrastructureError(f"the sandbox folder {path} cannot be removed")


def disk_use(*roots: Path) -> int:
    """Bytes on disk below `roots`; each entry counts a block at least, so that empty files are not free."""
    total = 0
    waiting: list[str] = [str(root) for root in roots]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    total += max(4096, entry.stat(follow_symlinks=False).st_blocks * 512)
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except FileNotFoundError:
            continue  # gone meanwhile
        except OSError:
            return 1 << 62  # too deep for a path name, or closed to its owner: nobody knows what it hides
    return total


def has_owner(folder: Path) -> bool:
    """Whether the process lives to which an `OwnedFolder` belongs; a folder that is gone has none."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True  # another user's: not ours to judge
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _kill_users_of(folder: Path) -> None:
    """Kill the bubblewrap processes of `folder`, known by their arguments; the rest dies with them."""
    prefix = os.fsencode(folder) + b"/"
    deadline = time.monotonic() + KILL_WAIT_S
    while pids := [pid for pid in _pids() if any(part.startswith(prefix) for part in _arguments(pid))]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise InfrastructureError(f"processes {pids} of the sandbox folder {folder} cannot be killed")
        time.sleep(0.005)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and int(path.name) != os.getpid()]


def _arguments(pid: int) -> list[bytes]:
    """Empty for processes that are gone, and for dead ones that only wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
