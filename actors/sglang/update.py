"""One weight update of an engine: the session around it, the order to its loader, and the reports of its ranks."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from actors.sglang.args import LOADER
from actors.sglang.errors import EngineError, WeightLoadError
from actors.sglang.http import EngineHttp
from actors.sglang.loader import Order, Report, encode_order, read_report

SESSION_END_S = 5.0
"""To end a session after a failure; a session that stays open is ended by the next update."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A snapshot that every rank loaded. With nothing unverified, `checksum` equals the manifest's."""

    version: int
    checksum: str
    verified: int
    """Tensors that were read back and found equal; the least of all ranks."""
    unverified: tuple[str, ...]
    read_s: float
    load_s: float
    verify_s: float


async def update_weights(http: EngineHttp, order: Order, ranks: int, *, timeout_s: float) -> Loaded:
    """Load one snapshot into an engine that has no running request. Raises WeightLoadError with the rank's reason."""
    for rank in range(ranks):
        Path(f"{order.report}.{rank}").unlink(missing_ok=True)
    body = {
        "serialized_named_tensors": [encode_order(order)] * ranks,
        "load_format": LOADER,
        "selector": "target",
        "weight_version": str(order.version),
        "flush_cache": True,
    }
    try:
        await http.post("/begin_weight_update", {"selector": "target"}, timeout_s=timeout_s)
    except EngineError as error:
        if "already open" not in str(error):
            raise
        await http.post("/end_weight_update", {}, timeout_s=timeout_s)  # left by an update that timed out
        await http.post("/begin_weight_update", {"selector": "target"}, timeout_s=timeout_s)
    try:
        await http.post("/update_weights_from_tensor", body, timeout_s=timeout_s)
    except BaseException:
        with contextlib.suppress(EngineError):
            await http.post("/end_weight_update", {}, timeout_s=SESSION_END_S)
        raise
    await http.post("/end_weight_update", {}, timeout_s=timeout_s)
    return merge([read_report(order, rank) for rank in range(ranks)], order.version)


def merge(reports: list[Report | None], version: int) -> Loaded:
    """One answer of all ranks; raises WeightLoadError for the first that failed."""
    good: list[Report] = []
    for rank, report in enumerate(reports):
        if report is None or report.error:
            what = report.error if report else "it left no report"
            harm = "" if report and not report.touched else " (its weights may be damaged now)"
            raise WeightLoadError(f"the engine did not load version {version}: {what}{harm}; rank {rank}")
        good.append(report)
    return Loaded(
        version=version,
        checksum=good[0].checksum,
        verified=min(report.verified for report in good),
        unverified=tuple(sorted({name for report in good for name in report.unverified})),
        read_s=max(report.read_s for report in good),
        load_s=max(report.load_s for report in good),
        verify_s=max(report.verify_s for report in good),
    )
