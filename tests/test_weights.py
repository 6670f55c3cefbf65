"""Weight snapshots: what was written is read, and anything less is an error."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl.weights.snapshot import (
    ALIGNMENT_BYTES,
    DATA,
    MANIFEST,
    SnapshotError,
    combined_checksum,
    config_hash,
    read_manifest,
    read_tensors,
    remove_snapshot,
    snapshot_directory,
    tensor_checksum,
    write_snapshot,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool)
TENSORS = st.dictionaries(
    st.text("abc.0", min_size=1, max_size=8),
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.booleans()),
    max_size=6,
)


def make(dtype: torch.dtype, shape: list[int], transposed: bool) -> torch.Tensor:
    numbers = torch.arange(-7, -7 + torch.Size(shape).numel()).reshape(shape).to(dtype)
    return numbers.mT if transposed and numbers.ndim >= 2 else numbers


def write(root: Path, version: int = 1) -> Path:
    tensors = {"a": torch.arange(100, dtype=torch.float32), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    write_snapshot(root, version, "hash", tensors.items())
    return snapshot_directory(root, version)


@given(TENSORS, st.integers(0, 10**6))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, drawn: dict, version: int) -> None:
    root = tmp_path_factory.mktemp("round")
    tensors = {name: make(*kind) for name, kind in drawn.items()}
    written = write_snapshot(root, version, "hash", tensors.items())
    directory = snapshot_directory(root, version)
    assert read_manifest(directory) == written
    read = dict(read_tensors(directory))
    assert list(read) == list(tensors)
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor)
    assert written.checksum == combined_checksum({name: tensor_checksum(t) for name, t in tensors.items()})
    assert all(entry.offset % ALIGNMENT_BYTES == 0 for entry in written.tensors)
    assert written.nbytes == sum(t.numel() * t.element_size() for t in tensors.values())


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_flipped_bit_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = write(tmp_path_factory.mktemp("flip"))
    entries = read_manifest(directory).tensors
    entry = data.draw(st.sampled_from(entries))
    place = entry.offset + data.draw(st.integers(0, entry.nbytes - 1))
    content = bytearray((directory / DATA).read_bytes())
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    (directory / DATA).write_bytes(content)
    with pytest.raises(SnapshotError, match=f"{entry.name} in .* does not match its checksum"):
        list(read_tensors(directory))
    assert len(list(read_tensors(directory, verify=False))) == len(entries)


def test_checksum_tells_versions_apart_but_not_order() -> None:
    assert combined_checksum({"a": "1", "b": "2"}) == combined_checksum({"b": "2", "a": "1"})
    assert combined_checksum({"a": "1", "b": "2"}) != combined_checksum({"a": "2", "b": "1"})


@pytest.mark.parametrize("file", [DATA, MANIFEST])
def test_missing_or_short_file(tmp_path: Path, file: str) -> None:
    directory = write(tmp_path)
    content = (directory / file).read_bytes()
    (directory / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(SnapshotError, match=r"shorter|no readable snapshot"):
        list(read_tensors(directory))
    (directory / file).unlink()
    with pytest.raises(SnapshotError, match=r"missing|no readable snapshot"):
        list(read_tensors(directory))


@pytest.mark.parametrize("junk", [b"", b"\xff" * 50, b"\x80", b"\x81\xa6format\x63"])
def test_junk_manifest(tmp_path: Path, junk: bytes) -> None:
    directory = write(tmp_path)
    (directory / MANIFEST).write_bytes(junk)
    with pytest.raises(SnapshotError):
        read_manifest(directory)


def test_version_is_never_reused(tmp_path: Path) -> None:
    directory = write(tmp_path)
    before = (directory / DATA).read_bytes()
    with pytest.raises(SnapshotError, match="never reused"):
        write(tmp_path)
    assert (directory / DATA).read_bytes() == before


def test_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.ones(10)
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(OSError, match="no space"):
        write_snapshot(tmp_path, 1, "hash", tensors())
    assert list(tmp_path.iterdir()) == []
    write(tmp_path)


def test_snapshot_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """While tensors still come in, no reader can find the version; a leftover of a killed writer does no harm."""
    directory = snapshot_directory(tmp_path, 1)
    seen = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "ab":
            seen.append(directory.exists())
            yield name, torch.ones(4)

    leftover = tmp_path / ".v1.unfinished"
    leftover.mkdir()
    (leftover / DATA).write_bytes(b"half")
    write_snapshot(tmp_path, 1, "hash", tensors())
    assert seen == [False, False]
    assert [path.name for path in tmp_path.iterdir()] == ["v1"]
    assert [name for name, _ in read_tensors(directory)] == ["a", "b"]


def test_removed_snapshot_stays_readable_for_who_mapped_it(tmp_path: Path) -> None:
    directory = write(tmp_path)
    read = dict(read_tensors(directory))
    remove_snapshot(tmp_path, 1)
    remove_snapshot(tmp_path, 1)
    assert not directory.exists()
    assert read["a"].sum().item() == 4950


def test_config_hash_is_about_names_and_shapes_only(tmp_path: Path) -> None:
    def of(text: str) -> str:
        (tmp_path / "config.json").write_text(text)
        return config_hash(tmp_path)

    base = of('{"hidden_size": 64, "dtype": "float32"}')
    assert of('{"dtype": "bfloat16", "transformers_version": "9", "hidden_size": 64}') == base
    assert of('{"hidden_size": 65}') != base
