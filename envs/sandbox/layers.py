"""Read a sandbox's workspace from outside: the overlay's two layers, merged as the kernel merges them.

Takes a millisecond where a command in the sandbox takes a dozen. Nothing that an agent made is followed or executed:
links are not resolved, only regular files are opened. The caller sees to it that no command runs meanwhile.
"""

from __future__ import annotations

import os
import stat
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
