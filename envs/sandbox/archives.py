"""Workspaces as tar streams, for sandboxes whose layers cannot be read in place."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import IO

from envs.errors import InfrastructureError
from envs.sandbox.layers import MAX_ENTRIES
from envs.sandbox.protocol import Entry, SandboxOverLimit

UNREADABLE = (tarfile.TarError, EOFError)


def pack(entries: Mapping[str, Entry], folder: str, owner: int) -> bytes:
    """Files and directories below `folder`, with the directories above them; entries of other kinds are left out."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        made: set[PurePosixPath] = set()
        for name, entry in sorted({"": Entry("directory"), **entries}.items()):
            path = PurePosixPath(folder, name)
            if PurePosixPath(name).is_absolute() or ".." in path.parts:
                raise ValueError(f"{name!r} is not a path inside the workspace")
            if entry.kind not in ("file", "directory"):
                continue
            above = [parent for parent in reversed(path.parents) if parent != PurePosixPath(".")]
            for parent in [*above, *([path] if entry.kind == "directory" else [])]:
                if parent not in made:
                    made.add(parent)
                    tar.addfile(_info(parent, owner if parent.is_relative_to(folder) else 0, tarfile.DIRTYPE, 0o755))
            if entry.kind == "file":
                info = _info(path, owner, tarfile.REGTYPE, 0o755 if entry.executable else 0o644)
                info.size = len(entry.data)
                tar.addfile(info, io.BytesIO(entry.data))
    return buffer.getvalue()


def pack_tree(tree: Path, folder: str, owner: int) -> bytes:
    """All of a directory, links as links."""
    buffer = io.BytesIO()

    def own(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = owner
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for parent in reversed(PurePosixPath(folder).parents):
            if parent != PurePosixPath("."):
                tar.addfile(_info(parent, 0, tarfile.DIRTYPE, 0o755))
        tar.add(tree, folder, filter=own)
    return buffer.getvalue()


def _info(path: PurePosixPath, owner: int, kind: bytes, mode: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(str(path))
    info.type, info.mode, info.uid, info.gid = kind, mode, owner, owner
    return info


@dataclass(frozen=True, slots=True)
class Base:
    """What a workspace held at its start: `entries`, or what is in the directory `tree`."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    tree: Path | None = None

    def paths(self) -> Iterator[str]:
        """Of everything but directories, without `.git`."""
        if self.tree is None:
            yield from (path for path, entry in self.entries.items() if entry.kind != "directory")
            return
        for folder, folders, files in os.walk(self.tree):
            here = Path(folder)
            if here == self.tree and ".git" in folders:
                folders.remove(".git")
            links = [name for name in folders if (here / name).is_symlink()]
            yield from (str((here / name).relative_to(self.tree)) for name in (*files, *links))

    def size(self, path: str) -> int | None:
        if self.tree is None:
            entry = self.entries.get(path)
            return len(entry.data) if entry is not None else None
        try:
            return (self.tree / path).lstat().st_size
        except OSError:
            return None

    def holds(self, path: str, entry: Entry, link: str) -> bool:
        """Whether `path` was like `entry` at the start; `link`: where it leads if it is a link."""
        if self.tree is None:
            return self.entries.get(path) == entry
        try:
            info = (self.tree / path).lstat()
            if link:
                return stat.S_ISLNK(info.st_mode) and str((self.tree / path).readlink()) == link
            return (
                entry.kind == "file"
                and stat.S_ISREG(info.st_mode)
                and info.st_size == len(entry.data)
                and bool(info.st_mode & stat.S_IXUSR) == entry.executable
                and (self.tree / path).read_bytes() == entry.data
            )
        except OSError:
            return False


def unpack_all(stream: IO[bytes], limit: int) -> dict[str, Entry]:
    """See `Sandbox.snapshot`; the archive's first entry is the workspace itself."""
    found: dict[str, Entry] = {}
    room = limit

    def admits(_: str, size: int) -> bool:
        return size <= room

    for path, entry, _ in _members(stream, admits):
        room -= len(entry.data)
        found[path] = Entry(entry.kind, entry.data)
        if len(found) > MAX_ENTRIES:
            raise SandboxOverLimit(f"the workspace holds more than {MAX_ENTRIES} entries")
    return found


def unpack_changes(stream: IO[bytes], base: Base, limit: int) -> dict[str, Entry]:
    """See `Sandbox.diff`. What is as at the start does not count."""
    found: dict[str, Entry] = {}
    left = set(base.paths())
    room = limit

    def admits(path: str, size: int) -> bool:
        return size <= room or base.size(path) == size

    for path, entry, link in _members(stream, admits):
        if path == ".git" or path.startswith(".git/") or entry.kind == "directory":
            continue
        left.discard(path)
        if not base.holds(path, entry, link):
            found[path] = entry
            room -= len(entry.data)
        if room < 0 or len(found) > MAX_ENTRIES:
            raise SandboxOverLimit(f"more than {limit} bytes or {MAX_ENTRIES} entries were changed")
    return {**found, **dict.fromkeys(left, Entry("missing"))}


def _members(stream: IO[bytes], admits: Callable[[str, int], bool]) -> Iterator[tuple[str, Entry, str]]:
    """(path, entry, where a link leads); a further name of a file is a file. `admits` a path with so many bytes."""
    names: dict[str, Entry] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for info in tar:
                path = "/".join(PurePosixPath(info.name).parts[1:])
                if not path:
                    continue
                executable = bool(info.mode & stat.S_IXUSR)
                if info.isdir():
                    entry = Entry("directory")
                elif info.islnk():
                    entry = replace(names.get(info.linkname, Entry("other")), executable=executable)
                elif info.isreg():
                    if not admits(path, info.size):
                        raise SandboxOverLimit("the workspace holds more bytes than are read")
                    file = tar.extractfile(info)
                    entry = Entry("file", file.read() if file else b"", executable)
                    names[info.name] = entry
                else:
                    entry = Entry("other")
                yield path, entry, info.linkname if info.issym() else ""
                tar.members = []  # type: ignore[attr-defined]  # else all headers of a stream are kept
    except UNREADABLE as error:
        raise InfrastructureError(f"the workspace of a sandbox cannot be read: {error}") from error
