"""Files in shared memory that SGLang makes and, if it is killed, leaves behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def shared_files(pid: int) -> set[Path]:
    """Those that the process has mapped; empty if it is gone."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    paths = {Path(line.split(maxsplit=5)[-1]) for line in maps.splitlines()}
    return {path for path in paths if path.parent == Path("/dev/shm") and path.name.startswith("sglang_loads_")}


def remove_shared_files_of_group(group: int) -> None:
    """Remove what the living processes of a group have mapped."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == group:
                    for path in shared_files(int(entry.name)):
                        path.unlink(missing_ok=True)
