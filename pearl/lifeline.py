"""A process that must not outlive its owner holds the read end of a pipe; the owner holds the write end.

The kernel closes the write end however the owner ends (SIGKILL included), the reader sees end-of-file and acts. Unlike
PR_SET_PDEATHSIG it does not depend on which *thread* started the process, and it takes the whole process group along.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable


def end_with_owner(fd: int, on_owner_gone: Callable[[], None] | None = None) -> None:
    """Watch `fd` (read end of the owner's pipe) in a daemon thread; at end-of-file call `on_owner_gone`.

    Without a callback the whole process group is killed, which must be this process's own.
    """

    def kill_group() -> None:
        os.killpg(os.getpgid(0), signal.SIGKILL)

    def watch() -> None:
        while os.read(fd, 4096):
            pass
        (on_owner_gone or kill_group)()

    threading.Thread(target=watch, name="pearl-lifeline", daemon=True).start()
