"""`pearl export`: the weights that a run kept, as a Hugging Face directory.

Configuration and tokenizer come from the model that was trained, the tensors from the snapshot, bit by bit; each one's
checksum is verified on the way. The directory appears by one rename.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pearl.errors import UserError
from pearl.kept import KeptWeights, kept_weights
from pearl.weights.snapshot import SnapshotError, TensorEntry, read_manifest, read_tensors

COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.py")
"""What lies beside the weights of a model: configurations, tokenizer, chat template, licence, code."""
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 4_000_000_000


@dataclass(frozen=True, slots=True)
class Exported:
    output: str
    run: str
    version: int
    tensors: int
    nbytes: int
    dtype: str
    checksum: str
    """Over all tensors: the one that trainer and engines reported for this version."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def export(
    run: Path, output: Path | None = None, version: int | None = None, *, shard_bytes: int = SHARD_BYTES
) -> Exported:
    """Write the run's weights to `output` (default: `run/export/v<version>`), which must be new or empty.

    Raises UserError, and leaves nothing, if something is missing, damaged or cannot be written.
    """
    kept = kept_weights(run, version)
    target = (output or kept.run / "export" / f"v{kept.version}").expanduser().absolute()
    _require_free(target)
    unfinished = target.with_name(f".{target.name}.unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        manifest = read_manifest(kept.snapshot)
        dtype = _main_dtype(manifest.tensors)
        _copy_companions(kept.model_directory, unfinished, dtype)
        _write_tensors(kept, unfinished, shard_bytes)
        unfinished.rename(target)
    except SnapshotError as error:
        raise UserError(str(error), "Choose another version; a damaged snapshot cannot be repaired.") from error
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror or error})", "Choose another place.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return Exported(
        str(target), str(kept.run), kept.version, len(manifest.tensors), manifest.nbytes, dtype, manifest.checksum
    )


def _require_free(target: Path) -> None:
    try:
        taken = target.exists() and (not target.is_dir() or any(target.iterdir()))
    except OSError as error:
        raise UserError(f"{target} cannot be read ({error.strerror})", "Choose another place.") from error
    if taken:
        raise UserError(f"{target} exists and is not an empty directory", "Choose another --output.")


def _main_dtype(entries: tuple[TensorEntry, ...]) -> str:
    """The dtype of most bytes."""
    by_dtype: dict[str, int] = {}
    for entry in entries:
        by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.nbytes
    return max(by_dtype, key=lambda dtype: by_dtype[dtype])


def _copy_companions(model: Path, target: Path, dtype: str) -> None:
    for pattern in COMPANIONS:
        for path in model.glob(pattern):
            if path.is_file() and not path.name.endswith(".index.json"):
                shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)  # its older name
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_tensors(kept: KeptWeights, target: Path, shard_bytes: int) -> None:
    """One `model.safetensors`, or numbered shards with an index where it would be larger than `shard_bytes`."""
    shards = list(_shards(read_manifest(kept.snapshot).tensors, shard_bytes))
    tensors = read_tensors(kept.snapshot)
    metadata = {"format": "pt", "pearl_version": str(kept.version)}
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        single = len(shards) == 1
        name = "model.safetensors" if single else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(_take(tensors, shard), target / name, metadata=metadata)
        (target / name).chmod(0o644)  # safetensors makes files for their owner alone
        places |= dict.fromkeys((entry.name for entry in shard), name)
    if len(shards) > 1:
        size = sum(entry.nbytes for shard in shards for entry in shard)
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (target / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(entries: tuple[TensorEntry, ...], limit: int) -> Iterator[list[TensorEntry]]:
    shard: list[TensorEntry] = []
    for entry in entries:
        if shard and sum(e.nbytes for e in shard) + entry.nbytes > limit:
            yield shard
            shard = []
        shard.append(entry)
    yield shard


def _take(tensors: Iterator[tuple[str, torch.Tensor]], shard: list[TensorEntry]) -> dict[str, torch.Tensor]:
    """The next tensors of the snapshot, which come in the order of its manifest."""
    taken = {}
    for entry in shard:
        name, tensor = next(tensors)
        assert name == entry.name, f"{name} came where {entry.name} was listed"
        taken[name] = tensor
    return taken
