"""Inside an engine: which memory a release is about, and on a CPU, to really give it back.

On a GPU SGLang's torch_memory_saver unmaps weights and KV cache and keeps their addresses. On a CPU it does nothing; so
there the kernel is told that the pages are not needed (`MADV_DONTNEED`): resident memory falls at once, addresses stay,
which KV transfer has registered, and the pages read as zeros until they are written again. Either way the bytes that a
release names are written to a report, for the client to hold against what it measures.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPORT = "PEARL_ENGINE_MEMORY"
"""Environment variable with the path of the report; it gets the suffix `.<tensor-parallel rank>`."""
MADV_DONTNEED = 4

Ranges = list[tuple[int, int]]
"""Address and bytes."""


def install(on_cpu: bool) -> None:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Updater

    release = Updater.release_memory_occupation

    def release_memory_occupation(self: Any, request: Any) -> Any:
        ranges = {"weights": _weights(self.tp_worker), "kv_cache": _kv_cache(self.scheduler)}
        if on_cpu and not isinstance(self.memory_saver_adapter, HostMemorySaver):
            self.memory_saver_adapter = HostMemorySaver(ranges)
        answer = release(self, request)
        _write({tag: sum(size for _, size in parts) for tag, parts in ranges.items()})
        return answer

    Updater.release_memory_occupation = release_memory_occupation


def read_report(path: Path, ranks: int) -> dict[str, int]:
    """Bytes that the last release named, by tag, of all ranks together; empty if a rank wrote none."""
    total: dict[str, int] = {}
    for rank in range(ranks):
        file = path.with_name(f"{path.name}.{rank}")
        if not file.exists():
            return {}
        for tag, size in json.loads(file.read_text()).items():
            total[tag] = total.get(tag, 0) + size
    return total


def used_bytes(device: str, resident: Callable[[], int]) -> int:
    """Memory in use where an engine has its weights: what `resident` says, or the driver's count of its devices."""
    if device == "cpu":
        return resident()
    import pynvml

    pynvml.nvmlInit()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return sum(int(pynvml.nvmlDeviceGetMemoryInfo(_device(name)).used) for name in names)
    finally:
        pynvml.nvmlShutdown()


def _device(name: str) -> Any:
    """By index or by UUID, as CUDA_VISIBLE_DEVICES may say."""
    import pynvml

    if name.strip().isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    return pynvml.nvmlDeviceGetHandleByUUID(name.strip())


class HostMemorySaver:
    """In the place of SGLang's adapter to torch_memory_saver."""

    enabled = True

    def __init__(self, ranges: dict[str, Ranges]) -> None:
        self._ranges = ranges
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def pause(self, tag: str) -> None:
        """Whole pages inside each range go; what a page shares with others stays."""
        for address, size in self._ranges.get(tag, ()):
            begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
            end = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
            if end > begin and self._madvise(begin, end - begin, MADV_DONTNEED) != 0:
                raise OSError(ctypes.get_errno(), f"madvise of {end - begin} bytes failed")

    def resume(self, tag: str) -> None:
        """Write zeros everywhere: the memory is taken now, not page by page while others count on it."""
        for address, size in self._ranges.get(tag, ()):
            ctypes.memset(address, 0, size)


def _weights(worker: Any) -> Ranges:
    model = worker.model_runner.model
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return sorted(storages.items())


def _kv_cache(scheduler: Any) -> Ranges:
    addresses, sizes, _ = scheduler.token_to_kv_pool_allocator.get_kvcache().get_contiguous_buf_infos()
    return list(zip(addresses, sizes, strict=True))


def _write(named: dict[str, int]) -> None:
    from sglang.srt.runtime_context import get_parallel

    path = Path(f"{os.environ[REPORT]}.{get_parallel().tp_rank}")
    path.write_text(json.dumps(named))
