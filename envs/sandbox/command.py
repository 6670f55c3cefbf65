"""Run one process with everything bounded: wall time, output, and whatever else a check watches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from envs.errors import InfrastructureError

REAP_S = 10.0
"""How long the end of a killed process tree may take before it counts as a fault of the machine."""
POLL_S = 0.25


class Killed(Enum):
    WALL_TIME = "wall time"
    OUTPUT = "output"
    CHECK = "check"


@dataclass(frozen=True, slots=True)
class Finished:
    return_code: int
    output: bytes
    """The head and the tail, if `cut` is not 0."""
    cut: int
    """Bytes left out between head and tail."""
    head: int
    """Length of the head."""
    killed: Killed | None


class _Output:
    """Keeps the first and the last half of what a budget allows."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.total = 0
        self.head = bytearray()
        self.tail = bytearray()

    def add(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self.budget - self.budget // 2 - len(self.head)
        self.head += chunk[:room]
        self.tail += chunk[max(room, 0) :]
        half = self.budget // 2
        if len(self.tail) > half:
            del self.tail[: len(self.tail) - half]


async def run_bounded(
    argv: Sequence[str],
    *,
    timeout_s: float,
    keep_bytes: int,
    kill_after_bytes: int,
    stdin: bytes = b"",
    pass_fds: Sequence[int] = (),
    over_limit: Callable[[], Awaitable[bool]] | None = None,
) -> Finished:
    """Run `argv` with an empty environment in its own process group and read all it prints.

    The output pipe is held by every descendant: its end of file is the proof that all of them are gone. Start it
    from a thread that lives on (an event loop's): the kernel ends such children when their parent *thread* ends.
    """
    feed = _memory_file(stdin)
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=feed,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={},
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except OSError as error:
        raise InfrastructureError(f"{argv[0]} cannot be started: {error}") from error
    finally:
        if feed != asyncio.subprocess.DEVNULL:
            os.close(feed)
    assert process.stdout is not None
    output = _Output(keep_bytes)
    reader = asyncio.ensure_future(_read(process.stdout, output, kill_after_bytes))
    try:
        killed = await _watch(reader, timeout_s, over_limit)
        if killed is not None:
            _kill(process)
            output_end = asyncio.ensure_future(_drain(process.stdout, reader))
            done, _ = await asyncio.wait({output_end}, timeout=REAP_S)
            if not done:
                output_end.cancel()
                raise InfrastructureError(f"process {process.pid} was killed and did not end in {REAP_S:g} s")
        return_code = await process.wait()
    finally:
        # Also on cancellation. The group's number stays taken until the leader is reaped.
        if process.returncode is None:
            _kill(process)
        reader.cancel()
    kept = bytes(output.head + output.tail)
    return Finished(return_code, kept, output.total - len(kept), len(output.head), killed)


async def _watch(
    reader: asyncio.Future[bool], timeout_s: float, over_limit: Callable[[], Awaitable[bool]] | None
) -> Killed | None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        left = deadline - loop.time()
        if left <= 0:
            return Killed.WALL_TIME
        done, _ = await asyncio.wait({reader}, timeout=min(left, POLL_S) if over_limit else left)
        if done:
            return None if reader.result() else Killed.OUTPUT
        if over_limit is not None and await over_limit():
            return Killed.CHECK


async def _read(stream: asyncio.StreamReader, output: _Output, kill_after: int) -> bool:
    """True at end of file, False after too much output."""
    while chunk := await stream.read(1 << 16):
        output.add(chunk)
        if output.total > kill_after:
            return False
    return True


async def _drain(stream: asyncio.StreamReader, reader: asyncio.Future[bool]) -> None:
    if not reader.done():
        await asyncio.wait({reader})
    while await stream.read(1 << 16):
        pass


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        process.kill()


def _memory_file(data: bytes) -> int:
    """Standard input from memory: nothing to feed, so nothing to block on."""
    if not data:
        return asyncio.subprocess.DEVNULL
    descriptor = os.memfd_create("stdin")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
