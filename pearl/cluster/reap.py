"""`python -m pearl.cluster.reap TAG`: end every process on this host that belongs to a worker or a whole cluster.

They are found by an environment variable that children inherit, so also those whose parent is gone (an engine in a
session of its own). Prints what survives, one line each, then LOOKED, or else nobody looked. `--list` ends nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time

import psutil

TAG = "PEARL_WORKER"
"""Environment variable of a worker and of all that it starts: `<cluster>/<slot>#<life>`."""
LOOKED = "that is all"
GONE_S = 10.0
"""A killed process is gone at once, unless the kernel holds it (a dead disk, a GPU that fell off the bus)."""


def tagged(tag: str) -> list[psutil.Process]:
    """Processes on this host with that tag: of one life, or, up to its "#" or "/", of a slot or a whole cluster."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            own = process.environ().get(TAG, "")
            same = own.startswith(tag) if tag.endswith(("/", "#")) else own == tag
            if own and same and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def reap(tag: str, timeout_s: float = GONE_S) -> list[psutil.Process]:
    """Kill them, and what they start meanwhile; those that are left after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while (found := tagged(tag)) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(found, timeout=min(1.0, timeout_s))
    return found


def describe(processes: list[psutil.Process]) -> list[str]:
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(f"process {process.pid}: {' '.join(process.cmdline()[:4])}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tag")
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    lines = describe(tagged(args.tag) if args.list else reap(args.tag))
    print("\n".join([*lines, LOOKED]))


if __name__ == "__main__":
    main()
