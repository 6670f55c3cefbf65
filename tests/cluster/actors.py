"""Actors that misbehave in the ways that calls must survive."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
from pathlib import Path


class Odd:
    def __init__(self) -> None:
        self.entered = False

    async def echo(self, value: object) -> object:
        return value

    async def never(self) -> None:
        self.entered = True
        await asyncio.Event().wait()

    async def has_entered(self) -> bool:
        return self.entered

    async def raises(self) -> None:
        raise ValueError("what went wrong")

    async def unpackable(self) -> object:
        return object()

    async def raises_unpicklable(self) -> None:
        error = ValueError("odd")
        error.lock = threading.Lock()  # type: ignore[attr-defined]
        raise error

    def pid(self) -> int:
        return os.getpid()

    def start_hanging_child(self) -> int:
        """A process in a session of its own that is stopped, as an engine that hangs; its number."""
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        os.kill(child.pid, signal.SIGSTOP)
        return child.pid

    def thread(self) -> str:
        return threading.current_thread().name

    async def hold(self, entered: str, until: str) -> None:
        """Blocks the event loop until somebody writes to the pipe `until`; first writes to the pipe `entered`."""
        Path(entered).write_text("here")
        Path(until).read_text()

    async def burn(self, entered: str, until: str) -> None:
        """As `hold`, but computes in Python until the pipe `until` is removed."""
        Path(entered).write_text("here")
        while Path(until).exists():
            sum(i * i for i in range(100_000))
