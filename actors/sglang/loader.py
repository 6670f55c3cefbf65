"""Weight loading inside the engine: SGLang calls `load_snapshot` in every scheduler process of a server.

Only an *order* travels to the server: a msgpack of where the snapshot lies, packed in one small uint8 tensor, because
SGLang hands tensors to a custom loader and nothing else. The weights are read from the snapshot's mapped file (shared
memory on a host), checked against their checksums before the model is touched, loaded through the model's own
`load_weights`, and read back and compared. An exception here would end the whole server, so every outcome, good or bad,
is written to a report file that the client reads.
"""

from __future__ import annotations

import base64
import pickle
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import torch

from actors.sglang.readback import Placement, place
from pearl.weights.snapshot import Manifest, combined_checksum, read_manifest, read_tensors, tensor_checksum


@dataclass(frozen=True, slots=True)
class Order:
    """What the engine is told to load. `report` gets the suffix `.<tensor-parallel rank>`."""

    directory: str
    version: int
    config_hash: str
    report: str


@dataclass(slots=True)
class Report:
    """What one rank did. `checksum` covers the verified tensors, as `Manifest.checksum` does for all."""

    version: int
    rank: int
    verified: int = 0
    unverified: list[str] = field(default_factory=list)
    """Names that could not be read back (a fused or sharded layout that is not known here)."""
    checksum: str = ""
    read_s: float = 0.0
    load_s: float = 0.0
    verify_s: float = 0.0
    touched: bool = False
    """The model's weights may have changed; after an error they are of no version."""
    error: str = ""


def encode_order(order: Order) -> str:
    """The order as one payload of `/update_weights_from_tensor`.

    Plain pickle, not multiprocessing's: that one moves tensors to shared memory, which a foreign process cannot attach.
    """
    tensor = torch.frombuffer(bytearray(msgpack.packb(asdict(order))), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("order", tensor)])).decode()


def read_report(order: Order, rank: int) -> Report | None:
    """The report of one rank, None if it wrote none."""
    path = Path(f"{order.report}.{rank}")
    return Report(**msgpack.unpackb(path.read_bytes())) if path.exists() else None


def load_snapshot(model: Any, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
    """SGLang's custom weight loader. Never raises; see `Report.error`."""
    order = Order(**msgpack.unpackb(named_tensors[0][1].cpu().numpy().tobytes()))
    rank, ranks = _rank()
    report = Report(order.version, rank)
    try:
        _load(model, order, report, ranks)
    except BaseException as error:
        report.error = f"{type(error).__name__}: {error}"
    path = Path(f"{order.report}.{rank}")
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(msgpack.packb(asdict(report)))
    unfinished.rename(path)


def _load(model: Any, order: Order, report: Report, ranks: int) -> None:
    began = time.monotonic()
    directory = Path(order.directory)
    manifest = read_manifest(directory)
    if manifest.version != order.version:
        report.error = f"{directory} holds version {manifest.version}, not {order.version}"
        return
    if manifest.config_hash != order.config_hash:
        report.error = f"{directory} is of a model with another configuration than the engine's"
        return
    tensors = list(read_tensors(directory, verify=True))
    placement = place(model, manifest)
    if problem := _problem(placement, ranks):
        report.error = problem
        return
    report.read_s = time.monotonic() - began
    began = time.monotonic()
    report.touched = True
    model.load_weights(iter(tensors))
    report.load_s = time.monotonic() - began
    began = time.monotonic()
    _verify(placement, manifest, report, ranks)
    report.verify_s = time.monotonic() - began


def _problem(placement: Placement, ranks: int) -> str:
    """What speaks against loading, before the model is touched. A sharded model has other shapes than the snapshot."""
    if ranks > 1:
        return ""
    if placement.mismatched:
        return "snapshot and engine differ: " + "; ".join(placement.mismatched[:3])
    if placement.missing and not placement.unknown:
        return f"the snapshot lacks {', '.join(placement.missing[:3])} ({len(placement.missing)} tensors in all)"
    return ""


def _verify(placement: Placement, manifest: Manifest, report: Report, ranks: int) -> None:
    checksums: dict[str, str] = {}
    for entry in manifest.tensors:
        view = placement.views.get(entry.name)
        if view is None:
            report.unverified.append(entry.name)
            continue
        checksums[entry.name] = tensor_checksum(view)
        if checksums[entry.name] != entry.checksum:
            report.error = f"{entry.name} reads back otherwise than it was written"
            return
    report.verified = len(checksums)
    report.checksum = combined_checksum(checksums)


def _rank() -> tuple[int, int]:
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return parallel.tp_rank, parallel.tp_size
