"""A directory of things that are made once and then only read: trees, virtual environments, interpreters.

Each thing is made in a directory of its own, under a lock that the kernel drops with its maker, and renamed into place
when it is complete: others wait, or find either all of it or nothing. What has not been used for longest goes when the
budget is exceeded; users hold a shared lock, and what is in use stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from envs.sandbox.folder import disk_use, prepare_directory, remove_tree
from envs.sandbox.user import SandboxUser
from envs.swebench.errors import BuildTimeout
from pearl.locks import locked
from pearl.models import cache_root


def default_store() -> Path:
    """`$PEARL_CACHE/swebench` (see `cache_root`), or a directory in /var/tmp if sandboxes cannot see that."""
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    if SandboxUser.here().can_pass(root):
        return root / "swebench"
    return Path("/var/tmp") / f"pearl-{os.getuid()}" / "swebench"


class Store:
    """`make` things by kind and key. Not for several users: the directory is this user's alone."""

    def __init__(self, directory: Path, budget_bytes: int, lock_s: float) -> None:
        for part in (directory.parent, directory):
            if not part.exists() or part == directory:
                prepare_directory(part)
        self.directory = directory
        self._budget = budget_bytes
        self._lock_s = lock_s
        self._in_use: dict[Path, int] = {}
        self._guard = threading.Lock()

    def make(self, kind: str, key: str, build: Callable[[Path], None]) -> Path:
        """The thing's directory, built by `build(directory)` if need be; in use until this process ends.

        Blocks, for as long as another process builds it; raises BuildTimeout after `lock_s`, and whatever `build` does.
        """
        folder = self.directory / kind
        folder.mkdir(mode=0o755, exist_ok=True)
        target = folder / key
        try:
            with locked(_beside(target, ".lock"), self._lock_s):
                self._use(target)
                if not target.exists():
                    self._sweep(target)
                    # A name of its own: a tool that outlived a killed maker may still write to the old one.
                    unfinished = _beside(target, f".{secrets.token_hex(4)}.unfinished")
                    unfinished.mkdir(mode=0o755)
                    try:
                        build(unfinished)
                    except BaseException:
                        remove_tree(unfinished)
                        raise
                    _beside(target, ".size").write_text(str(disk_use(unfinished)))
                    unfinished.rename(target)
        except TimeoutError as error:
            raise BuildTimeout(str(error)) from None
        os.utime(_beside(target, ".use"))
        self.evict()
        return target

    def entries(self) -> list[tuple[Path, int, float]]:
        """Each thing with its bytes and when it was last asked for, oldest first."""
        found = []
        for size in self.directory.glob("*/*.size"):
            target = size.with_name(size.name.removesuffix(".size"))
            with contextlib.suppress(OSError, ValueError):
                found.append((target, int(size.read_text()), _beside(target, ".use").stat().st_mtime))
        return sorted(found, key=lambda entry: entry[2])

    def evict(self) -> list[Path]:
        """Remove what was not used for longest until the budget holds; nothing that a living process uses.

        What killed makers left goes, too.
        """
        for leftover in self.directory.glob("*/*.unfinished"):
            target = leftover.with_name(leftover.name.removesuffix(".unfinished").rpartition(".")[0])
            with contextlib.suppress(TimeoutError), locked(_beside(target, ".lock"), 0.0):
                self._sweep(target)
        entries = self.entries()
        total = sum(size for _, size, _ in entries)
        removed = []
        for target, size, _ in entries:
            if total <= self._budget:
                break
            if self._remove(target):
                total -= size
                removed.append(target)
        return removed

    def close(self) -> None:
        """Let others evict what this process used."""
        for descriptor in self._in_use.values():
            os.close(descriptor)
        self._in_use.clear()

    def _use(self, target: Path) -> None:
        with self._guard:
            if target not in self._in_use:
                descriptor = os.open(_beside(target, ".use"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a rename at most, see `_remove`
                self._in_use[target] = descriptor

    def _sweep(self, target: Path) -> None:
        """Remove unfinished versions of `target`; the caller holds its lock."""
        for leftover in target.parent.glob(f"{target.name}.*.unfinished"):
            remove_tree(leftover)

    def _remove(self, target: Path) -> bool:
        if target in self._in_use:
            return False
        descriptor = os.open(_beside(target, ".use"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        gone = _beside(target, f".{secrets.token_hex(4)}.unfinished")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _beside(target, ".size").unlink(missing_ok=True)
            target.rename(gone)  # at once gone for whoever comes now
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(descriptor)
        remove_tree(gone)
        return True


def _beside(target: Path, suffix: str) -> Path:
    return target.with_name(target.name + suffix)
