"""File locks between processes: taken within a deadline, dropped by the kernel however their holder ends."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.05


@contextlib.contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold the lock file `path`, which is made if need be. Raises TimeoutError, which names it, after `timeout_s`.

    Blocks the thread: a lock that is held for long belongs in a thread of its own.
    """
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process holds the lock {path} for more than {timeout_s:g} s") from None
                time.sleep(POLL_S)
        yield
