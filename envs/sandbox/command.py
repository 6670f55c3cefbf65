"""Run one process with everything bounded: wall time, output, and whatever else a check watches."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from envs.errors import InfrastructureError

REAP_S = 10.0
"""How long the end of a killed process tree may take before it counts as a fault of the machine."""
POLL_S = 0.1
BEGIN_S = 60.0
SAID_BYTES = 2000


class Killed(Enum):
    WALL_TIME = "wall time"
    OUTPUT = "output"
    DISK = "disk"
    MEMORY = "memory"


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
    out_of_memory: bool = False
    """The kernel killed some of its processes."""


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
    check: Callable[[], Awaitable[Killed | None]] | None = None,
    init_pid: Callable[[], int | None] = lambda: None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    banner: bytes = b"",
) -> Finished:
    """Run `argv` in its own process group, without variables but `env`, and read all it prints.

    `banner` is what it prints when the command proper begins: output and wall time count from there, and an end before
    it, or nothing within BEGIN_S, is a fault of the machine.
    `check` is called every POLL_S, and says why the command must end.
    `init_pid` is the first process of the command's process namespace, once there is one: a child of `argv`'s process.
    To stop the command that one is killed. The kernel lets it end only when the whole namespace is empty, and its
    parent waits for it, so the end of the parent is the proof that nothing is left.
    Start it from a thread that lives on (an event loop's): the kernel ends the child when its parent *thread* ends.
    """
    feed = _memory_file(stdin)
    stream, transport, printed = await _pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=feed,
            stdout=printed,
            stderr=asyncio.subprocess.STDOUT,
            env=env or {},
            cwd=cwd,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except BaseException as error:
        transport.close()
        if isinstance(error, OSError):
            raise InfrastructureError(f"{argv[0]} cannot be started: {error}") from error
        raise
    finally:
        os.close(printed)
        if feed != asyncio.subprocess.DEVNULL:
            os.close(feed)
    output = _Output(keep_bytes)
    reader: asyncio.Future[bool] | None = None
    try:
        if banner:
            await _begin(stream, banner)
        reader = asyncio.ensure_future(_read(stream, output, kill_after_bytes))
        killed = await _watch(reader, timeout_s, check)
        if killed is not None:
            _kill(process, init_pid())
        await _end(process, stream, reader)
    except BaseException:  # cancelled, most likely: the tree ends before the caller goes on
        _kill(process, init_pid())
        await _end(process, stream, reader or asyncio.ensure_future(_read(stream, output, kill_after_bytes)))
        raise
    finally:
        transport.close()
    kept = bytes(output.head + output.tail)
    return Finished(await process.wait(), kept, output.total - len(kept), len(output.head), killed)


async def _begin(stream: asyncio.StreamReader, banner: bytes) -> None:
    try:
        async with asyncio.timeout(BEGIN_S):
            await stream.readuntil(banner)
    except asyncio.IncompleteReadError as end:
        said = end.partial[-SAID_BYTES:].decode(errors="replace").strip()
        raise InfrastructureError(f"the sandbox could not start a command: {said}") from None
    except asyncio.LimitOverrunError:
        raise InfrastructureError("the sandbox printed much, and did not start a command") from None
    except TimeoutError:
        raise InfrastructureError(f"the sandbox did not start a command within {BEGIN_S:g} s") from None


async def _watch(
    reader: asyncio.Future[bool], timeout_s: float, check: Callable[[], Awaitable[Killed | None]] | None
) -> Killed | None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        left = deadline - loop.time()
        if left <= 0:
            return Killed.WALL_TIME
        done, _ = await asyncio.wait({reader}, timeout=min(left, POLL_S) if check else left)
        if done:
            return None if reader.result() else Killed.OUTPUT
        if check is not None and (why := await check()) is not None:
            return why


async def _read(stream: asyncio.StreamReader, output: _Output, kill_after: int) -> bool:
    """True at end of file, False after too much output."""
    while chunk := await stream.read(1 << 16):
        output.add(chunk)
        if output.total > kill_after:
            return False
    return True


async def _end(process: asyncio.subprocess.Process, stream: asyncio.StreamReader, reader: asyncio.Future[bool]) -> None:
    """Wait until nobody holds the output any more, and the process is reaped."""

    async def drain() -> None:
        await asyncio.wait({reader})
        while await stream.read(1 << 16):
            pass
        await process.wait()

    end = asyncio.ensure_future(drain())
    done, _ = await asyncio.wait({end}, timeout=REAP_S)
    if not done:
        end.cancel()
        raise InfrastructureError(f"process {process.pid} was killed and did not end in {REAP_S:g} s")
    end.result()


def _kill(process: asyncio.subprocess.Process, init: int | None) -> None:
    if init is None or not _kill_child(process.pid, init):
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # nothing runs yet, or all has ended


def _kill_child(parent: int, pid: int) -> bool:
    """Kill `pid` if it is a child of `parent`, and not another process that got its number since."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
        if int(status.rpartition(")")[2].split()[1]) != parent:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, FileNotFoundError):
        return False
    finally:
        os.close(handle)
    return True


async def _pipe() -> tuple[asyncio.StreamReader, asyncio.BaseTransport, int]:
    """Our own pipe, so that a command of another user than its maker may open /dev/stdout and /dev/stderr."""
    read_end, write_end = os.pipe()
    os.fchmod(write_end, 0o622)
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", buffering=0)
    )
    return stream, transport, write_end


def _memory_file(data: bytes) -> int:
    """Standard input from memory: nothing to feed, so nothing to block on."""
    if not data:
        return asyncio.subprocess.DEVNULL
    descriptor = os.memfd_create("stdin")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
