"""SIGTERM is a notice, not an exit: Slurm, Kubernetes and systemd send it some time before they kill.

The kernel's signal handler writes to a socket that a thread reads, so neither a blocked event loop nor a busy main
thread delays the notice.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
from collections.abc import Callable

from pearl.cluster.notices import Notice


class SigtermNotice:
    """Reads SIGTERM and SIGINT from the moment it is made (in the main thread) until the process ends."""

    def __init__(
        self, grace_s: float, report: Callable[[Notice], None], end: Callable[[str], None], echo_s: float = 0.0
    ) -> None:
        """The first SIGTERM calls `report`; a second one, SIGINT, or `grace_s` after the first call `end(why)` once.

        A SIGTERM within `echo_s` of the first one is an echo of it. Both are called in threads of their own.
        """
        self.grace_s, self.report, self.end, self.echo_s = grace_s, report, end, echo_s
        self._read, write = socket.socketpair()
        write.setblocking(False)
        self._write = write  # must outlive the handler
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # without a Python handler nothing is written
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="pearl-sigterm", daemon=True).start()

    def _watch(self) -> None:
        deadline: float | None = None
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not select.select([self._read], [], [], left)[0]:
                self.end("the time that SIGTERM left is over")
                return
            for number in self._read.recv(64):
                if number == signal.SIGTERM and deadline and time.monotonic() < deadline - self.grace_s + self.echo_s:
                    continue
                if number == signal.SIGINT or (number == signal.SIGTERM and deadline is not None):
                    self.end("SIGINT" if number == signal.SIGINT else "a second SIGTERM")
                    return
                if number == signal.SIGTERM:
                    deadline = time.monotonic() + self.grace_s
                    notice = Notice(self.grace_s, "SIGTERM")
                    threading.Thread(target=self.report, args=(notice,), name="pearl-report", daemon=True).start()
