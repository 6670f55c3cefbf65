"""Copies of snapshots on hosts that the trainer does not run on: each host fetches one, and its slots share it.

A copy lies in the host's shared memory, beside those of earlier versions, until it is retired. It arrives in order, and
each tensor is compared with its checksum when its last byte is there; what was compared can be handed on at once, so a
host in the middle of its fetch is a source for the next one. One process at a time fetches, under a lock that the
kernel frees when it dies; another one then goes on from the last good tensor.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from pearl.weights.snapshot import (
    DATA,
    MANIFEST,
    Manifest,
    SnapshotError,
    TensorEntry,
    read_manifest,
    snapshot_directory,
)

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "pearl-copy-"
USERS = ".users"
"""Every process that uses the folder holds this file locked."""
VERIFIED = "verified"
"""How many bytes of an unfinished copy were compared with their checksums: the last number of those appended, so that
no reader sees half of one."""
NUMBER_BYTES = 8
JOINS = 5
"""A folder can be swept by another process between its making and its locking; then it is made again."""


class NoRoom(SnapshotError):
    """The host's memory cannot take the copy: another source would not help."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose snapshots: the host of the trainer, and their folder there."""

    host: str
    root: str

    def to_wire(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Origin:
        return cls(wire["host"], wire["root"])


class HostCopies:
    """One process's part in the copies of its host. `base` is where they lie, the shared memory by default."""

    def __init__(self, host: str, base: Path | None = None) -> None:
        self.host = host
        self.base = base or memory_folder()
        self._joined: dict[Path, BinaryIO] = {}

    def folder(self, origin: Origin) -> Path:
        """Where this host has the snapshots of `origin`: on the trainer's host the originals."""
        if origin.host == self.host:
            return Path(origin.root)
        return self.base / f"{PREFIX}{_plain(self.host)}-{_plain(Path(origin.root).name)}"

    def directory(self, origin: Origin, version: int) -> Path:
        return snapshot_directory(self.folder(origin), version)

    def join(self, origin: Origin) -> Path:
        """The folder, made if need be; from now on it stays as long as this process. Raises SnapshotError."""
        folder = self.folder(origin)
        if folder in self._joined or origin.host == self.host:
            return folder
        for _ in range(JOINS):
            try:
                folder.mkdir(mode=0o700, exist_ok=True)
                if folder.stat().st_uid != os.getuid():
                    raise SnapshotError(f"{folder} belongs to another user")
                users = (folder / USERS).open("ab")
                fcntl.flock(users, fcntl.LOCK_SH)
                if os.fstat(users.fileno()).st_ino == (folder / USERS).stat().st_ino:
                    self._joined[folder] = users
                    return folder
                users.close()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise SnapshotError(f"{folder} cannot be used: {error}") from error
        raise SnapshotError(f"{folder} is removed again and again")

    def manifest(self, origin: Origin, version: int) -> bytes | None:
        """The packed manifest of a version that is here or on its way here. Raises OSError."""
        whole = self.directory(origin, version)
        for directory in (whole, _unfinished(whole), whole):  # it may become whole meanwhile
            if (path := directory / MANIFEST).exists():
                return path.read_bytes()
        return None

    def piece(self, origin: Origin, version: int, offset: int, nbytes: int) -> memoryview | None:
        """Up to `nbytes` of the data from `offset` on, as a view of the mapped file; None if they are not here (yet).

        Raises OSError.
        """
        whole = self.directory(origin, version)
        if whole.exists():
            return _view(whole, offset, nbytes)
        part = _unfinished(whole)
        try:
            verified = _last(part / VERIFIED)
            return _view(part, offset, min(nbytes, verified - offset)) if verified > offset else None
        except FileNotFoundError:
            return None

    @contextlib.contextmanager
    def fetching(self, origin: Origin, version: int) -> Iterator[bool]:
        """Whether this process is the one that may fetch the version; another one may be at it."""
        with (self.join(origin) / f".lock-v{version}").open("ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True

    def retire(self, origin: Origin, version: int) -> None:
        """Remove the copies of `version` and older ones. Who has mapped one keeps its pages."""
        folder = self.folder(origin)
        if origin.host == self.host or not folder.exists():
            return
        for path in folder.iterdir():
            numbered = re.fullmatch(r"(?:v|\.v|\.lock-v)(\d+)(?:\.part)?", path.name)
            if numbered and int(numbered[1]) <= version:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def close(self) -> None:
        """Leave; the last process of the host to do so removes the copies."""
        for users in self._joined.values():
            users.close()
        for folder in self._joined:
            _remove_if_unused(folder)
        self._joined.clear()

    def sweep(self) -> None:
        """Remove what processes that were killed have left."""
        for folder in self.base.glob(f"{PREFIX}*"):
            if folder not in self._joined:
                _remove_if_unused(folder)


class Unfinished:
    """A copy that arrives in order. `position` is the byte that is wanted next."""

    def __init__(self, whole: Path, packed_manifest: bytes) -> None:
        """Goes on with what an earlier fetch of the same snapshot has left. Raises SnapshotError."""
        self.whole, self.part = whole, _unfinished(whole)
        if not self.is_of(packed_manifest):
            shutil.rmtree(self.part, ignore_errors=True)
            self.part.mkdir()
            (self.part / MANIFEST).write_bytes(packed_manifest)
        self.manifest = read_manifest(self.part)
        self.end = data_bytes(self.manifest)
        self._entries = sorted((e for e in self.manifest.tensors if e.nbytes), key=lambda e: e.offset)
        room = shutil.disk_usage(self.part).free
        self._data = os.open(self.part / DATA, os.O_CREAT | os.O_RDWR, 0o600)
        self._verified = os.open(self.part / VERIFIED, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.position = _last(self.part / VERIFIED)
        self._index = sum(e.offset + e.nbytes <= self.position for e in self._entries)
        self._hash = xxhash.xxh3_128()
        if room < self.end - self.position:
            self.close()
            raise NoRoom(f"{self.part.parent} has room for {room:,} bytes, the snapshot has {self.end:,}")
        if not self.position:
            os.ftruncate(self._data, self.end)

    def is_of(self, packed_manifest: bytes) -> bool:
        """Whether this is a copy of that snapshot."""
        try:
            return (self.part / MANIFEST).read_bytes() == packed_manifest
        except OSError:
            return False

    @property
    def complete(self) -> bool:
        return self.position >= self.end

    def write(self, data: memoryview) -> None:
        """Take the next bytes. Where a tensor does not match, SnapshotError, and its bytes are wanted again."""
        if self.position + len(data) > self.end:
            raise SnapshotError(f"more came than the {self.end} bytes of version {self.manifest.version}")
        before = self._good()
        try:
            while len(data):
                entry = self._entries[self._index]
                begins, ends = entry.offset, entry.offset + entry.nbytes
                piece = data[: (begins if self.position < begins else ends) - self.position]
                _write(self._data, piece, self.position)
                if self.position >= begins:
                    self._hash.update(piece)
                self.position += len(piece)
                data = data[len(piece) :]
                if self.position == ends:
                    self._compare(entry)
        except OSError as error:
            raise NoRoom(f"{self.part}: {error}") from error
        finally:
            if self._good() != before:
                self._tell(self._good())

    def _compare(self, entry: TensorEntry) -> None:
        digest, self._hash = self._hash.hexdigest(), xxhash.xxh3_128()
        if digest != entry.checksum:
            self.position = entry.offset
            raise SnapshotError(f"{entry.name} of version {self.manifest.version} came damaged")
        self._index += 1

    def again(self) -> None:
        """Another source is to go on, from the last good tensor."""
        self.position = self._good()
        self._hash = xxhash.xxh3_128()

    def _good(self) -> int:
        if not self._index:
            return 0
        last = self._entries[self._index - 1]
        return last.offset + last.nbytes

    def _tell(self, verified: int) -> None:
        os.write(self._verified, verified.to_bytes(NUMBER_BYTES, "little"))

    def finish(self) -> Path:
        """The whole snapshot, for all slots of the host."""
        self.close()
        self.part.rename(self.whole)
        (self.whole / VERIFIED).unlink()
        return self.whole

    def close(self) -> None:
        for name in ("_data", "_verified"):
            if (descriptor := getattr(self, name)) >= 0:
                os.close(descriptor)
                setattr(self, name, -1)


def data_bytes(manifest: Manifest) -> int:
    """Length of the data file: up to the end of the last tensor."""
    return max((entry.offset + entry.nbytes for entry in manifest.tensors), default=0)


def memory_folder() -> Path:
    """Shared memory where there is some."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def _unfinished(whole: Path) -> Path:
    return whole.with_name(f".{whole.name}.part")


def _view(directory: Path, offset: int, nbytes: int) -> memoryview:
    first = offset - offset % mmap.ALLOCATIONGRANULARITY
    with (directory / DATA).open("rb") as file:
        mapped = mmap.mmap(file.fileno(), offset + nbytes - first, access=mmap.ACCESS_READ, offset=first)
    return memoryview(mapped)[offset - first :]


def _last(numbers: Path) -> int:
    """The last whole one; 0 if there is none."""
    packed = numbers.read_bytes()
    whole = len(packed) - len(packed) % NUMBER_BYTES
    return int.from_bytes(packed[max(0, whole - NUMBER_BYTES) : whole], "little")


def _plain(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _write(descriptor: int, data: memoryview, position: int) -> None:
    while len(data):
        written = os.pwrite(descriptor, data, position)
        data, position = data[written:], position + written


def _remove_if_unused(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / USERS).open("ab") as users:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
