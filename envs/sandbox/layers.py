"""Read a sandbox's workspace from outside: the overlay's two layers, merged as the kernel merges them.

Takes a millisecond where a command in the sandbox takes a dozen. Nothing that an agent made is followed or executed:
links are not resolved, only regular files are opened. The caller sees to it that no command runs meanwhile.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from envs.sandbox.protocol import Entry, SandboxOverLimit

MAX_ENTRIES = 10_000
OPAQUE = "user.overlay.opaque"


def read_layers(lower: Path, upper: Path, limit: int) -> dict[str, Entry]:
    """All entries by path. Raises SandboxOverLimit beyond `limit` bytes or MAX_ENTRIES entries."""
    found: dict[str, Entry] = {}
    room = limit
    waiting: list[tuple[str, bool, bool]] = [("", True, True)]
    while waiting:
        folder, in_upper, in_lower = waiting.pop()
        above = _list(upper / folder) if in_upper else {}
        below = _list(lower / folder) if in_lower and not (in_upper and folder and _is_opaque(upper / folder)) else {}
        for name in above.keys() | below.keys():
            info = above.get(name) or below[name]
            if name in above and _is_whiteout(info):
                continue
            path = f"{folder}/{name}" if folder else name
            entry = _read((upper if name in above else lower) / path, info, room)
            room -= len(entry.data)
            found[path] = entry
            if len(found) > MAX_ENTRIES:
                raise SandboxOverLimit(f"the workspace holds more than {MAX_ENTRIES} entries")
            if entry.kind == "directory":
                also_below = name in below and stat.S_ISDIR(below[name].st_mode)
                waiting.append((path, name in above, also_below))
    return found


def read_changes(lower: Path, upper: Path, limit: int) -> dict[str, Entry]:
    """What `upper` makes of `lower`, without `.git` at the top. Files that were only touched are left out.

    Raises SandboxOverLimit beyond `limit` bytes or MAX_ENTRIES entries.
    """
    found: dict[str, Entry] = {}
    room = limit
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        above = _list(upper / folder)
        if not folder:
            above.pop(".git", None)
        if folder and _is_opaque(upper / folder):
            found.update((path, Entry("missing")) for path in _files(lower, folder))
        for name, info in above.items():
            path = f"{folder}/{name}" if folder else name
            if _is_whiteout(info):
                found.update((gone, Entry("missing")) for gone in _files(lower, path))
                continue
            if stat.S_ISDIR(info.st_mode):
                if (lower / path).is_symlink() or (lower / path).is_file():
                    found[path] = Entry("missing")
                waiting.append(path)
                continue
            if (lower / path).is_dir() and not (lower / path).is_symlink():
                found.update((gone, Entry("missing")) for gone in _files(lower, path))
            entry = _read(upper / path, info, room)
            room -= len(entry.data)
            if info.st_mode & stat.S_IXUSR and entry.kind == "file":
                entry = replace(entry, executable=True)
            if entry.kind == "other" or not _is_same(lower / path, entry):
                found[path] = entry
            else:
                found.pop(path, None)  # a directory that was made anew holds it again
            if len(found) > MAX_ENTRIES:
                raise SandboxOverLimit(f"more than {MAX_ENTRIES} entries were changed")
    return found


def write_changes(upper: Path, changes: Mapping[str, Entry]) -> list[Path]:
    """Put a difference into an upper layer that is empty and not in use; the paths that were made."""
    made: dict[Path, None] = {}
    for name, entry in changes.items():
        path = upper / name
        if Path(name).is_absolute() or ".." in Path(name).parts or not Path(name).parts:
            raise ValueError(f"{name!r} is not a path inside the workspace")
        for parent in reversed([p for p in path.parents if p != upper and p.is_relative_to(upper)]):
            if parent not in made:
                parent.mkdir(mode=0o755, exist_ok=True)
                made[parent] = None
        if entry.kind == "missing" and not any(other.startswith(f"{name}/") for other in changes):
            os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(0, 0))
        elif entry.kind == "file":
            path.write_bytes(entry.data)
            path.chmod(0o755 if entry.executable else 0o644)
        made[path] = None
    return [path for path in made if os.path.lexists(path)]


def _files(lower: Path, path: str) -> Iterator[str]:
    """Everything but directories at or below `path`."""
    start = lower / path
    if start.is_dir() and not start.is_symlink():
        for entry in start.iterdir():
            yield from _files(lower, f"{path}/{entry.name}")
    elif os.path.lexists(start):
        yield path


def _is_same(path: Path, entry: Entry) -> bool:
    try:
        info = path.lstat()
        return (
            stat.S_ISREG(info.st_mode)
            and info.st_size == len(entry.data)
            and bool(info.st_mode & stat.S_IXUSR) == entry.executable
            and path.read_bytes() == entry.data
        )
    except OSError:
        return False


def _list(folder: Path) -> dict[str, os.stat_result]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    except FileNotFoundError:
        return {}
    except PermissionError:
        return {}  # closed by the agent
    except OSError as error:
        raise SandboxOverLimit("the workspace is nested too deep") from error


def _is_whiteout(info: os.stat_result) -> bool:
    """How an overlay notes that something of the lower layer was deleted."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _is_opaque(folder: Path) -> bool:
    """A directory that replaced one of the lower layer shows nothing of it."""
    try:
        return os.getxattr(folder, OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _read(path: Path, info: os.stat_result, room: int) -> Entry:
    if stat.S_ISDIR(info.st_mode):
        return Entry("directory")
    if not stat.S_ISREG(info.st_mode):
        return Entry("other")
    if info.st_size > room:
        raise SandboxOverLimit("the workspace holds more bytes than are read")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return Entry("other")
    except OSError as error:
        raise SandboxOverLimit("the workspace is nested too deep") from error
    with os.fdopen(descriptor, "rb") as file:
        return Entry("file", file.read(info.st_size))
