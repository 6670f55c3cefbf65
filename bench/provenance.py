"""Where a figure comes from: command, commit, day, machine, versions."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent


def provenance(module: str, *packages: str) -> dict[str, Any]:
    """Of a study that runs as `python -m module`; `packages` are those whose versions matter."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    return {
        "command": " ".join([f"python -m {module}", *sys.argv[1:]]),
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "machine": f"{cores}, {memory:.0f} GiB, {device}; load {os.getloadavg()[0]:.1f}",
        "versions": {name: version(name) for name in packages} | {"python": platform.python_version()},
    }
