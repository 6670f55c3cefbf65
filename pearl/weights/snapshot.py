"""A weight snapshot: one directory `v<version>` with a msgpack manifest and one flat data file.

Written once by trainer rank 0, read by every engine. The directory appears by one rename, so a reader sees a whole
snapshot or none. In shared memory (`/dev/shm`) a snapshot costs one copy out of the trainer and one into each engine;
no bytes travel through an actor call. Data is raw little-endian tensor bytes, each tensor aligned to 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import xxhash

if TYPE_CHECKING:  # a process that only hands snapshots on needs no torch
    import torch

FORMAT = 1
ALIGNMENT_BYTES = 64
"""A cache line, and the strictest alignment that any dtype needs."""
MANIFEST, DATA = "manifest.msgpack", "data.bin"

SHAPE_KEYS = (
    "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings", "num_experts", "moe_intermediate_size",
)  # fmt: skip
"""Keys of config.json that fix tensor names and shapes; dtype and library versions do not make a model another."""


class SnapshotError(Exception):
    """A snapshot is missing, torn, of another model, or its bytes do not match their checksums."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies in the data file. `checksum` is xxh3-128 (hex) over its raw bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: str


@dataclass(frozen=True, slots=True)
class Manifest:
    version: int
    config_hash: str
    tensors: tuple[TensorEntry, ...]
    format: int = FORMAT

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors)

    @property
    def checksum(self) -> str:
        """One checksum over all tensors: of their (name, checksum) pairs in name order."""
        return combined_checksum({entry.name: entry.checksum for entry in self.tensors})


def combined_checksum(checksums: dict[str, str]) -> str:
    """xxh3-128 (hex) over the sorted `name=checksum` lines; equal iff all tensors are equal."""
    lines = "\n".join(f"{name}={checksums[name]}" for name in sorted(checksums))
    return xxhash.xxh3_128_hexdigest(lines.encode())


def tensor_checksum(tensor: torch.Tensor) -> str:
    """xxh3-128 (hex) of a tensor's bytes in row-major order, on the CPU."""
    return xxhash.xxh3_128_hexdigest(_bytes_of(tensor))


def config_hash(model_directory: Path) -> str:
    """Hash of what in `config.json` decides names and shapes of the weights."""
    config = json.loads((Path(model_directory) / "config.json").read_text())
    kept = {key: config.get(key) for key in SHAPE_KEYS}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def snapshot_directory(root: Path, version: int) -> Path:
    return Path(root) / f"v{version}"


def write_snapshot(root: Path, version: int, config: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
    """Write `root/v<version>` from named tensors, consumed one by one (so that the caller may gather by buckets).

    Raises SnapshotError if that version exists already: versions are never reused.
    """
    target = snapshot_directory(root, version)
    if target.exists():
        raise SnapshotError(f"{target} exists already; weight versions are never reused")
    unfinished = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        entries, offset = [], 0
        with (unfinished / DATA).open("wb") as file:
            for name, tensor in tensors:
                data = _bytes_of(tensor)
                padding = -offset % ALIGNMENT_BYTES
                file.write(b"\0" * padding)
                offset += padding
                file.write(data)
                dtype = str(tensor.dtype).removeprefix("torch.")
                checksum = xxhash.xxh3_128_hexdigest(data)
                entries.append(TensorEntry(name, dtype, tuple(tensor.shape), offset, data.nbytes, checksum))
                offset += data.nbytes
        manifest = Manifest(version, config, tuple(entries))
        (unfinished / MANIFEST).write_bytes(msgpack.packb(asdict(manifest)))
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """Manifest of one snapshot directory. Raises SnapshotError if it is missing or unreadable."""
    path = Path(directory) / MANIFEST
    try:
        return parse_manifest(path.read_bytes())
    except (OSError, SnapshotError) as error:
        raise SnapshotError(f"no readable snapshot at {directory} ({error!r})") from error


def parse_manifest(packed: bytes) -> Manifest:
    """A manifest from the bytes of its file. Raises SnapshotError."""
    try:
        wire: dict[str, Any] = msgpack.unpackb(packed)
        if wire["format"] != FORMAT:
            raise SnapshotError(f"a manifest of format {wire['format']}; this version reads {FORMAT}")
        entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in wire["tensors"])
        return Manifest(wire["version"], wire["config_hash"], entries)
    except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
        raise SnapshotError(f"a manifest that cannot be read ({error!r})") from error


def read_tensors(directory: Path, *, verify: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """Named tensors of a snapshot as views of the mapped file (copy before writing to one).

    Raises SnapshotError if the file is short or, with `verify`, where a checksum differs.
    """
    import torch

    manifest = read_manifest(directory)
    path = Path(directory) / DATA
    end = max((entry.offset + entry.nbytes for entry in manifest.tensors), default=0)
    if not path.exists() or path.stat().st_size < end:
        raise SnapshotError(f"{path} is missing or shorter than the {end} bytes that its manifest lists")
    mapped: mmap.mmap | bytes = b""  # an empty file cannot be mapped
    if end:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    for entry in manifest.tensors:
        view = memoryview(mapped)[entry.offset : entry.offset + entry.nbytes]
        if verify and xxhash.xxh3_128_hexdigest(view) != entry.checksum:
            raise SnapshotError(f"{entry.name} in {path} does not match its checksum; the snapshot is damaged")
        dtype = getattr(torch, entry.dtype)
        flat = torch.frombuffer(view, dtype=dtype) if entry.nbytes else torch.empty(0, dtype=dtype)
        yield entry.name, flat.view(entry.shape)


def remove_snapshot(root: Path, version: int) -> None:
    """Remove one version if it is there. Readers that mapped it keep their pages."""
    shutil.rmtree(snapshot_directory(root, version), ignore_errors=True)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
