"""How much memory the processes of one sandbox take, seen from outside; no privilege and no control group needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

RESIDENT = re.compile(rb"^Rss(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
SHARED_OUT = re.compile(rb"^Pss_(?:Anon|Shmem):\s+(\d+) kB", re.MULTILINE)
KB = 1024


def memory_over(init: int, limit: int) -> bool:
    """Whether the process `init` and all its descendants hold more than `limit` bytes, memory files included.

    Resident sizes are quickly read, but count what processes share once for each; only if they exceed the limit the
    shares are asked for. Code, and files of disks, which the kernel can drop, do not count; nor does kernel memory.
    """
    pids = list(descendants(init))
    files = _memory_files(pids)
    if files + sum(_sum(pid, "status", RESIDENT) for pid in pids) <= limit:
        return False
    return files + sum(_share(pid) for pid in pids) > limit


def descendants(pid: int) -> Iterator[int]:
    """`pid` and all below it, as they are now."""
    waiting = [pid]
    while waiting:
        pid = waiting.pop()
        yield pid
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_bytes().split())
        except OSError:
            continue  # gone meanwhile


def _sum(pid: int, file: str, pattern: re.Pattern[bytes]) -> int:
    try:
        return KB * sum(int(number) for number in pattern.findall(Path(f"/proc/{pid}/{file}").read_bytes()))
    except (FileNotFoundError, ProcessLookupError):
        return 0  # gone meanwhile


def _share(pid: int) -> int:
    try:
        return _sum(pid, "smaps_rollup", SHARED_OUT)
    except PermissionError:  # some kernels show it to root only
        return _sum(pid, "status", RESIDENT)


def _memory_files(pids: list[int]) -> int:
    """Bytes in anonymous memory files (memfd): no process needs to have them mapped."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                if str(descriptor.readlink()).startswith("/memfd:"):
                    info = descriptor.stat()
                    found[info.st_dev, info.st_ino] = 512 * info.st_blocks
        except OSError:
            continue
    return sum(found.values())
